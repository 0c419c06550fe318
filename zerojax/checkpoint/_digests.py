"""Digests of files: what tells a damaged checkpoint from a whole one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from zerojax._extras import extra

#: Bytes that are read at a time, bytes of a segment of a large file, and how many at once.
BLOCK = 1 << 18
SEGMENT = 32 << 20
NUM_THREADS = min(16, (os.cpu_count() or 1) + 1)
#: Where a process of several leaves its digests for a moment.
PART = "digests.{}.json"


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """A file as it was written: its size in bytes and its XXH3-128 digest in hex."""

    num_bytes: int
    digest: str


class DamagedCheckpointError(ValueError):
    """The checkpoint in `path` is not what was saved; `damages` are lines, each with the file."""

    def __init__(self, path: Path, damages: Iterable[str]) -> None:
        self.path = path
        self.damages = tuple(damages)
        super().__init__(f"the checkpoint {path} is damaged: {'; '.join(self.damages)}")


def digest_text(text: str) -> str:
    """Return the digest of a text."""
    return _hash(text.encode()).hexdigest()


def digest_files(root: Path, paths: Iterable[Path]) -> dict[str, FileDigest]:
    """Read files and return their digests, by path below `root` with slashes."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        read = {path: _start(path, threads) for path in sorted(paths)}
    return {path.relative_to(root).as_posix(): _joined(parts) for path, parts in read.items()}


def wrong_sizes(root: Path, files: Mapping[str, FileDigest]) -> dict[str, str]:
    """Describe the files that are missing or of another size; reads none of them."""
    wrong = {}
    for name, wanted in files.items():
        path = root / name
        if not path.is_file():
            wrong[name] = f"{name} is missing"
        elif path.stat().st_size != wanted.num_bytes:
            wrong[name] = f"{name} has {path.stat().st_size} bytes of {wanted.num_bytes}"
    return wrong


def wrong_contents(root: Path, files: Mapping[str, FileDigest]) -> list[str]:
    """Describe the files that are missing, of another size or not what was written; reads them."""
    wrong = wrong_sizes(root, files)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        read = {name: _start(root / name, threads) for name in files if name not in wrong}
    for name, parts in read.items():
        try:
            if _joined(parts) != files[name]:
                wrong[name] = f"{name} is not what was written (XXH3-128 differs)"
        except OSError as error:
            wrong[name] = f"{name} can't be read: {error.strerror}"
    return list(wrong.values())


def _start(path: Path, threads: ThreadPoolExecutor) -> list[Future[tuple[bytes, int]]]:
    """Start to read a file, a large one in several places at once."""
    starts = range(0, max(1, path.stat().st_size), SEGMENT)
    return [threads.submit(_digest_segment, path, start) for start in starts]


def _joined(parts: list[Future[tuple[bytes, int]]]) -> FileDigest:
    """Return a file's digest; of more than one segment it is that of their digests in order."""
    digests, sizes = zip(*(part.result() for part in parts), strict=True)
    whole = digests[0] if len(digests) == 1 else _hash(b"".join(digests)).digest()
    return FileDigest(sum(sizes), whole.hex())


def _digest_segment(path: Path, start: int) -> tuple[bytes, int]:
    """Return the digest of a segment and its bytes."""
    state, block, left = _hash(), bytearray(BLOCK), SEGMENT
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (size := file.readinto(view[: min(BLOCK, left)])):
            state.update(view[:size])
            left -= size
    return state.digest(), SEGMENT - left


def _hash(content: bytes = b"") -> Any:
    """Start an XXH3-128 digest."""
    with extra("checkpoint", "the digest of a checkpoint"):
        import xxhash
    return xxhash.xxh3_128(content)


def write_part(root: Path, index: int, files: Mapping[str, FileDigest]) -> None:
    """Write a process's digests for the one that writes the manifest."""
    text = json.dumps(files, default=dataclasses.asdict)
    (root / PART.format(index)).write_text(text)


def read_parts(root: Path, num_parts: int) -> dict[str, FileDigest]:
    """Read and remove the digests that the processes wrote."""
    joined = {}
    for index in range(num_parts):
        part = root / PART.format(index)
        joined |= {name: FileDigest(**file) for name, file in json.loads(part.read_text()).items()}
        part.unlink()
    return joined
