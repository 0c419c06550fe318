"""The results of a program in memory: the largest, how many are in use, what moves to the host."""

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerojax.hlo._collectives import Collective
from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import having, mark
from zerojax.hlo._values import Frame, Value, uses_of
from zerojax.hlo._walk import SCHEDULED, num_runs, walk

_NO_BUFFER = having("no buffer")
#: What makes of a value another name for it.
_VIEWS = (having("keeps") | having("whole")) & _NO_BUFFER
_NAMES = _VIEWS | {"tuple", "get-tuple-element"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Name the result of an instruction, in bytes of one device."""

    name: str
    shape: str
    bytes: int


def largest_results(module: Module, count: int) -> list[Result]:
    """List the largest results that lie in a device's memory; some of them share a buffer."""
    every = {id(line): line for _, line in walk(module, SCHEDULED)}.values()
    lines = (
        x for x in every if x.opcode not in _NO_BUFFER and not any(t.on_host for t in x.shapes)
    )
    sizes = ((x, sum(tensor.bytes for tensor in x.shapes)) for x in lines)
    found = [Result(name=x.name, shape=_text(x), bytes=size) for x, size in sizes if size]
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _text(line: Instruction) -> str:
    sizes = Counter((one.elements, f"{one.dtype}{list(one.dims)}") for one in line.shapes)
    ordered = sorted(sizes.items(), key=lambda item: -item[0][0])
    texts = [
        f"{count} x {text}" if count > 1 else text
        for (elements, text), count in ordered
        if elements >= ordered[0][0][0] / 100
    ]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def most_alive(module: Module, sizes: Mapping[tuple[str, str], int]) -> int:
    """Return the largest sum of sizes that is in use at one time, in the order of the schedule.

    %a = f32[8] all-gather(%x);  %y = f32[8] add(%a, %a)
    %b = f32[8] all-gather(%z);  %c = f32[8] all-gather(%w);  %d = f32[8] add(%b, %c)

    holds 16 elements of gathers at most: %b and %c, since %a is done before. `sizes` are those of
    the results that count, by (computation, instruction).
    """

    @functools.cache
    def peak(name: str) -> int:
        """Return the most of a computation; what it calls adds to what it holds meanwhile."""
        frame = Frame(computation=module.computations[name])
        lines = frame.computation.instructions
        place = {line.name: at for at, line in enumerate(lines)}
        alive = [0] * len(lines)
        for at, line in enumerate(lines):
            if (name, line.name) in sizes:
                # Until its last use, under other names and in tuples too. Of what a barrier leaves,
                #   %t = (f32[8], f32[8]) tuple(%a, %b);  %c = f32[8] get-tuple-element(%t), index=1
                # the second uses %b, and %a ends with the first.
                uses = uses_of(module, Value(frame, line.name, None), through=_NAMES, into=())
                for later in range(at, max([at, *(place[x.name] for x in uses)]) + 1):
                    alive[later] += sizes[name, line.name]
            called = [callee for _, callee in line.called if callee in module.computations]
            if line.opcode in SCHEDULED:
                alive[at] += max(map(peak, called), default=0)
        return max(alive)

    return peak(module.entry.name)


def operand_of(record: Collective) -> str:
    """Return the name of the instruction that made a collective's operand, behind views and copies.

    %g = f32[8,4] fusion(%x);  %b = f32[32] bitcast(%g);  %s = f32[4] reduce-scatter(%b)

    %s reduces what %g made. Of a fused collective that the text does not follow, its own name.
    """
    lines = record.frame.computation.by_name
    name = record.operand.name if lines[record.name].operands else record.name
    while name in lines and lines[name].opcode in _VIEWS:
        (name,) = lines[name].operands
    return name


_STAYS, _HOST_COMPUTES = having("stays"), mark("HOST_COMPUTES")
#: Bytes: indices and other scalars ride along.
_SCALAR = 8


@dataclass(frozen=True)
class HostMove:
    """Hold what one instruction moves each time it runs, in bytes of one device."""

    name: str  # the instruction
    to_host: int  # bytes from the device's memory to the host's
    from_host: int  # bytes the other way
    runs: int  # how often it runs in a step
    is_computed: bool  # whether the host computes with them


def find_host_moves(module: Module) -> Iterator[HostMove]:
    """Visit what moves bytes to or from the host's memory, once for each place that runs it.

    Programs spell it three ways: a computation that the host runs takes its operands from where
    they lie; a copy has its source in one memory and its result in the other; a slice is read from,
    or written into, a tensor that the host's memory holds. The memory stands in the layout: `S(5)`.

    %far = f32[4,8]{1,0:S(5)} parameter(0)
    %near = f32[1,8]{1,0} dynamic-slice(%far, %i, %z)     from the host: 32 B
    %back = f32[8]{0:S(5)} copy(%x)                       to the host: 32 B
    """
    for site, line in walk(module, SCHEDULED):
        down, up, computed = (0, 0, False) if line.opcode in _STAYS else _moved(line, site.frame)
        if down or up:
            yield HostMove(line.name, down, up, num_runs(site.loops), computed)


def _moved(line: Instruction, frame: Frame) -> tuple[int, int, bool]:
    by_name = frame.computation.by_name
    given = [x for name in line.operands if name in by_name for x in by_name[name].shapes]
    made = [*line.shapes]
    if _HOST_COMPUTES.search(line.attributes):
        if line.opcode.endswith("-start"):  # operands, results, context
            made = made[len(given) : -1]
        near = [sum(x.bytes for x in tensors if not x.on_host) for tensors in (given, made)]
        return near[0], near[1], True
    if line.opcode == "copy-start":
        made = made[:1]
    elif line.opcode.endswith("-start"):  # counted where it is done
        return 0, 0, False
    if not given or not made or all(x.on_host == made[0].on_host for x in given + made):
        return 0, 0, False
    if made[0].on_host:  # a copy, or a slice written into what lies there
        inserted = sum(x.bytes for x in given if not x.on_host and x.bytes > _SCALAR)
        return min(made[0].bytes, inserted), 0, False
    return 0, min(made[0].bytes, sum(x.bytes for x in given if x.on_host)), False
