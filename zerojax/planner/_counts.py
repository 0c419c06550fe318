"""Refuse numbers that count or measure nothing, in one place and in one line."""

from __future__ import annotations

import math
import numbers
from typing import Any


def as_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1 as an int; 7.5e9 is one.

    Args:
        name: what the message calls it.
        value: an int or a float that has no fraction.

    Raises:
        ValueError: the value is no number, a bool, fractional, not finite, zero or negative.
    """
    number = _number(value)
    if number is None or number < 1 or number != math.floor(number):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(number)


def as_amount(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return a finite number of at least 0, fractions allowed: bytes, seconds, bytes a second.

    Args:
        name: what the message calls it.
        value: an int or a float.
        above_zero: refuse 0 too.

    Raises:
        ValueError: the value is no number, a bool, not finite or negative.
    """
    number = _number(value)
    if number is None or number < 0 or (above_zero and number == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise ValueError(f"{name} must be a number {least}, got {value!r}")
    return float(number)


def _number(value: Any) -> int | float | None:
    """Return a finite real number as Python's own; None for anything else, bool included."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    if isinstance(value, numbers.Integral):
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else None
