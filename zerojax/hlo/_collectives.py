"""Collectives of a compiled program: what one moves, how often, and between which devices."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from zerojax.hlo._values import Frame, Value
from zerojax.hlo._walk import Loop, num_runs

Groups = tuple[tuple[int, ...], ...]

# {{0,1},{2,3}}; {} is all devices
_LIST = re.compile(r"\{(?:\{[\d,\s]*\}(?:,\s*\{[\d,\s]*\})*)?\}")
# [2,4]<=[4,2]T(1,0): 0 to 7 as 4 x 2, transposed, as two groups of four; of device_ids, [4,2]T(1,0)
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b','a':(1)2}
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(((?:[^()]|\([^()]*\))*)\))?\s*\{([^}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Record one tensor that one instruction moves; a combined instruction gives several records.

    `shape` is the whole: what a gather returns, what a reduction, a scatter or a permute takes.
    `spelling` tells how the backend wrote it: "all-reduce-scatter fusion" (TPU), "all-reduce +
    slice" (an all-reduce of which each device keeps one part), "all-reduce of parts" (a gather as
    the sum of tensors that are zero but for one part), "windowed all-gather" and "windowed
    reduce-scatter" (permutes that a matmul overlaps), "megascale" (between TPU slices), or `op`.
    """

    op: str
    spelling: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bits: int = field(repr=False)
    groups: Groups = field(repr=False)  # of a permute: (source, target) pairs
    group_size: int
    loops: tuple[Loop, ...] = field(default=(), repr=False)  # outermost first
    branches: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    # whether it could have been added to another all-reduce's operand
    is_added: bool = field(default=False, repr=False)
    combined: int = 1  # how many tensors the instruction carries
    part: int = field(default=0, repr=False)  # which of them this is
    frame: Frame = field(repr=False, compare=False)  # where the instruction stands
    op_name: str = field(default="", repr=False)
    source: str = ""  # file:line

    @property
    def computation(self) -> str:
        return self.frame.computation.name

    @property
    def operand(self) -> Value:
        operands = self.frame.computation.by_name[self.name].operands
        return Value(self.frame, operands[min(self.part, len(operands) - 1)], None)

    @property
    def result(self) -> Value:
        return Value(self.frame, self.name, self.part if self.combined > 1 else None)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def trips(self) -> tuple[int | None, ...]:
        return tuple(loop.trip_count for loop in self.loops)

    @property
    def runs(self) -> int:
        """Count how often a step runs it; a loop of unknown length counts as one turn."""
        return num_runs(self.loops)

    @property
    def moved_elements(self) -> float:
        """Count the elements that a device sends in a step, by the ring algorithm.

        (n-1)/n of the whole for a gather, a scatter and an all-to-all over n devices, twice that
        for an all-reduce, the whole for a permute or a broadcast (Patarasuk and Yuan, 2009).
        """
        ring = (self.group_size - 1) / self.group_size
        moves = float(self.group_size > 1)
        if self.op == "collective-permute":
            moves = float(any(source != target for source, target in self.groups))
        whole = {"collective-permute": moves, "collective-broadcast": moves, "all-reduce": 2 * ring}
        return self.runs * self.elements * whole.get(self.op, ring)

    @property
    def moved_bytes(self) -> float:
        return self.moved_elements * self.item_bits / 8


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Hold what was read: records, and the lines with a collective that could not be."""

    records: tuple[Collective, ...]
    unread: tuple[str, ...]


def sum_moved(records: Iterable[Any], name: str = "moved_elements", depth: int = 0) -> float:
    """Add the moved elements, or another attribute, with each conditional's worst branch.

    Records are collectives, or anything that has their `branches`; `depth` conditionals are around.
    """
    total = 0.0
    inside: dict[str, dict[int, list[Any]]] = {}
    for record in records:
        if len(record.branches) == depth:
            total += getattr(record, name)
        else:
            conditional, branch = record.branches[depth]
            inside.setdefault(conditional, {}).setdefault(branch, []).append(record)
    for branches in inside.values():
        total += max(sum_moved(branch, name, depth + 1) for branch in branches.values())
    return total


@lru_cache(maxsize=4096)
def parse_groups(text: str, num_devices: int) -> Groups | None:
    """Read the value of `replica_groups=` in any of its spellings, or return None."""
    if (groups := parse_pairs(text)) is not None:
        return groups or (tuple(range(num_devices)),)
    if (match := _IOTA.match(text)) and match[1]:
        return tuple(map(tuple, _iota(match).reshape(_numbers(match[1])).tolist()))
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
    return tuple(map(tuple, ids[order].reshape(-1, width).tolist()))


def _iota(match: re.Match[str]) -> np.ndarray:
    ids = np.arange(math.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
    return (ids.transpose(_numbers(match[3])) if match[3] else ids).ravel()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
