"""How much of some results lies in memory at one time, by the schedule of the program."""

from __future__ import annotations

from collections.abc import Mapping

from zerojax.hlo._module import Computation, Module
from zerojax.hlo._spellings import having
from zerojax.hlo._values import Frame, Uses, Value
from zerojax.hlo._walk import SCHEDULED

_SAME_BUFFER = having("hands on") & having("no buffer")


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

    def peak(name: str) -> int:
        """Return the most of a computation; what it calls adds to what it holds meanwhile."""
        if name not in known:
            own = module.computations[name]
            most = _alive(module, own, {x: size for (at, x), size in sizes.items() if at == name})
            for at, line in enumerate(own.instructions):
                called = [callee for _, callee in line.called if callee in module.computations]
                if line.opcode in SCHEDULED:
                    most[at] += max(map(peak, called), default=0)
            known[name] = max(most)
        return known[name]

    return peak(module.entry.name)


def _alive(module: Module, computation: Computation, sizes: Mapping[str, int]) -> list[int]:
    """Return how much is in use at each line, under other names and within tuples too."""
    place = {line.name: at for at, line in enumerate(computation.instructions)}
    alive = [0] * len(place)
    for name in sizes.keys() & place.keys():
        walk = Uses(module, through=_SAME_BUFFER, into=())
        uses = walk.follow(Value(Frame(computation=computation), name, None))
        last = max((place[use.instruction.name] for use in uses), default=place[name])
        for at in range(place[name], last + 1):
            alive[at] += sizes[name]
    return alive
