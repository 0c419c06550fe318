"""Replica groups: which devices a collective connects, and along which axes of the mesh. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

Groups = tuple[tuple[int, ...], ...]

# {{0,1},{2,3}}
_LIST = re.compile(r"\{(?:\{[\d,\s]*\}(?:,\s*\{[\d,\s]*\})*)?\}")
# [2,4]<=[4,2]T(1,0): 0 to 7 as 4 x 2, transposed, as two groups of four; of device_ids, [4,2]T(1,0)
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")


@lru_cache(maxsize=4096)
def parse_groups(text: str, num_devices: int) -> Groups | None:
    """Read the value of `replica_groups=` in any of its spellings, or return None.

    The spellings: `{{0,1},{2,3}}`, `{}` (all devices), the iota `[2,4]<=[4,2]T(1,0)`, and mesh axes
    `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b','a':(1)2}`.
    """
    if match := _LIST.match(text):
        groups = tuple(_numbers(group) for group in re.findall(r"\{([\d,\s]+)\}", match[0]))
        return groups or (tuple(range(num_devices)),)
    if (match := _IOTA.match(text)) and match[1]:
        return _rows(_iota(match).reshape(_numbers(match[1])))
    match = _MESH.match(text)
    return match and _mesh_groups(match[1], match[2], match[3])


def parse_pairs(text: str) -> Groups | None:
    """Read the value of `source_target_pairs=`, such as `{{0,1},{1,0}}`, or return None."""
    match = _LIST.match(text)
    return tuple(_numbers(p) for p in re.findall(r"\{([\d,\s]+)\}", match[0])) if match else None


def mesh_axes(
    groups: Iterable[Sequence[int]], axis_sizes: Mapping[str, int], *, pairs: bool = False
) -> tuple[str, ...]:
    """Name the mesh axes along which groups of devices (or source-target pairs) extend.

    On {"x": 2, "y": 4}, ((0, 1, 2, 3), (4, ...)) extend along ("y",), ((0, 4), ...) along ("x",)
    and ((0, 1), (2, 3), ...) along ("y[2/4]",).

    `axis_sizes` is `mesh.shape`; ids count the mesh's devices in order, as compiled programs do. An
    axis that a group covers in part is written "data[4/8]". ValueError for an id beyond the mesh.
    """
    sizes = tuple(axis_sizes.values())
    spans = dict.fromkeys(axis_sizes, 1)
    for group in groups:
        ids = np.asarray(group, dtype=np.int64)
        if ids.size and ids.max() >= math.prod(sizes):
            raise ValueError(
                f"Device {ids.max()} is not of the mesh {dict(axis_sizes)}, which has "
                f"{math.prod(sizes)} devices: pass the mesh that the program was compiled for."
            )
        for axis, coordinates in zip(axis_sizes, np.unravel_index(ids, sizes), strict=True):
            spans[axis] = max(spans[axis], len(np.unique(coordinates)))
    return tuple(
        axis if pairs or span == axis_sizes[axis] else f"{axis}[{span}/{axis_sizes[axis]}]"
        for axis, span in spans.items()
        if span > 1
    )


def _mesh_groups(axes: str, device_ids: str | None, grouped: str) -> Groups | None:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    if device_ids:
        match = _IOTA.match(device_ids.strip())
        ids = _iota(match) if match else np.array(_numbers(device_ids))
    if ids.size != math.prod(sizes.values()):
        return None
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), ids.size)  # [axis, device]
    outside, inside, width = dict(zip(sizes, places, strict=True)), [], 1
    # 'b':(2)4 of an axis of 16 is the digit of 4 after the first 2: i // 2 % 4
    for name, pre, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped):
        count = int(size or sizes.get(name, 1))
        stride, rest = divmod(sizes.get(name, 0), int(pre or 1) * count)
        if not stride or rest:
            return None
        digit = outside[name] // stride % count
        outside[name] = outside[name] - digit * stride
        inside.append(digit)
        width *= count
    order = np.lexsort((*inside[::-1], *list(outside.values())[::-1]))
    return _rows(ids[order].reshape(-1, width))


def _iota(match: re.Match[str]) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
    return (ids.transpose(_numbers(match[3])) if match[3] else ids).ravel()


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in array.tolist())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
