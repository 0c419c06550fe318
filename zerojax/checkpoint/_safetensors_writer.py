"""Writing safetensors files a block of rows at a time; the library's writer wants whole tensors."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from zerojax.checkpoint._durable import sync_folder
from zerojax.checkpoint._safetensors import DTYPES, INDEX_SUFFIX, SUFFIX

METADATA = "__metadata__"
#: The format's own limit.
MAX_HEADER_BYTES = 100_000_000
#: JAX's name of a dtype to the format's.
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """What is to be written.

    Attributes:
        name: unlike any other in the same files.
        shape: of the whole.
        dtype: as NumPy and JAX name it: "float32", "bfloat16".
        blocks: returns consecutive blocks of rows, [rows, *shape[1:]], or one without dims; called
            once, when its turn comes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    blocks: Callable[[], Iterable[np.ndarray]]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
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
    """Return length and header; the data after them begin at a multiple of eight."""
    spans, end = {}, 0
    for tensor in _by_width(group):
        spans[tensor.name] = [end, end + tensor.nbytes]
        end += tensor.nbytes
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for one in group:
        shape, offsets = [*one.shape], spans[one.name]
        header[one.name] = {"dtype": CODES[one.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: the header would take {len(text):,} bytes, and the format allows "
            f"{MAX_HEADER_BYTES:,}; write less metadata, or more files"
        )
    return len(text).to_bytes(8, "little") + text


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
        if not alike or block.dtype != jnp.dtype(tensor.dtype):
            raise ValueError(f"{declared}, got a block {block.dtype.str}{list(block.shape)}")
        written += rows
        if written > num_rows:
            raise ValueError(f"{declared}, got {written} rows or more")
        file.write(block.reshape(-1).view(np.uint8).data)  # a copy only if it is not contiguous
        del block  # before the next one is made
    if written < num_rows and tensor.nbytes:
        raise ValueError(f"{declared}, got {written} rows")


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
