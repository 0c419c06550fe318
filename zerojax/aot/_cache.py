"""Compiled programs that are kept, so that the same question is answered at once."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerojax.aot._plugin import version_of
from zerojax.audit import Program

#: Names the folder in the place of the user's cache folder.
VARIABLE = "ZEROJAX_CACHE"
#: When the folder holds more than this, programs that were not asked for longest are dropped.
MAX_BYTES = 500_000_000

#: What decides how a step is traced and compiled.
_PACKAGES = (
    "jax", "jaxlib", "libtpu", "optax", "numpy", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "CUDA_ROOT")
#: Variables of jax that decide where it runs and what it keeps, but not what it compiles.
_IDLE_VARIABLES = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
_HOME = Path(__file__).resolve().parents[1]  # zerojax itself


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Count by how much a program exceeds the memory of a device; bytes, None where not told."""

    needed: int | None
    available: int | None
    message: str  # the compiler's own words


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """Keep what a compiler answered: a program, or that it would not fit."""

    program: Program | None  # the compiled program; None where the compiler refused it
    shortage: Shortage | None = None  # why it was refused; None where it was not
    seconds: float  # what the compiler took
    compiled_at: str  # when, in UTC, as ISO 8601 has it
    is_cached: bool = False  # whether it was kept from an earlier time


class ProgramCache:
    """Keeps compilations in a folder, each under the digest of its question.

    An entry that can't be read counts as absent, and a folder that can't be written to as full;
    `notes` tells of both. By default the folder is what the variable `ZEROJAX_CACHE` names, else
    `zerojax/programs` in the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`).
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = _default_folder() if folder is None else folder
        self.max_bytes = MAX_BYTES
        self.notes: list[str] = []

    def find(self, key: str) -> Compilation | None:
        """Return what was kept under a key, None for nothing."""
        path = self._path(key)
        try:
            held = json.loads(gzip.decompress(path.read_bytes()))
            if held["program"] is not None:
                held["program"] = Program.from_json(held["program"])
            if held["shortage"] is not None:
                held["shortage"] = Shortage(**held["shortage"])
            os.utime(path)  # the oldest are those that nobody asked for
            return Compilation(**held | {"is_cached": True})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self.notes.append(f"the cached {path} can't be read ({reason}); compiling anew")
            return None

    def keep(self, key: str, compilation: Compilation) -> None:
        """Keep a compilation, and drop others where the folder gets too large."""
        held = dataclasses.asdict(dataclasses.replace(compilation, program=None))
        if compilation.program is not None:
            held["program"] = compilation.program.to_json()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as own:
                partial = Path(own) / key
                partial.write_bytes(gzip.compress(json.dumps(held).encode(), compresslevel=6))
                partial.replace(self._path(key))
        except OSError as error:
            self.notes.append(f"the program can't be kept in {self.folder}: {error.strerror}")
        self._drop_oldest(spared=key)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _drop_oldest(self, spared: str) -> None:
        found = []
        for path in self.folder.glob("*.json.gz"):
            with contextlib.suppress(FileNotFoundError):  # another process dropped it
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            if path != self._path(spared):
                path.unlink(missing_ok=True)
                total -= size


def _default_folder() -> Path:
    """Return the folder that programs are kept in."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "zerojax" / "programs"


def digest(facts: Mapping[str, Any], *sources: str) -> str:
    """Hash a question with all that decides its answer: versions, variables, zerojax's sources.

    `sources` are the files of zerojax that count, relative to it; none named, all of them.
    """
    whole = {
        "facts": facts,
        "versions": {name: version_of(name) for name in _PACKAGES},
        "variables": {name: text for name, text in os.environ.items() if _is_deciding(name)},
        "sources": _hash_sources(sources),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:40]


def _is_deciding(variable: str) -> bool:
    is_of_jax = variable.startswith("JAX_") and not variable.startswith(_IDLE_VARIABLES)
    return is_of_jax or variable in _VARIABLES


def _hash_sources(names: tuple[str, ...]) -> str:
    found = hashlib.sha256()
    every = [path for kind in ("py", "toml", "pbtxt") for path in _HOME.rglob(f"*.{kind}")]
    for path in [_HOME / name for name in names] or sorted(every):
        found.update(f"{path.relative_to(_HOME).as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
