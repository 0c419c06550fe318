"""The files of a checkpoint: callers' paths, digests, and names that survive a power cut."""

import dataclasses
import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from zerojax._extras import extra

#: Ends the name of what is being removed.
REMOVED = ".removed"


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


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path of the local or a mounted file system, with `~` expanded.

    A checkpoint is flushed to disk and renamed into place, which object stores do not do.

    Raises:
        TypeError: the path is neither a text nor a `Path`.
        ValueError: the path is empty, no UTF-8, has a backslash, or is a URL: "gs://bucket/run",
            "gs:/bucket/run".
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise TypeError(f"a path is expected, a str or a Path, got {type(path).__name__}")
    if not text:
        raise ValueError('the path is empty; name a folder or file ("." is the current folder)')
    scheme = re.match(r"([A-Za-z][\w+.-]+):/+", text)  # two letters at least: "C:/" is a drive
    if scheme is not None and scheme[1].lower() == "file":
        text = unquote(urlsplit(text).path)
    elif scheme is not None:
        raise ValueError(
            f"{scheme[1]}://{text[scheme.end() :]} is not on a local or mounted file system, which "
            "a checkpoint needs; mount the bucket and pass the path of the mount, or use a local "
            f"folder and copy it to {scheme[1]}:// when the save is done"
        )
    path = Path(text).expanduser().absolute()
    if (name := str(path)) != name.encode(errors="ignore").decode():
        raise ValueError(f"{name!r} is not UTF-8, as orbax needs it; give another path")
    if "\\" in name and os.sep == "/":
        raise ValueError(f"{name!r} has a \\, for which orbax takes a /; give another path")
    return path


def sync(path: Path) -> None:
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError:
        if path.is_file():  # some file systems don't open folders, and keep names in their own way
            raise


def remove(path: Path) -> None:
    """Remove a folder, renamed first, so that it is whole or not there; of a link, the link alone.

    What can't be removed is left with a warning: it is in nobody's way, and fails no save.
    """
    removed = path.with_name(path.name.removesuffix(REMOVED) + REMOVED)
    try:
        path.rename(removed)
        if removed.is_symlink():
            left = removed.readlink()
            removed.unlink()
            warnings.warn(f"{path} was a link; remove {left} yourself", stacklevel=2)
        else:
            shutil.rmtree(removed)
    except OSError as error:
        warnings.warn(f"{path} can't be removed ({error}); remove it yourself", stacklevel=2)


def digest_text(text: str) -> str:
    return _hash(text.encode()).hexdigest()


def _hash(content: bytes = b"") -> Any:
    with extra("checkpoint", "the digest of a checkpoint"):
        import xxhash
    return xxhash.xxh3_128(content)


def _digest(path: Path) -> FileDigest:
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, _hash).hexdigest()
        return FileDigest(file.tell(), digest)


def digest_files(root: Path, paths: Iterable[Path]) -> dict[str, FileDigest]:
    names = {path.relative_to(root).as_posix(): path for path in sorted(paths)}
    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(_digest, names.values()), strict=True))


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

    def fault(name: str) -> str:
        try:
            is_same = _digest(root / name) == files[name]
        except OSError as error:
            return f"{name} can't be read: {error.strerror}"
        return "" if is_same else f"{name} is not what was written (XXH3-128 differs)"

    with ThreadPoolExecutor() as threads:
        faults = threads.map(fault, [name for name in files if name not in wrong])
        return [*wrong.values(), *filter(None, faults)]
