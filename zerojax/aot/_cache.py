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
FORMAT = 1

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
    `notes` tells of both.

    Args:
        folder: by default what the variable `ZEROJAX_CACHE` names, else `zerojax/programs` in the
            user's cache folder (`XDG_CACHE_HOME`, `~/.cache`).
        max_bytes: size that the folder is kept under.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.folder = default_folder() if folder is None else folder
        self.max_bytes = max_bytes
        self.notes: list[str] = []

    def find(self, key: str) -> Compilation | None:
        """Return what was kept under a key, None for nothing."""
        held = self._read(key)
        if held is not None and "see" in held:
            held = self._read(key := held["see"])
        if held is None:
            return None
        try:
            program, shortage = held["program"], held["shortage"]
            return Compilation(
                program=None if program is None else Program.from_json(program),
                shortage=None if shortage is None else Shortage(**shortage),
                seconds=float(held["seconds"]),
                compiled_at=str(held["compiled_at"]),
                is_cached=True,
            )
        except (ValueError, KeyError, TypeError) as error:
            self._note_unreadable(key, error)
            return None

    def keep(self, key: str, compilation: Compilation) -> None:
        """Keep a compilation, and drop others where the folder gets too large."""
        held = dataclasses.asdict(dataclasses.replace(compilation, program=None))
        if compilation.program is not None:
            held["program"] = compilation.program.to_json()
        self._write(key, held)
        self._drop_oldest(spared=key)

    def refer(self, question: str, key: str) -> None:
        """Let a second key stand for one under which something is kept."""
        self._write(question, {"see": key})

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _read(self, key: str) -> dict[str, Any] | None:
        path = self._path(key)
        try:
            held = json.loads(gzip.decompress(path.read_bytes()))
            if not isinstance(held, dict) or held.get("format") != FORMAT:
                raise ValueError(f"it is not of format {FORMAT}")
            os.utime(path)  # the oldest are those that nobody asked for
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, EOFError, ValueError, zlib.error) as error:
            self._note_unreadable(key, error)
            return None
        return held

    def _write(self, key: str, held: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = gzip.compress(json.dumps({"format": FORMAT, **held}).encode(), compresslevel=6)
            with tempfile.TemporaryDirectory(dir=self.folder) as own:
                (Path(own) / key).write_bytes(data)
                (Path(own) / key).replace(self._path(key))
        except OSError as error:
            self.notes.append(f"the program can't be kept in {self.folder}: {error.strerror}")

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

    def _note_unreadable(self, key: str, error: Exception) -> None:
        reason = " ".join(str(error).split()) or type(error).__name__
        self.notes.append(f"the cached {self._path(key)} can't be read ({reason}); compiling anew")


def default_folder() -> Path:
    """Return the folder that programs are kept in."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "zerojax" / "programs"


def digest(facts: Mapping[str, Any], *sources: str) -> str:
    """Hash a question with all that decides its answer: versions, variables, zerojax's sources.

    Args:
        facts: the question, fit for JSON.
        *sources: files of zerojax that count, relative to it; none named, all of them.
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
    every = (*_HOME.rglob("*.py"), *_HOME.rglob("*.toml"))  # code, and figures of hardware
    for path in [_HOME / name for name in names] or sorted(every):
        found.update(f"{path.relative_to(_HOME).as_posix()}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
