"""The format of safetensors files: dtypes, headers and indices, checked to the byte.

A file is the length of its header in eight bytes, the header in JSON, and the tensors' bytes
without holes. Several files of one model have an index beside them, in JSON too.

Source: https://github.com/huggingface/safetensors, section Format.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np

SUFFIX = ".safetensors"
INDEX_SUFFIX = f"{SUFFIX}.index.json"
METADATA = "__metadata__"
#: The format's own limit.
MAX_HEADER_BYTES = 100_000_000
LENGTH_BYTES = 8

_SCALARS = {
    "BOOL": np.bool_, "U8": np.uint8, "U16": np.uint16, "U32": np.uint32, "U64": np.uint64,
    "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F16": np.float16,
    "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64, "C64": np.complex64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}  # fmt: skip
#: The format's name of a dtype to numpy's dtype.
DTYPES = {code: np.dtype(scalar) for code, scalar in _SCALARS.items()}
#: A dtype's name in numpy and jax to the format's.
CODES = {dtype.name: code for code, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor lies: `offset` counts from the start of its file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Give the bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


def encode_header(
    path: Path,
    entries: Mapping[str, tuple[str, Sequence[int], tuple[int, int]]],
    metadata: Mapping[str, str],
) -> bytes:
    """Give length and header; the data after them begin at a multiple of eight.

    Args:
        path: of the file, for errors.
        entries: name to dtype, shape, and first and last byte of the data.
        metadata: text by name.

    Raises:
        ValueError: the header is longer than the format allows.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for name, (dtype, shape, offsets) in entries.items():
        header[name] = {"dtype": CODES[dtype], "shape": [*shape], "data_offsets": [*offsets]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: the header would take {len(text):,} bytes, and the format allows "
            f"{MAX_HEADER_BYTES:,}; write less metadata, or more files"
        )
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def is_safetensors(path: str | os.PathLike[str]) -> bool:
    """Tell by its name whether a path is such a file, an index, or a folder that holds some."""
    path = Path(path)
    if path.is_dir():
        return any(one.name.endswith((SUFFIX, INDEX_SUFFIX)) for one in path.iterdir())
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def find_file(path: Path) -> Path:
    """Find the file or the index that a path means, be it a folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the folder holds several to choose from.
    """
    if not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"there is no safetensors file {path}")
        return path
    found = sorted(one for one in path.iterdir() if is_safetensors(one) and one.is_file())
    indices = [one for one in found if one.name.endswith(INDEX_SUFFIX)]
    named = {path / file for index in indices for file in read_index(index)[0].values()}
    free = [one for one in found if one not in named]
    if not free:
        raise FileNotFoundError(f"the folder {path} holds no file NAME{SUFFIX}")
    if len(free) > 1:
        names = ", ".join(one.name for one in free)
        raise ValueError(f"the folder {path} holds several models; name one of {names}")
    return free[0]


def read_headers(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the tensors' places and the metadata of a file, or of all that an index names.

    Raises:
        FileNotFoundError: a file that the index names is missing.
        ValueError: a file is damaged, or does not hold what the index says.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return read_header(path)
    names, text = read_index(path)
    files = dict.fromkeys(names.values())
    for file in files:
        if not (path.parent / file).is_file():
            raise FileNotFoundError(f"{path} names {file}, which is not beside it; fetch it too")
    found, metadata = {}, {}
    for file in files:
        stored, held = read_header(path.parent / file)
        _check_index(path, names, file, stored)
        found |= stored
        metadata |= held
    return {name: found[name] for name in names}, metadata | text


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read the tensors' places and the metadata of a file, and check that its bytes are theirs.

    Raises:
        ValueError: the file is damaged, or has a dtype that numpy and jax have not.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES:
            raise ValueError(f"{path} is no safetensors file: it has only {size} bytes")
        if length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is damaged or no safetensors file: its header would take {length:,} "
                f"bytes, and the file has {size:,}"
            )
        text = file.read(length)
    header = _parse(path, text)
    metadata = header.pop(METADATA, {})
    if not _is_text(metadata):
        raise ValueError(f"{path} is damaged: {METADATA} is not text by name")
    start = LENGTH_BYTES + length
    found = {name: _read_entry(path, name, entry, start) for name, entry in header.items()}
    _check_cover(path, found, start, size)
    return found, metadata


def read_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Read which file each tensor is in, and the metadata that are text.

    Raises:
        ValueError: the index is damaged.
    """
    index = _parse(path, path.read_bytes())
    names, metadata = index.get("weight_map"), index.get("metadata") or {}
    if not _is_text(names) or not isinstance(metadata, dict):
        raise ValueError(f"{path} is no index: it has no weight_map of tensor to file")
    for file in names.values():
        if Path(file).name != file:
            raise ValueError(f"{path} names {file!r}, which is not a file beside it")
    return names, {name: text for name, text in metadata.items() if isinstance(text, str)}


def _check_index(index: Path, names: Mapping[str, str], file: str, held: Iterable[str]) -> None:
    """Check that a file holds what the index says, and nothing else."""
    held = set(held)
    listed = {name for name, where in names.items() if where == file}
    for fault, wrong in (("lacks", listed - held), ("also holds", held - listed)):
        if wrong:
            raise ValueError(
                f"{index} and {file} do not belong together: by the index, the file {fault} "
                f"{min(wrong)!r}"
            )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """Read a JSON object in which no name is there twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name is there twice")
        return found

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its JSON can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: its JSON is no object")
    return found


def _is_text(found: Any) -> TypeGuard[dict[str, str]]:
    """Tell whether something from JSON, whose keys are text, has text as values."""
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _read_entry(path: Path, name: str, entry: Any, start: int) -> Stored:
    """Check one tensor's entry for itself."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{path} is damaged: the entry of {name!r} is {entry!r}")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(
            f"{path}: {name!r} is {code!r}, which numpy and jax have not; they have "
            f"{', '.join(DTYPES)}"
        )
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{path} is damaged: the entry of {name!r} is {entry!r}")
    stored = Stored(path, start + offsets[0], tuple(shape), DTYPES[code])
    if offsets[1] - offsets[0] != stored.nbytes:
        raise ValueError(
            f"{path} is damaged: {name!r}, {code}{shape}, takes {stored.nbytes:,} bytes, and its "
            f"offsets are {offsets}"
        )
    return stored


def _is_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(one) is int and one >= 0 for one in found)


def _check_cover(path: Path, found: Mapping[str, Stored], start: int, size: int) -> None:
    """Check that the tensors lie end to end from the header to the end of the file."""
    end = start
    for name, one in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if one.offset != end:
            fault = "leaves a hole before" if one.offset > end else "overlaps another at"
            raise ValueError(f"{path} is damaged: {name!r} {fault} byte {one.offset:,}")
        end += one.nbytes
    if end != size:
        fault = "cut short" if end > size else "damaged"
        raise ValueError(f"{path} is {fault}: its tensors end at byte {end:,} of {size:,}")
