"""What a program runs, and where: in which loops, how often, in which branches and fusions."""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from zerojax.hlo._module import Instruction, Module, Tensor
from zerojax.hlo._spellings import mark
from zerojax.hlo._values import Frame, is_zero, source_of

#: What runs computations whose results lie in memory, as those within a fusion do not.
SCHEDULED = ("while", "call", "conditional")
#: What runs a computation beside what follows; a "call-start" does on a TPU's sparse cores, a
#: "fusion-start" on a GPU (jax 0.12).
BESIDE = ("async-start", "call-start", "fusion-start")
#: The other ends of an `async-start`, which name its computation again.
_REPEATS = ("async-update", "async-done")
#: How many turns are followed: a difference that grew alike in two steps is taken to go on so.
_TURNS = 3
_SCATTER, _TRIP_COUNT = mark("SCATTER"), mark("TRIP_COUNT")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Name a loop that a collective stands in; `trip_count` is None where the text doesn't tell."""

    name: str
    body: str
    trip_count: int | None


@dataclass(frozen=True, kw_only=True)
class Site:
    frame: Frame  # the computation, and what calls it
    loops: tuple[Loop, ...] = ()  # those around it, outermost first
    branches: tuple[tuple[str, int], ...] = ()  # (conditional, branch) around it, outermost first
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
        inner = replace(site, frame=frame)
        if line.opcode == "while":
            loop = Loop(name=line.name, body=name, trip_count=trip_count(module, line, site.frame))
            inner = replace(inner, loops=(*site.loops, loop))
        elif line.opcode == "conditional":
            inner = replace(inner, branches=(*site.branches, (line.name, position)))
        elif line.opcode == "fusion":
            inner = replace(inner, keeps_part=bool(_SCATTER.search(line.attributes)))
        yield inner


def num_runs(loops: Iterable[Loop]) -> int:
    return math.prod(1 if loop.trip_count is None else loop.trip_count for loop in loops)


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """Return how often a while instruction runs its body, or None where the text doesn't tell.

    GPU and CPU print a known trip count. TPU prints none: it is read off the condition `i < n`,
    whose sides are followed through the first turns, where all leads to constants:

        %zero = s32[] constant(0)
        %state = (s32[], f32[8]) tuple(%zero, %x)
        %w = (s32[], f32[8]) while(%state), condition=%c, body=%b
        %c: %i = s32[] get-tuple-element(%s), index=0;  %six = s32[] constant(6)
            ROOT %less = pred[] compare(%i, %six), direction=LT
        %b: %next = s32[] add(%i, %one);  ROOT %t = (s32[], f32[8]) tuple(%next, %y)

    has `i - n` = -6, -5, -4, and runs 6 / 1 = 6 times.
    """
    if known := _TRIP_COUNT.search(loop.attributes):
        return int(known[1])
    body, test = frame.enter(module, loop), dict(loop.called).get("condition", "")
    if body is None or test not in module.computations:
        return None
    condition = replace(body, computation=module.computations[test])
    inner, compare = source_of(module, condition, condition.computation.root.name) or (None, None)
    if compare is None or inner is None or compare.opcode != "compare":
        return None
    # How far the two sides are from each other before each of the first turns.
    sides = [[_value(module, inner, x, turn) for x in compare.operands] for turn in range(_TURNS)]
    apart = [left - right for left, right in sides if left is not None and right is not None]
    steps = {after - before for before, after in itertools.pairwise(apart)}
    if len(apart) < _TURNS or len(steps) > 1 or steps == {0}:
        return None
    # The steps until the difference no longer compares to 0 as it did.
    direction, step = compare.attribute("direction") or "", steps.pop()
    beyond = {"LT": 0, "GT": 0, "NE": 0, "LE": 1, "GE": -1}.get(direction)
    if beyond is None or (direction == "NE" and apart[0] % step):
        return None
    return max(0, math.ceil((beyond - apart[0]) / step))


def _value(module: Module, frame: Frame, name: str, turn: int) -> int | None:
    found = source_of(module, frame, name)
    if found is None:
        return None
    frame, line = found
    if line.opcode == "constant":
        text = line.literal.strip()
        return int(text) if re.fullmatch(r"-?\d+", text) else None
    if line.opcode in ("add", "subtract"):
        left, right = (_value(module, frame, operand, turn) for operand in line.operands)
        if left is None or right is None:
            return None
        return left + right if line.opcode == "add" else left - right
    if line.opcode != "get-tuple-element":
        return None
    frame, source = source_of(module, frame, line.operands[0]) or (frame, line)
    loop, outside = frame.caller, frame.parent
    if source.opcode != "parameter" or not loop or not outside or loop.opcode != "while":
        return None
    body = outside.enter(module, loop)
    if body and turn > 0:
        root = body.computation.root
        is_tuple = root.opcode == "tuple"
        return _value(module, body, root.operands[line.index], turn - 1) if is_tuple else None
    found = source_of(module, outside, loop.operands[0])
    if found is None or found[1].opcode != "tuple":
        return None
    # The loops around it may be at any turn of theirs.
    starts = {_value(module, found[0], found[1].operands[line.index], x) for x in range(_TURNS)}
    return starts.pop() if len(starts) == 1 else None


_GROWS = ("add", "dynamic-update-slice")


@dataclass(frozen=True)
class Carry:
    """Hold a tensor that a loop starts with zeros and adds to, or writes into."""

    loop: str  # the while instruction
    tensor: Tensor  # what it carries
    is_sum: bool  # whether it is added to; else each turn writes a part of it
    op_name: str  # the jax operation that adds or writes
    written: str  # the opcode that makes what is written, such as "all-gather"


def find_carries(module: Module) -> Iterator[Carry]:
    """Visit the sums and the stacks of every loop.

    %zeros = f32[8] broadcast(%zero)
    %state = (s32[], f32[8]) tuple(%i, %zeros)
    %w = (s32[], f32[8]) while(%state), body=%b
    %b: %sum = f32[8] get-tuple-element(%s), index=1;  %new = f32[8] add(%sum, %g)
        ROOT %t = (s32[], f32[8]) tuple(%j, %new)         %w carries a sum: f32[8]
    """
    for site, line in walk(module, SCHEDULED):
        body = site.frame.enter(module, line) if line.opcode == "while" else None
        start = source_of(module, site.frame, line.operands[0]) if body else None
        if body is None or start is None or start[1].opcode != "tuple":
            continue
        root = body.computation.root
        pairs = zip(start[1].operands, root.operands, strict=False)
        for index, (first, last) in enumerate(pairs if root.opcode == "tuple" else ()):
            frame, made = source_of(module, body, last) or (body, root)
            if made.opcode not in _GROWS or not is_zero(module, start[0], first):
                continue
            if _grows(module, frame, made, body, index):
                found, is_sum = source_of(module, frame, made.operands[1]), made.opcode == "add"
                written = found[1].opcode.removesuffix("-done") if found else ""
                yield Carry(line.name, line.shapes[index], is_sum, made.op_name, written)


def _grows(module: Module, frame: Frame, line: Instruction, body: Frame, index: int) -> bool:
    if line.opcode in _GROWS:
        operands = line.operands[: 2 if line.opcode == "add" else 1]
        found = (source_of(module, frame, operand) for operand in operands)
        return any(one is not None and _grows(module, *one, body, index) for one in found)
    is_state = frame.computation is body.computation and line.opcode == "get-tuple-element"
    return is_state and line.index == index
