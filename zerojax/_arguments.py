"""Refuse arguments that count or measure nothing, or are of another class, in one line."""

import math
import numbers
from typing import Any, TypeVar

Noun = TypeVar("Noun")


def as_count(name: str, value: Any) -> int:
    """Return a whole number of at least 1 as an int; 7.5e9 is one.

    Raises:
        ValueError: it is anything else; the message calls it by `name`.
    """
    if not _is_finite(value) or value < 1 or value != math.floor(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def as_amount(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return a finite number of at least 0, fractions allowed; `above_zero` refuses 0 too.

    Raises:
        ValueError: it is anything else; the message calls it by `name`.
    """
    if not _is_finite(value) or value < 0 or (above_zero and value == 0):
        least = "above 0" if above_zero else "of at least 0"
        raise ValueError(f"{name} must be a number {least}, got {value!r}")
    return float(value)


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return isinstance(value, numbers.Integral) or math.isfinite(value)


def as_given(noun: type[Noun], given: Any, example: str, default: Noun | None = None) -> Noun:
    """Return what was given, or the default for None; `example` tells how one is made.

    Raises:
        TypeError: it is no `noun`.
    """
    value = default if given is None else given
    if isinstance(value, noun):
        return value
    raise TypeError(
        f"a {noun.__name__} is expected, got {type(given).__name__}: make one as in {example}"
    )
