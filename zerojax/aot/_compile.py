"""Compile a lowered step to a `Program`; programs are kept, and a question is answered once."""

import dataclasses
import gzip
import hashlib
import json
import os
import re
import tempfile
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import jax

from zerojax._display import binary
from zerojax._quiet import quiet_stderr
from zerojax.aot._plugin import version_of
from zerojax.audit import Program

#: What decides how a step is traced and compiled.
_PACKAGES = (
    "jax", "jaxlib", "libtpu", "optax", "numpy", "jax-cuda12-plugin", "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc",
)  # fmt: skip
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_LIBRARY_PATH", "CUDA_ROOT")
# But for those that decide where jax runs and what it keeps, and not what it compiles.
_JAX_VARIABLE = "JAX_(?!PLATFORMS|COMPILATION_CACHE|PERSISTENT_CACHE)"
_HOME = Path(__file__).resolve().parents[1]  # zerojax itself


@dataclass(kw_only=True, unsafe_hash=True)
class DoesNotFit(RuntimeError):
    """Raised where a program exceeds the memory of a device; bytes, None where not told."""

    needed: int | None
    available: int | None
    message: str = ""  # the compiler's own words

    def __str__(self) -> str:
        needed, available = self.needed, self.available
        if needed is None or available is None:
            return f"does not fit the memory of a device: {self.message}"
        told = f"does not fit: it needs {binary(needed)} of a device's {binary(available)}"
        return f"{told}, {binary(needed - available)} too much"


def _find(key: str) -> Program | DoesNotFit | None:
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


def _keep(key: str, answer: Program | DoesNotFit) -> None:
    held = answer.to_json() if isinstance(answer, Program) else dataclasses.asdict(answer)
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:
            partial = Path(own) / key
            partial.write_bytes(gzip.compress(json.dumps(held).encode(), compresslevel=6))
            partial.replace(path)
    except OSError as error:
        warnings.warn(f"the program can't be kept in {path.parent}: {error.strerror}", stacklevel=3)


def _path(key: str) -> Path:
    if named := os.environ.get("ZEROJAX_CACHE"):
        return Path(named).expanduser() / f"{key}.json.gz"
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    base = base if base.is_absolute() else Path("~/.cache").expanduser()
    return base / "zerojax" / "programs" / f"{key}.json.gz"


# "memory required for HLO temporaries (124.22G) exceeds available HBM (15.75G)", and
# "Used 33.00G of 15.75G hbm": what libtpu says, in powers of 1024, where a program does not fit.
_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGTP]?)"
_REFUSAL = re.compile(rf"(?:required\D*\(|Used ){_SIZE}\)? (?:exceeds available\D*\(|of ){_SIZE}")
#: What decides the target and what is taken from a program; all else shows in the lowered text.
_SOURCES = ("aot/*.*", "audit/_allocations.py", "audit/_p*.py", "hardware/hardware.toml")
_OF_A_DEVICE = ("id", "device_kind", "process_index", "coords", "core_on_chip", "slice_index")
#: Where jax keeps a lowering's compiler options and its devices, which the text does not hold.
_DECIDING = ("_compiler_options_kvs", "_device_list")
#: Of `<function relu at 0x7fbd0b133060>`, which a module of flax or equinox holds.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def compile_step(lowered: jax.stages.Lowered) -> Program:
    """Compile a lowered step to the facts that `audit` reads; at once where it was compiled before.

    Programs are kept in the folder of `ZEROJAX_CACHE` (`~/.cache/zerojax/programs` by default), as
    plain data for `audit(program, layout)`: they can't be run. The source lines in one are those of
    the time when it was compiled.

    Args:
        lowered: `step.lower(state, batch)`, for devices that are here or not; of any jitted step.

    Raises:
        DoesNotFit: the compiler refuses it for its memory.

    Warns where a kept program can't be read, or this one can't be kept.
    """
    key = _key(lowered)
    answer = None if key is None else _find(key)
    if answer is None:
        answer = _compile(lowered)
        if key is not None:
            _keep(key, answer)
    if isinstance(answer, DoesNotFit):
        raise answer
    return answer


def _compile(lowered: jax.stages.Lowered) -> Program | DoesNotFit:
    with quiet_stderr():
        try:
            return Program.of(lowered.compile())
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            message = " ".join(str(error).split())
    needed, available = None, None
    if match := _REFUSAL.search(message):
        needed, available = (int(float(match[at]) * _UNITS[match[at + 1]]) for at in (1, 3))
    return DoesNotFit(needed=needed, available=available, message=message)


def _key(lowered: jax.stages.Lowered) -> str | None:
    """Hash what the compiler is given; None where this jax does not tell it."""
    options, devices = (getattr(lowered._lowering, name, None) for name in _DECIDING)
    if options is None or devices is None:
        return None
    sources = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in _HOME.glob(pattern)):
        sources.update(path.read_bytes())
    facts = {
        "text": lowered.as_text(),
        # Names of leaves, which the text does not hold.
        "arguments": _ADDRESS.sub("", str(lowered.args_info)),
        "results": _ADDRESS.sub("", str(lowered.out_tree)),
        "options": sorted((str(name), str(value)) for name, value in options),
        "compiler": str(getattr(devices[0].client, "platform_version", "")),
        "devices": [[str(getattr(x, name, None)) for name in _OF_A_DEVICE] for x in devices],
        "versions": {name: version_of(name) for name in _PACKAGES},
        "variables": {
            name: text
            for name, text in os.environ.items()
            if name in _VARIABLES or re.match(_JAX_VARIABLE, name)
        },
        "sources": sources.hexdigest(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:40]
