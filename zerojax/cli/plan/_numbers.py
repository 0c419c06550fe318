"""Numbers as users write them: parameters as 7.5B, bytes as 18GiB."""

from __future__ import annotations

import re
from decimal import Decimal

from zerojax.planner import as_amount, as_count

MOST_PARAMS = 10**18
_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
#: A number and letters: "7.5B", ".5e3 kB".
_NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*"


def read_count(option: str, text: str) -> int:
    """Read a number of parameters: "7.5e9", "7.5B"."""
    match = re.fullmatch(_NUMBER, text)
    if match is None or match[2].upper() not in _POWERS:
        raise ValueError(f"{option} {text}: give a number such as 7.5e9 or 7.5B")
    value = Decimal(match[1]).scaleb(_POWERS[match[2].upper()])
    if value > MOST_PARAMS:
        raise ValueError(f"{option} {text}: plans go up to {MOST_PARAMS:.0e} parameters")
    whole = value == value.to_integral_value()
    return as_count(option, int(value) if whole else float(value))


def read_bytes(option: str, text: str) -> float:
    """Read bytes: "20e9", "20GB" (1e9), "18GiB" (2**30)."""
    match = re.fullmatch(_NUMBER, text)
    units = _DECIMAL | _BINARY
    if match is None or match[2].upper() not in units:
        raise ValueError(f"{option} {text}: give bytes such as 20e9, 20GB or 18GiB")
    return as_amount(option, float(match[1]) * units[match[2].upper()], above_zero=True)
