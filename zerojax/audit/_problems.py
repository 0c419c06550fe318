"""`Problem`: what an audit found wrong, where, and what to do about it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Hold one thing that is wrong; its text has all of it."""

    kind: str = ""  # one of the names in `zerojax.audit.CHECKS`, which sets it
    where: str  # the leaf's path, or the operation
    expected: str  # what the layout asks for
    seen: str  # what the program does
    remedy: str  # what to do

    def __str__(self) -> str:
        """Return all parts as a text."""
        found = f"{self.kind}: {self.where}: {self.seen}; expected {self.expected}"
        return f"{found}\n  remedy: {self.remedy}"

    def to_dict(self) -> dict[str, str]:
        """Return the parts as plain data."""
        return dataclasses.asdict(self)
