"""How much of some results lies in memory at one time, by the schedule of the program."""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._spellings import having
from zerojax.hlo._walk import SCHEDULED

_HANDS_ON = having("hands on") & having("no buffer")
_NONE: frozenset[str] = frozenset()


def most_alive(module: Module, sizes: Mapping[tuple[str, str], int]) -> int:
    """Return the largest sum of sizes that is in use at one time, in the order of the schedule.

    %a = f32[8] all-gather(%x);  %y = f32[8] add(%a, %a)
    %b = f32[8] all-gather(%z);  %c = f32[8] all-gather(%w);  %d = f32[8] add(%b, %c)

    holds 16 elements of gathers at most: %b and %c, since %a is done before.

    Args:
        module: the program, scheduled.
        sizes: of the results that count, by (computation, instruction).
    """
    known: dict[str, int] = {}

    def peak(computation: Computation) -> int:
        """Return the most of a computation; what it calls adds to what it holds meanwhile."""
        if computation.name not in known:
            last, alive, most = _last_uses(computation), 0, 0
            ends: dict[int, int] = {}
            for at, line in enumerate(computation.instructions):
                size = sizes.get((computation.name, line.name), 0)
                end = last.get(line.name, at)
                alive, ends[end] = alive + size, ends.get(end, 0) + size
                called = [name for _, name in line.called] if line.opcode in SCHEDULED else []
                found = [peak(module.computations[x]) for x in called if x in module.computations]
                most = max(most, alive + max(found, default=0))
                alive -= ends.pop(at, 0)
            known[computation.name] = most
        return known[computation.name]

    return peak(module.entry)


def _last_uses(computation: Computation) -> dict[str, int]:
    """Return where every result is used last, under other names and within tuples too."""
    last: dict[str, int] = {}
    of: dict[str, frozenset[str]] = {}
    parts: dict[str, list[frozenset[str]]] = {}
    for at, line in enumerate(computation.instructions):
        held = [of.get(name, _NONE) for name in line.operands]
        for name in _NONE.union(*held):
            last[name] = at
        of[line.name] = frozenset([line.name]) | _kept(line, held, parts)
        if line.opcode == "tuple":
            parts[line.name] = held
        elif line.opcode == "opt-barrier" and line.operands[0] in parts:
            parts[line.name] = parts[line.operands[0]]
    return last


def _kept(
    line: Instruction, held: list[frozenset[str]], parts: Mapping[str, list[frozenset[str]]]
) -> frozenset[str]:
    """Return the results whose memory an instruction's result has."""
    if line.opcode == "get-tuple-element":
        index = int(line.attribute("index") or 0)
        return parts[line.operands[0]][index] if line.operands[0] in parts else held[0]
    is_whole = line.opcode == "tuple" or line.opcode in _HANDS_ON
    return _NONE.union(*held) if is_whole else _NONE
