"""The file system: the one door for paths that callers pass, and names that survive a power cut."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Ends the name of what is being removed.
REMOVED = ".removed"


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path of the local or a mounted file system, with `~` expanded.

    A checkpoint is flushed to disk and renamed into place, which object stores do not do.

    Raises:
        TypeError: the path is neither a text nor a `Path`.
        ValueError: the path is empty, or a URL such as "gs://bucket/run"; also as `pathlib` writes
            it, "gs:/bucket/run".
    """
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"the path {text!r} is {type(text).__name__}; give a str or a Path")
    if not text:
        raise ValueError('the path is empty; name a folder or file ("." is the current folder)')
    scheme = re.match(r"([A-Za-z][\w+.-]+):/+", text)  # two letters at least: "C:/" is a drive
    if scheme is not None and scheme[1].lower() == "file":
        return Path(unquote(urlsplit(text).path))
    if scheme is not None:
        raise ValueError(
            f"{scheme[1]}://{text[scheme.end() :]} is not on a local or mounted file system, which "
            "a checkpoint needs; mount the bucket and pass the path of the mount, or use a local "
            f"folder and copy it to {scheme[1]}:// when the save is done"
        )
    return Path(text).expanduser().absolute()


def write_synced(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.writelines(blocks)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(directory: Path) -> None:
    """Flush a folder's names to disk, where the file system can."""
    with contextlib.suppress(OSError):  # some don't open folders, and keep names in their own way
        opened = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


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
