"""Bytes in words: powers of 1000 for plans, as the paper has them, and of 1024 for compilers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unit:
    """A number of bytes, and its name."""

    name: str
    size: float


GIB, MIB = Unit("GiB", 2**30), Unit("MiB", 2**20)
DECIMAL = (Unit("GB", 1e9), Unit("MB", 1e6), Unit("kB", 1e3), Unit("bytes", 1.0))
#: A decimal unit is small enough where the largest figure has two digits before the point.
LEAST = 10


def binary_unit(largest: float) -> Unit:
    """Return the power of 1024 that suits a column whose largest number of bytes this is."""
    return GIB if largest >= 0.1 * GIB.size else MIB


def binary(count: float | None, unit: Unit) -> str:
    """Write bytes as a number of a unit: 79.11."""
    return "-" if count is None else f"{count / unit.size:,.2f}"


def in_words(count: float) -> str:
    """Write bytes with the power of 1024 that suits them: 79.11 GiB."""
    unit = binary_unit(count)
    return f"{binary(count, unit)} {unit.name}"


def decimal_unit(largest: float) -> Unit:
    """Return the power of 1000 that suits figures of which this is the largest."""
    return next((unit for unit in DECIMAL if largest >= LEAST * unit.size), DECIMAL[-1])


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")
