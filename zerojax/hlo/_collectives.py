"""Collectives of a compiled program: what one moves, how often, and between which devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zerojax.hlo._groups import Groups
from zerojax.hlo._values import Frame, Value
from zerojax.hlo._walk import Loop, num_runs


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Record one tensor that one instruction moves; a combined instruction gives several records.

    `shape` is the whole: what a gather returns, what a reduction, a scatter or a permute takes.
    `spelling` tells how the backend wrote it: "all-reduce-scatter fusion" (TPU), "all-reduce +
    slice" (an all-reduce of which each device keeps one part), "all-reduce of parts" (a gather as
    the sum of tensors that are zero but for one part), "windowed all-gather" and "windowed
    reduce-scatter" (permutes that a matmul overlaps), "megascale" (between TPU slices), or `op`.
    """

    op: str
    spelling: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bits: int
    groups: Groups  # of a permute: (source, target) pairs
    group_size: int
    loops: tuple[Loop, ...] = ()  # outermost first
    branches: tuple[tuple[str, int], ...] = ()  # (conditional, branch), outermost first
    is_async: bool = False
    is_added: bool = False  # whether it could have been added to another all-reduce's operand
    combined: int = 1  # how many tensors the instruction carries
    part: int = 0  # which of them this is
    frame: Frame = field(repr=False, compare=False)  # where the instruction stands
    op_name: str = ""
    source: str = ""  # file:line

    @property
    def computation(self) -> str:
        """Name the computation that the instruction stands in."""
        return self.frame.computation.name

    @property
    def operand(self) -> Value:
        """Return what is moved, as it goes in."""
        operands = self.frame.computation.by_name[self.name].operands
        return Value(self.frame, operands[min(self.part, len(operands) - 1)], None)

    @property
    def result(self) -> Value:
        """Return what is moved, as it comes out."""
        return Value(self.frame, self.name, self.part if self.combined > 1 else None)

    @property
    def elements(self) -> int:
        """Count the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def trips(self) -> tuple[int | None, ...]:
        """Return the lengths of the loops around it, outermost first."""
        return tuple(loop.trip_count for loop in self.loops)

    @property
    def runs(self) -> int:
        """Count how often a step runs it; a loop of unknown length counts as one turn."""
        return num_runs(self.loops)

    @property
    def moved_elements(self) -> float:
        """Count the elements that a device sends in a step, by the ring algorithm.

        (n-1)/n of the whole for a gather, a scatter and an all-to-all over n devices, twice that
        for an all-reduce, the whole for a permute or a broadcast (Patarasuk and Yuan, 2009).
        """
        ring = (self.group_size - 1) / self.group_size
        moves = float(self.group_size > 1)
        if self.op == "collective-permute":
            moves = float(any(source != target for source, target in self.groups))
        whole = {"collective-permute": moves, "collective-broadcast": moves, "all-reduce": 2 * ring}
        return self.runs * self.elements * whole.get(self.op, ring)

    @property
    def moved_bytes(self) -> float:
        """Count the bytes that a device sends in a step."""
        return self.moved_elements * self.item_bits / 8


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Hold what was read: records, and the lines with a collective that could not be."""

    records: tuple[Collective, ...]
    unread: tuple[str, ...]


def sum_moved(records: Iterable[Any], name: str = "moved_elements", depth: int = 0) -> float:
    """Add the moved elements, or another attribute, with each conditional's worst branch.

    Records are collectives, or anything that has their `branches`; `depth` conditionals are around.
    """
    total = 0.0
    inside: dict[str, dict[int, list[Any]]] = {}
    for record in records:
        if len(record.branches) == depth:
            total += getattr(record, name)
        else:
            conditional, branch = record.branches[depth]
            inside.setdefault(conditional, {}).setdefault(branch, []).append(record)
    for branches in inside.values():
        total += max(sum_moved(branch, name, depth + 1) for branch in branches.values())
    return total
