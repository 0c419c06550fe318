"""Refuse arguments that count or measure nothing, or are of another class, in one line."""

import math
import numbers
from typing import Any, TypeVar

Noun = TypeVar("Noun")


def is_whole_number(value: Any, least: float = -math.inf) -> bool:
    """Return whether a value is an integer, one of NumPy's too, and not below `least`."""
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and int(value) >= least


def as_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1, 7.5e9 too, as an int; else a ValueError names it."""
    if not _is_finite(value) or value < 1 or value != math.floor(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def as_amount(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return a finite number of at least 0, or above it, as a float; else a ValueError names it."""
    if not _is_finite(value) or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise ValueError(f"{name} must be a finite number {least}, got {value!r}")
    return float(value)


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return isinstance(value, numbers.Integral) or math.isfinite(value)


def as_given(noun: type[Noun], given: Any, example: str, default: Noun | None = None) -> Noun:
    """Return a `noun`, or the default for None; else a TypeError tells how one is made."""
    value = default if given is None else given
    if isinstance(value, noun):
        return value
    told = f"a {noun.__name__} is expected, got {type(given).__name__}: make one as in {example}"
    raise TypeError(told)
