"""What a program runs, and where it stands: in which loops, branches and fusions."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from zerojax.hlo._loops import Loop, trip_count
from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import SCATTER
from zerojax.hlo._values import Frame

#: What runs computations whose results lie in memory, as those within a fusion do not.
SCHEDULED = ("while", "call", "conditional")
#: What runs a computation beside what follows; a "call-start" does on a TPU's sparse cores.
BESIDE = ("async-start", "call-start")
#: The other ends of an `async-start`, which name its computation again.
_REPEATS = ("async-update", "async-done")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Hold a place in the program."""

    frame: Frame  # the computation, and what calls it
    loops: tuple[Loop, ...] = ()  # those around it, outermost first
    branches: tuple[tuple[str, int], ...] = ()  # (conditional, branch) around it, outermost first
    is_async: bool = False  # within an `async-start`
    keeps_part: bool = False  # within a TPU fusion that keeps one part of its all-reduce


def walk(
    module: Module, into: Collection[str] | None = None, site: Site | None = None
) -> Iterator[tuple[Site, Instruction]]:
    """Visit every instruction that the program runs, once for each place that calls it.

        ENTRY %main: %l = while(...), body=%layers;  %r = all-reduce(...)
        %layers: %f = fusion(...), calls=%scatter
        %scatter: %s = all-reduce(...)

    visits %l, %f (in loop %l), %s (in loop %l) and %r. `into` are the opcodes whose computations
    are visited too, all by default; `site` is where it starts, by default the entry.
    """
    site = site or Site(frame=Frame(computation=module.entry))
    for line in site.frame.computation.instructions:
        yield site, line
        for inner in inner_sites(module, site, line, into):
            yield from walk(module, into, inner)


def inner_sites(
    module: Module, site: Site, line: Instruction, into: Collection[str] | None = None
) -> Iterator[Site]:
    """List the places within the computations that a line runs, where its opcode is in `into`."""
    if line.opcode in _REPEATS or not (into is None or line.opcode in into):
        return
    for position, (_, name) in enumerate(line.called):
        if name not in module.computations:
            continue
        frame = Frame(computation=module.computations[name], caller=line, parent=site.frame)
        inner = dataclasses.replace(site, frame=frame)
        if line.opcode == "while":
            count = trip_count(module, line, site.frame)
            loop = Loop(name=line.name, body=name, trip_count=count)
            inner = dataclasses.replace(inner, loops=(*site.loops, loop))
        elif line.opcode == "conditional":
            branches = (*site.branches, (line.name, position))
            inner = dataclasses.replace(inner, branches=branches)
        elif line.opcode in BESIDE:
            inner = dataclasses.replace(inner, is_async=True)
        elif line.opcode == "fusion":
            keeps_part = bool(SCATTER.search(line.attributes))
            inner = dataclasses.replace(inner, keeps_part=keeps_part)
        yield inner
