"""`Problem`: what an audit found wrong, where, and what to do about it."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Hold what a check found; its kind stands in the table of checks."""

    where: str  # the leaf's path, or the operation
    expected: str  # what the layout asks for
    seen: str  # what the program does
    remedy: str  # what to do


class Problem(str):
    """Hold one thing that is wrong; its text has all of it.

    Attributes:
        kind: one of the names in `zerojax.audit.CHECKS`.
        where: the leaf's path, or the operation.
        expected: what the layout asks for.
        seen: what the program does.
        remedy: what to do.
    """

    kind: str
    where: str
    expected: str
    seen: str
    remedy: str

    __slots__ = ("expected", "kind", "remedy", "seen", "where")

    def __new__(cls, *, kind: str, where: str, expected: str, seen: str, remedy: str) -> Problem:
        """Write the text from its parts."""
        text = f"{kind}: {where}: {seen}; expected {expected}\n  remedy: {remedy}"
        problem = super().__new__(cls, text)
        problem.kind, problem.where = kind, where
        problem.expected, problem.seen, problem.remedy = expected, seen, remedy
        return problem

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, str]]:
        """Let copies and pickles be made from the parts."""
        return (), self.to_dict()

    def to_dict(self) -> dict[str, str]:
        """Return the parts as plain data."""
        return {name: getattr(self, name) for name in sorted(self.__slots__)}
