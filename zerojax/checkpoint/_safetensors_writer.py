"""Writing safetensors files a block of rows at a time; the library's writer wants whole tensors."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax._tree import num_bytes
from zerojax._types import Shape
from zerojax.checkpoint._files import sync_folder, write_synced
from zerojax.checkpoint._safetensors import DTYPES, INDEX_SUFFIX, SUFFIX

METADATA = "__metadata__"
#: JAX's name of a dtype to the format's.
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is to be written."""

    name: str  # unlike any other in the same files
    shape: Shape  # of the whole
    dtype: str  # as NumPy and JAX name it: "float32", "bfloat16"
    #: returns consecutive blocks of rows, [rows, *shape[1:]], or one without dims; called once,
    #: when its turn comes
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return num_bytes(self.shape, self.dtype)


def write(
    path: Path, tensors: Sequence[Tensor], *, metadata: Mapping[str, str], max_file_bytes: int
) -> list[Path]:
    """Write tensors to one file, or to several with an index, holding one block at a time.

    Nothing has its name before all of it is on disk; the index gets its own last, and is the last
    of the paths that come back. Arguments and errors are those of `export_safetensors`.
    """
    _check(path, tensors, max_file_bytes)
    groups = _group(tensors, max_file_bytes)
    contents: list[Iterable[bytes | memoryview]] = [
        itertools.chain([_header(group, metadata)], *map(_bytes_of, group)) for group in groups
    ]
    outputs, index = [path], path.with_name(f"{path.stem}{INDEX_SUFFIX}")
    if len(groups) > 1:
        numbers = range(1, len(groups) + 1)
        names = [f"{path.stem}-{i:05}-of-{len(groups):05}{SUFFIX}" for i in numbers]
        outputs = [*map(path.with_name, names), index]
        contents.append([_index(names, groups, metadata)])
    for output in dict.fromkeys((*outputs, path, index)):
        if output.exists():
            raise FileExistsError(f"{output} exists already; remove it or write to another name")
    partials = [output.with_name(f"{output.name}.partial") for output in outputs]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for partial, content in zip(partials, contents, strict=True):
            write_synced(partial, content)
        for partial, output in zip(partials, outputs, strict=True):
            partial.replace(output)
    finally:
        for partial in partials:  # there only after an exception
            partial.unlink(missing_ok=True)
    sync_folder(path.parent)
    return outputs


def _check(path: Path, tensors: Sequence[Tensor], max_file_bytes: int) -> None:
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} must end in {SUFFIX}")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    seen = {METADATA}
    for tensor in tensors:
        if tensor.name in seen:
            raise ValueError(f"{path}: the name {tensor.name!r} is taken; rename the tensor")
        seen.add(tensor.name)
        if tensor.dtype not in CODES:
            raise ValueError(
                f"{path}: {tensor.name!r} is {tensor.dtype}, which safetensors has not; convert it "
                f"to one of {', '.join(CODES)}"
            )


def _group(tensors: Sequence[Tensor], max_file_bytes: int) -> list[list[Tensor]]:
    """Part tensors into files, in their order; within a file wider dtypes come first.

    So each tensor begins at a multiple of its element's size.
    """
    groups: list[list[Tensor]] = [[]]
    for tensor in tensors:
        held = sum(one.num_bytes for one in groups[-1])
        if groups[-1] and held + tensor.num_bytes > max_file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    return [sorted(group, key=lambda one: -jnp.dtype(one.dtype).itemsize) for group in groups]


def _header(group: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return length and header; the data after them begin at a multiple of eight."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    start = 0
    for one in group:
        offsets = [start, start := start + one.num_bytes]
        header[one.name] = {"dtype": CODES[one.dtype], "shape": one.shape, "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    for block in tensor.blocks():
        yield block.reshape(-1).view(np.uint8).data  # a copy only if it is not contiguous
        del block  # before the next one is made


def _index(
    files: Sequence[str], groups: Sequence[Sequence[Tensor]], metadata: Mapping[str, str]
) -> bytes:
    """Return the index of several files, as Hugging Face writes it."""
    total = sum(tensor.num_bytes for group in groups for tensor in group)
    pairs = zip(files, groups, strict=True)
    names = {tensor.name: file for file, group in pairs for tensor in group}
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": names}
    return json.dumps(index, ensure_ascii=False, indent=2).encode() + b"\n"
