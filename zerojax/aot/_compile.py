"""Compile a lowered step to a `Program`, through the cache."""

import re
from typing import Any

import jax

from zerojax._quiet import quiet_stderr
from zerojax.aot._cache import DoesNotFit, digest, find, keep
from zerojax.audit import Program

# "memory required for HLO temporaries (124.22G) exceeds available HBM (15.75G)", and
# "Used 33.00G of 15.75G hbm": what libtpu says where a program does not fit.
_SIZE = r"(\d+(?:\.\d+)?)\s*([KMGTP]?)"
_REFUSAL = re.compile(rf"(?:required\D*\(|Used ){_SIZE}\)? (?:exceeds available\D*\(|of ){_SIZE}")
#: What decides the target and what is taken from a program; all else shows in the lowered text.
_SOURCES = ("aot/*.*", "audit/_p*.py", "planner/hardware/hardware.toml")
#: Where jax keeps a lowering's compiler options and its devices, which the text does not hold.
_DECIDING = ("_compiler_options_kvs", "_device_list")
#: Of `<function relu at 0x7fbd0b133060>`, which a module of flax or equinox holds.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def compile_step(lowered: jax.stages.Lowered) -> Program:
    """Compile a lowered step to the facts that `audit` reads; at once where it was compiled before.

    Programs are kept in the folder of `ZEROJAX_CACHE` (`~/.cache/zerojax/programs` by default).

    Args:
        lowered: `step.lower(state, batch)`, for devices that are here or not; of any jitted step.

    Returns:
        The program as plain data: `audit(program, layout)`. It can't be run. The source lines that
        it names are those of the time when it was compiled.

    Raises:
        DoesNotFit: the compiler refuses it for its memory.

    Warns where a kept program can't be read, or this one can't be kept.
    """
    key = _key(lowered)
    answer = None if key is None else find(key)
    if answer is None:
        answer = _compile(lowered)
        if key is not None:
            keep(key, answer)
    if isinstance(answer, DoesNotFit):
        raise answer
    return answer


def _compile(lowered: jax.stages.Lowered) -> Program | DoesNotFit:
    with quiet_stderr():
        try:
            return Program.of(lowered.compile())
        except jax.errors.JaxRuntimeError as error:
            if _EXHAUSTED not in str(error):
                raise
            return _read_refusal(str(error))


def _read_refusal(message: str) -> DoesNotFit:
    """Read libtpu's refusal of a program; its sizes are in powers of 1024."""
    message = " ".join(message.split())
    needed, available = None, None
    if match := _REFUSAL.search(message):
        needed, available = (int(float(match[at]) * _UNITS[match[at + 1]]) for at in (1, 3))
    return DoesNotFit(needed=needed, available=available, message=message)


def _key(lowered: jax.stages.Lowered) -> str | None:
    """Hash what the compiler is given; None where this jax does not tell it."""
    options, devices = (getattr(lowered._lowering, name, None) for name in _DECIDING)
    if options is None or devices is None:
        return None
    facts = {
        "text": lowered.as_text(),
        # Names of leaves, which the text does not hold.
        "arguments": _ADDRESS.sub("", str(lowered.args_info)),
        "results": _ADDRESS.sub("", str(lowered.out_tree)),
        "options": sorted((str(name), str(value)) for name, value in options),
        "compiler": str(getattr(devices[0].client, "platform_version", "")),
        "devices": [_device(device) for device in devices],
    }
    return digest(facts, _SOURCES)


def _device(device: Any) -> list[str]:
    names = ("id", "device_kind", "process_index", "coords", "core_on_chip", "slice_index")
    return [str(getattr(device, name, None)) for name in names]
