"""Bytes in words: powers of 1000 for plans, as the paper has them, and of 1024 for compilers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Unit:
    """A number of bytes.

    Attributes:
        name: what it is called.
        size: bytes.
        least: the largest figure of a column has at least so many of its unit.
    """

    name: str
    size: float
    least: float

    def number(self, count: float | None) -> str:
        """Write bytes as a number of this unit: 79.11 GiB as 79.11, 31.4 GB as 31.4."""
        if count is None:
            return "-"
        return f"{count / self.size:,.2f}" if self in BINARY else amount(count / self.size)

    def words(self, count: float) -> str:
        """Write bytes with this unit: 79.11 GiB."""
        return f"{self.number(count)} {self.name}"


BINARY = (Unit("GiB", 2**30, 0.1), Unit("MiB", 2**20, 0))
DECIMAL = (Unit("GB", 1e9, 10), Unit("MB", 1e6, 10), Unit("kB", 1e3, 10), Unit("bytes", 1, 0))


def unit_for(largest: float, units: tuple[Unit, ...]) -> Unit:
    """Return the unit that suits figures of which this is the largest."""
    return next(unit for unit in units if largest >= unit.least * unit.size)


def binary(count: float) -> str:
    """Write bytes with the power of 1024 that suits them: 79.11 GiB."""
    return unit_for(count, BINARY).words(count)


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")
