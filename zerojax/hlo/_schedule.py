"""What a scheduled program does, in its order: work, loops, and where collectives begin and end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerojax.hlo._costs import Cost, cost_of
from zerojax.hlo._loops import Loop
from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._parse import async_role, is_collective, is_end
from zerojax.hlo._spellings import SPELLINGS
from zerojax.hlo._values import Frame
from zerojax.hlo._walk import BESIDE, SCHEDULED, Site, inside

_START, _DONE = SPELLINGS["async start"].mark, SPELLINGS["async done"].mark
_REMATERIALISED = SPELLINGS["rematerialised"].mark
#: Names a collective: the computation and the instruction, and the loops around them.
Key = tuple[str, str, tuple[Loop, ...]]
Held = tuple[str, Instruction]  # a collective and the computation that it stands in


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Hold one instruction in the order of its schedule.

    A synchronous collective begins and ends with one operation; an asynchronous one begins with
    one and ends with a later one of the same list.
    """

    name: str
    op_name: str
    source: str  # file:line
    cost: Cost
    begins: tuple[Key, ...] = ()  # collectives that it issues
    ends: str = ""  # the operation whose collectives it waits for; its own name where it blocks
    times: int = 1  # how often `bodies` run
    # what a loop or a call runs, or what each branch of a conditional does
    bodies: tuple[tuple[Operation, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Hold what a program does, and what its compiler did to fit it into memory."""

    operations: tuple[Operation, ...]
    rematerialised: tuple[str, ...]  # instructions that the compiler itself runs again


def parse_schedule(module: Module) -> Schedule | None:
    """Read a program in the order of its schedule; None where the compiler gave it none.

        %gather = (bf16[512], bf16[4096]) all-gather-start(%shard), ...
        %dot = bf16[8,64] fusion(%x, %w), ...
        %whole = bf16[4096] all-gather-done(%gather)

    are three operations: one that begins the gather, one that costs what the fusion does, and one
    that ends the first.
    """
    if "is_scheduled=true" not in module.header:
        return None
    again = [
        line.name
        for computation in module.computations.values()
        for line in computation.instructions
        if _REMATERIALISED.search(line.name) and cost_of(module, computation, line)
    ]
    found = _Reader(module).read(Site(frame=Frame(computation=module.entry)))
    return Schedule(operations=found, rematerialised=tuple(again))


@dataclass(frozen=True)
class _Reader:
    """Reads the computations of a program."""

    module: Module

    def read(self, site: Site) -> tuple[Operation, ...]:
        """List what a place in the program does, without what takes nothing."""
        started: dict[str, str] = {}  # by the start's name or its chain: the start
        found = []
        for line in site.frame.computation.instructions:
            one = self._nested(site, line) or self._operation(site, line, started)
            if one.begins or one.ends or one.bodies or one.cost:
                found.append(one)
        return tuple(found)

    def _nested(self, site: Site, line: Instruction) -> Operation | None:
        if line.opcode not in SCHEDULED:
            return None
        sites = [
            inside(self.module, site, line, name, position)
            for position, (role, name) in enumerate(line.called)
            if role != "condition" and name in self.module.computations
        ]
        count = sites[0].loops[-1].trip_count if line.opcode == "while" and sites else 1
        return Operation(
            name=line.name,
            op_name=line.op_name,
            source="",
            cost=Cost(),
            times=1 if count is None else count,
            bodies=tuple(self.read(inner) for inner in sites),
        )

    def _operation(self, site: Site, line: Instruction, started: dict[str, str]) -> Operation:
        computation = site.frame.computation
        held = list(self._collectives(computation, line))
        cost = cost_of(self.module, computation, line)
        begins, ends = self._moves(site, line, held, started)
        return Operation(
            name=line.name,
            op_name=line.op_name,
            source=self.module.source(line),
            cost=cost if cost.cycles or not held else Cost(),  # moving is not computing
            begins=begins,
            ends=ends,
        )

    def _moves(
        self, site: Site, line: Instruction, held: Sequence[Held], started: dict[str, str]
    ) -> tuple[tuple[Key, ...], str]:
        """Return which collectives a line begins, and which operation's it waits for."""
        chains = [chain for _, one in held if (chain := one.attribute("chain_id"))]
        begins, ends = tuple(self._begun(site, held)), ""
        if line.opcode == "async-update":
            started[line.name] = started.get(line.operands[0], "")
        elif line.opcode.endswith("-done") or self._calls(line, _DONE):
            names = (*line.operands[:1], *chains)
            ends = next((started[name] for name in names if name in started), "")
        elif begins and not self._is_start(line):
            ends = line.name
        elif begins:
            started |= dict.fromkeys((line.name, *chains), line.name)
        return begins, ends

    def _begun(self, site: Site, held: Sequence[Held]) -> Iterator[Key]:
        """List the collectives that are not repeated from the start of an asynchronous fusion."""
        for where, one in held:
            if async_role(self.module.computations[where], one)[0] != "repeat":
                yield where, one.name, site.loops

    def _collectives(self, computation: Computation, line: Instruction) -> Iterator[Held]:
        """List the collectives that a line is, or that its fusion holds, and where they stand."""
        callee = self.module.callee(line)
        if is_collective(line):
            if not is_end(line) and line.opcode != "recv":  # the other end of a send
                yield computation.name, line
        elif callee is not None and line.opcode in ("fusion", *BESIDE):
            for inner in callee.instructions:
                yield from self._collectives(callee, inner)

    def _is_start(self, line: Instruction) -> bool:
        is_named = line.opcode == "send" or line.opcode.endswith("-start")
        return is_named or self._calls(line, _START)

    def _calls(self, line: Instruction, mark: re.Pattern[str]) -> bool:
        callee = self.module.callee(line) if line.opcode == "fusion" else None
        return callee is not None and any(mark.search(x.attributes) for x in callee.instructions)
