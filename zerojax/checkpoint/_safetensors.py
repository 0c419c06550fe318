"""Files of the safetensors format, written and read as streams of blocks.

The format's own package writes only what is whole in memory, and reads no float8 with numpy.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from zerojax.checkpoint._durable import sync_folder
from zerojax.checkpoint._safetensors_header import (
    CODES,
    DTYPES,
    INDEX_SUFFIX,
    METADATA,
    SUFFIX,
    encode_header,
    find_file,
    read_headers,
)

BLOCK_BYTES = 64 * 2**20
#: A row this long is worth a seek to the part of it that is wanted; shorter ones are read whole.
LONG_ROW_BYTES = 256 * 2**10


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is to be written.

    Attributes:
        name: unlike any other in the same files.
        shape: of the whole.
        dtype: as numpy and jax name it: "float32", "bfloat16".
        blocks: gives consecutive blocks of rows, [rows, *shape[1:]], or one without dims; called
            once, when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def itemsize(self) -> int:
        """Give the bytes of an element."""
        return DTYPES[CODES[self.dtype]].itemsize

    @property
    def nbytes(self) -> int:
        """Give the bytes of the whole."""
        return math.prod(self.shape) * self.itemsize


def write(
    path: Path, tensors: Sequence[Tensor], *, metadata: Mapping[str, str], max_file_bytes: int
) -> list[Path]:
    """Write tensors to one file, or to several with an index, holding one block at a time.

    Nothing has its name before all of it is on disk; the index gets its own last.

    Args:
        path: `NAME.safetensors`; several files are `NAME-00001-of-00003.safetensors`, beside
            `NAME.safetensors.index.json`.
        tensors: names keep their order. Within a file those of wider dtypes lie first, so that
            each begins at a multiple of its element's size.
        metadata: text by name, for every file's header.
        max_file_bytes: of tensors in a file; a larger tensor has a file of its own.

    Returns:
        The paths written, the index last.

    Raises:
        FileExistsError: one of the files is there already; nothing has been written.
        ValueError: a name is there twice or a dtype is not the format's, before anything is
            written; or blocks are not what was declared, after which nothing is left.
    """
    _check(path, tensors, metadata, max_file_bytes)
    groups = _group(tensors, max_file_bytes)
    names = [f"{path.stem}-{i + 1:05}-of-{len(groups):05}{SUFFIX}" for i in range(len(groups))]
    files = [path] if len(groups) == 1 else [path.with_name(name) for name in names]
    index = path.with_name(f"{path.stem}{INDEX_SUFFIX}")
    for output in dict.fromkeys((*files, path, index)):
        if output.exists():
            raise FileExistsError(f"{output} exists already; remove it or write to another name")
    headers = [_header(path, group, metadata) for group in groups]
    outputs = files if len(groups) == 1 else [*files, index]
    partials = [output.with_name(f"{output.name}.partial") for output in outputs]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for partial, group, header in zip(partials, groups, headers, strict=False):
            _write_file(partial, header, group)
        if index in outputs:
            _write_index(partials[-1], files, groups, metadata)
        for partial, output in zip(partials, outputs, strict=True):
            partial.replace(output)
    finally:
        for partial in partials:  # there only after an exception
            partial.unlink(missing_ok=True)
    sync_folder(path.parent)
    return outputs


class SafetensorsReader:
    """Reads the tensors of one file, of the several that an index names, or of a folder's only one.

    Opening it reads and checks headers only.

    Args:
        path: the file, the index or the folder.

    Attributes:
        path: the file or the index that was found.
        tensors: name to shape and dtype, as numpy names it.
        metadata: text by name; an index's own before that of its files.

    Raises:
        FileNotFoundError: there is no such file, or a file that the index names is missing.
        ValueError: a file is damaged, has a dtype that numpy and jax have not, or does not hold
            what the index says; or a folder holds several to choose from.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = find_file(Path(path))
        self._stored, self.metadata = read_headers(self.path)
        self.tensors = {name: (one.shape, one.dtype.name) for name, one in self._stored.items()}

    def blocks(self, name: str, max_bytes: int = BLOCK_BYTES) -> Iterator[np.ndarray]:
        """Give a tensor in consecutive blocks of rows, [rows, *shape[1:]], at least a row each.

        One without dims, or without elements, is one block.
        """
        stored = self._stored[name]
        if not stored.shape or not stored.nbytes:
            yield self.read(name)
            return
        num_rows = max(1, max_bytes // (stored.nbytes // stored.shape[0]))
        for first in range(0, stored.shape[0], num_rows):
            yield self.read(name, (slice(first, min(first + num_rows, stored.shape[0])),))

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a part of a tensor; little more than that is read and held.

        Args:
            name: a key of `tensors`.
            index: a slice of step 1 for each of the first dims; the others are taken whole.

        Raises:
            IndexError: there are more slices than dims, or one has another step.
            ValueError: the file has been cut short since it was opened.
        """
        stored = self._stored[name]
        if len(index) > len(stored.shape) or any(part.step not in (None, 1) for part in index):
            raise IndexError(f"{name}{list(stored.shape)} takes slices of step 1, got {index}")
        whole = (slice(None),) * (len(stored.shape) - len(index))
        spans = [
            part.indices(size)[:2]
            for part, size in zip((*index, *whole), stored.shape, strict=True)
        ]
        part = np.empty([max(0, stop - start) for start, stop in spans], stored.dtype)
        if part.size:
            with stored.path.open("rb", buffering=0) as file:
                _read_part(file, part, stored.offset, stored.shape, spans)
        return part


# ------------------------------------------------------------------ writing


def _check(
    path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], max_file_bytes: int
) -> None:
    if path.suffix != SUFFIX:
        raise ValueError(f"{path} must end in {SUFFIX}")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive, got {max_file_bytes}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata of {path} must be text, got {key!r}: {value!r}")
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
    """Part tensors into files, in their order."""
    groups: list[list[Tensor]] = [[]]
    held = 0
    for tensor in tensors:
        if groups[-1] and held + tensor.nbytes > max_file_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += tensor.nbytes
    return groups


def _by_width(group: Sequence[Tensor]) -> list[Tensor]:
    return sorted(group, key=lambda tensor: -tensor.itemsize)


def _header(path: Path, group: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    spans, end = {}, 0
    for tensor in _by_width(group):
        spans[tensor.name] = (end, end + tensor.nbytes)
        end += tensor.nbytes
    entries = {one.name: (one.dtype, one.shape, spans[one.name]) for one in group}
    return encode_header(path, entries, metadata)


def _write_file(path: Path, header: bytes, group: Sequence[Tensor]) -> None:
    with path.open("wb") as file:
        file.write(header)
        for tensor in _by_width(group):
            _write_tensor(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    declared = f"{tensor.name!r} was declared {tensor.dtype}{list(tensor.shape)}"
    num_rows = tensor.shape[0] if tensor.shape else 1
    written = 0
    for block in tensor.blocks():
        rows = block.shape[0] if block.ndim else 1
        alike = block.ndim == len(tensor.shape) and block.shape[1:] == tensor.shape[1:]
        if not alike or block.dtype != DTYPES[CODES[tensor.dtype]]:
            raise ValueError(f"{declared}, got a block {block.dtype.str}{list(block.shape)}")
        written += rows
        if written > num_rows:
            raise ValueError(f"{declared}, got {written} rows or more")
        file.write(_bytes_of(block))
        del block  # before the next one is made
    if written < num_rows and tensor.nbytes:
        raise ValueError(f"{declared}, got {written} rows")


def _bytes_of(array: np.ndarray) -> memoryview:
    """View an array's bytes, in C order; only one that is not contiguous is copied."""
    return array.reshape(-1).view(np.uint8).data


def _write_index(
    path: Path, files: Sequence[Path], groups: Sequence[Sequence[Tensor]], text: Mapping[str, str]
) -> None:
    total = sum(tensor.nbytes for group in groups for tensor in group)
    names = {
        tensor.name: file.name
        for file, group in zip(files, groups, strict=True)
        for tensor in group
    }
    index = {"metadata": {**text, "total_size": total}, "weight_map": names}
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(index, ensure_ascii=False, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------ reading


def _read_part(
    file: FileIO,
    part: np.ndarray,
    offset: int,
    shape: Sequence[int],
    spans: Sequence[tuple[int, int]],
) -> None:
    """Fill `part` with the span of each dim of the tensor that begins at a byte of a file."""
    whole = [(0, size) for size in shape]
    row_bytes = math.prod(shape[1:]) * part.dtype.itemsize
    first = spans[0][0] if spans else 0
    if list(spans[1:]) == whole[1:]:
        _fill(file, part, offset + first * row_bytes)
    elif row_bytes >= LONG_ROW_BYTES:
        for row in range(len(part)):
            start = offset + (first + row) * row_bytes
            _read_part(file, part[row, ...], start, shape[1:], spans[1:])
    else:
        columns = tuple(slice(*span) for span in spans[1:])
        step = LONG_ROW_BYTES // row_bytes
        for row in range(0, len(part), step):
            block = np.empty((min(step, len(part) - row), *shape[1:]), part.dtype)
            _fill(file, block, offset + (first + row) * row_bytes)
            part[row : row + step] = block[:, *columns]


def _fill(file: FileIO, array: np.ndarray, offset: int) -> None:
    """Fill a contiguous array with the bytes from an offset on."""
    file.seek(offset)
    left = _bytes_of(array)
    while left:
        count = file.readinto(left)
        if not count:
            raise ValueError(f"{file.name} has been cut short since it was opened")
        left = left[count:]
