"""Compiled programs that are kept, so that the same question is answered at once."""

import dataclasses
import gzip
import hashlib
import json
import os
import tempfile
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerojax.aot._plugin import version_of
from zerojax.audit import Program

#: Names the folder in the place of the user's cache folder.
VARIABLE = "ZEROJAX_CACHE"

#: What decides how a step is traced and compiled.
_PACKAGES = (
    "jax", "jaxlib", "libtpu", "optax", "numpy", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "CUDA_ROOT")
#: Variables of jax that decide where it runs and what it keeps, but not what it compiles.
_IDLE_VARIABLES = ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
_HOME = Path(__file__).resolve().parents[1]  # zerojax itself


@dataclass(kw_only=True, unsafe_hash=True)
class DoesNotFit(RuntimeError):
    """Raised where a program exceeds the memory of a device; bytes, None where not told."""

    needed: int | None
    available: int | None
    message: str = ""  # the compiler's own words

    def __str__(self) -> str:
        """Describe in one line by how much a program does not fit."""
        needed, available = self.needed, self.available
        if needed is None or available is None:
            return f"does not fit the memory of a device: {self.message}"
        return (
            f"does not fit: it needs {needed / 2**30:,.2f} GiB of a device's "
            f"{available / 2**30:,.2f} GiB, {(needed - available) / 2**30:,.2f} GiB too much"
        )


def find(key: str) -> Program | DoesNotFit | None:
    """Return what was kept under a key, None for nothing; warn of what can't be read."""
    path = _path(key)
    try:
        held = json.loads(gzip.decompress(path.read_bytes()))
        return Program.from_json(held) if isinstance(held, str) else DoesNotFit(**held)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"the cached {path} can't be read ({reason}); compiling anew", stacklevel=3)
        return None


def keep(key: str, answer: Program | DoesNotFit) -> None:
    """Keep an answer; warn where that can't be."""
    held = answer.to_json() if isinstance(answer, Program) else dataclasses.asdict(answer)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            partial = Path(own) / key
            partial.write_bytes(gzip.compress(json.dumps(held).encode(), compresslevel=6))
            partial.replace(path)
    except OSError as error:
        reason = f"the program can't be kept in {path.parent}: {error.strerror}"
        warnings.warn(reason, stacklevel=3)


def _path(key: str) -> Path:
    """Return the file of a key, in the folder that programs are kept in."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser() / f"{key}.json.gz"
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = base if base.is_absolute() else Path("~/.cache").expanduser()
    return base / "zerojax" / "programs" / f"{key}.json.gz"


def digest(facts: Mapping[str, Any], sources: Sequence[str]) -> str:
    """Hash what decides an answer: facts, versions, variables and some of zerojax's files."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in sources for path in _HOME.glob(pattern)):
        found.update(path.read_bytes())
    whole = {
        "facts": facts,
        "versions": {name: version_of(name) for name in _PACKAGES},
        "variables": {name: text for name, text in os.environ.items() if _is_deciding(name)},
        "sources": found.hexdigest(),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:40]


def _is_deciding(variable: str) -> bool:
    is_of_jax = variable.startswith("JAX_") and not variable.startswith(_IDLE_VARIABLES)
    return is_of_jax or variable in _VARIABLES
