"""What a scheduled program does, in its order: work, loops, and where collectives begin and end."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerojax.hlo._costs import Cost, cost_of
from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._parse import async_role, is_collective, is_end
from zerojax.hlo._spellings import ASYNC_END, REMATERIALISED
from zerojax.hlo._values import Frame
from zerojax.hlo._walk import BESIDE, SCHEDULED, Loop, Site, inner_sites

#: Names a collective: the computation and the instruction, and the loops around them.
Key = tuple[str, str, tuple[Loop, ...]]
Held = tuple[Computation, Instruction]  # a collective and the computation that it stands in


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
    bodies: "tuple[tuple[Operation, ...], ...]" = ()


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
        if REMATERIALISED.search(line.name) and cost_of(module, computation, line)
    ]
    operations = _read(module, Site(frame=Frame(computation=module.entry)))
    return Schedule(operations=operations, rematerialised=tuple(again))


def _read(module: Module, site: Site) -> tuple[Operation, ...]:
    """List what a place in the program does, without what takes nothing."""
    started: dict[str, str] = {}  # by the start's name or its chain: the start
    found = []
    for line in site.frame.computation.instructions:
        inner = list(inner_sites(module, site, line, SCHEDULED))
        count = inner[0].loops[-1].trip_count if line.opcode == "while" and inner else 1
        held = list(_collectives(module, site.frame.computation, line))
        begins = tuple(
            (where.name, one.name, site.loops)
            for where, one in held
            if async_role(where, one)[0] != "repeat"
        )
        cost = Cost() if inner else cost_of(module, site.frame.computation, line)
        one = Operation(
            name=line.name,
            op_name=line.op_name,
            source=module.source(line),
            cost=cost if cost.cycles or not held else Cost(),  # moving is not computing
            begins=begins,
            ends=_ends(module, line, begins, held, started),
            times=1 if count is None else count,
            bodies=tuple(body for one in inner if (body := _read(module, one))),
        )
        if one.begins or one.ends or one.bodies or one.cost:
            found.append(one)
    return tuple(found)


def _collectives(module: Module, computation: Computation, line: Instruction) -> Iterator[Held]:
    """List the collectives that a line is, or that its fusion holds, and where they stand."""
    callee = module.callee(line)
    if is_collective(line):
        if not is_end(line) and line.opcode != "recv":  # the other end of a send
            yield computation, line
    elif callee is not None and line.opcode in ("fusion", *BESIDE):
        for inner in callee.instructions:
            yield from _collectives(module, callee, inner)


def _ends(
    module: Module,
    line: Instruction,
    begins: Sequence[Key],
    held: Sequence[Held],
    started: dict[str, str],
) -> str:
    """Return which operation's collectives a line waits for; notes in `started` what it starts."""
    callee = module.callee(line) if line.opcode == "fusion" else None
    marks = {
        m[1]
        for x in (callee.instructions if callee else ())
        if (m := ASYNC_END.search(x.attributes))
    }
    names = [chain for _, one in held if (chain := one.attribute("chain_id"))]
    if line.opcode == "async-update":
        started[line.name] = started.get(line.operands[0], "")
    elif line.opcode.endswith("-done") or "Done" in marks:
        names = [*line.operands[:1], *names]
        return next((started[name] for name in names if name in started), "")
    elif begins and (line.opcode == "send" or line.opcode.endswith("-start") or "Start" in marks):
        started |= dict.fromkeys((line.name, *names), line.name)
    elif begins:
        return line.name
    return ""
