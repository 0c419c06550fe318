"""Numbers as users write them: parameters as 7.5B, bytes as 18GiB."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from zerojax.planner import as_amount, as_count

MOST_PARAMS = 10**18
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES = _DECIMAL | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: A number and letters: "7.5B", ".5e3 kB".
_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*"


def read_count(option: str, text: str) -> int:
    """Read a number of parameters: "7.5e9", "7.5B"."""
    value = _read(text, _COUNTS, f"{option} {text}: give a number such as 7.5e9 or 7.5B")
    if value > MOST_PARAMS:
        raise ValueError(f"{option} {text}: plans go up to {MOST_PARAMS:.0e} parameters")
    return as_count(option, int(value) if value == int(value) else float(value))


def read_bytes(option: str, text: str) -> float:
    """Read bytes: "20e9", "20GB" (1e9), "18GiB" (2**30)."""
    value = _read(text, _BYTES, f"{option} {text}: give bytes such as 20e9, 20GB or 18GiB")
    return as_amount(option, float(value), above_zero=True)


def _read(text: str, units: Mapping[str, int], refusal: str) -> Decimal:
    match = re.fullmatch(_NUMBER, text)
    if match is None or match[2].upper() not in units:
        raise ValueError(refusal)
    return Decimal(match[1]) * units[match[2].upper()]
