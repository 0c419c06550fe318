"""The hardware that is known: figures as their makers print them, kept in `hardware.toml`."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from zerojax.planner.hardware._hardware import Hardware


def _read_table() -> dict[str, Hardware]:
    file = resources.files("zerojax.planner.hardware").joinpath("hardware.toml")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {name: _read(name, figures) for name, figures in table.items()}


def _read(name: str, figures: dict[str, Any]) -> Hardware:
    for key, value in figures.items():
        if isinstance(value, list):
            figures[key] = tuple(value)
    return Hardware(name=name, **figures)


#: By name: TPU v4, v5e, v5p, v6e, v7; NVIDIA V100, A100, H100, H200, B200.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(_read_table())

_ALIASES = {"v5litepod": "v5e"}  # as Google Cloud's interfaces have it


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Return hardware by its name, by what JAX calls its devices, or as it was given.

    Args:
        hardware: a key of `HARDWARE` ("h100", in any case), a device's `device_kind` ("TPU7x" is
            "v7"), or a `Hardware` of one's own.

    Raises:
        ValueError: nothing known has that name; the message lists what is, nearest first.
    """
    if isinstance(hardware, Hardware):
        return hardware
    names = _names()
    wanted = str(hardware).strip().lower()
    if isinstance(hardware, str) and wanted in names:
        return HARDWARE[names[wanted]]
    raise ValueError(
        f"{hardware!r} is no hardware that is known; those are, nearest first: "
        f"{', '.join(_nearest_first(wanted))}; describe others with a Hardware of your own"
    )


@functools.cache
def _names() -> dict[str, str]:
    """Map all that hardware is called, in lower case, to the keys of `HARDWARE`."""
    kinds = {kind.lower(): key for key, one in HARDWARE.items() for kind in one.device_kinds}
    return {**kinds, **_ALIASES, **{key: key for key in HARDWARE}}


def _nearest_first(wanted: str) -> list[str]:
    def likeness(key: str) -> float:
        called = [name for name, other in _names().items() if other == key]
        ratios = [difflib.SequenceMatcher(None, wanted, name).ratio() for name in called]
        return max(*ratios, float(key in wanted))  # "a100-40gb" is nearest to "a100"

    return sorted(HARDWARE, key=likeness, reverse=True)
