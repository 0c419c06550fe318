"""The results of a program in memory: the largest, and how much of some lies there at one time."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from zerojax.hlo._collectives import Collective
from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._spellings import having
from zerojax.hlo._walk import SCHEDULED, walk

_NO_BUFFER = having("no buffer")
#: What makes of a value another name for it.
_NAMES = (having("keeps") | having("whole")) & _NO_BUFFER | {"tuple", "get-tuple-element"}


@dataclass(frozen=True, kw_only=True)
class Result:
    """Name the result of an instruction, in bytes of one device."""

    name: str
    shape: str
    bytes: int
    op_name: str


def largest_results(module: Module, count: int) -> list[Result]:
    """List the largest results that lie in a device's memory; some of them share a buffer."""
    lines = {id(line): line for _, line in walk(module, SCHEDULED)}
    found = [
        Result(name=line.name, shape=_text(line), bytes=size, op_name=line.op_name)
        for line in lines.values()
        if line.opcode not in _NO_BUFFER
        and not any(tensor.is_far for tensor in line.shapes)
        and (size := sum(tensor.bytes for tensor in line.shapes))
    ]
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _text(line: Instruction) -> str:
    """Write the shapes of a result, the largest first; of a tuple not what is next to nothing."""
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
    known: dict[str, int] = {}

    def peak(name: str) -> int:
        """Return the most of a computation; what it calls adds to what it holds meanwhile."""
        if name not in known:
            computation = module.computations[name]
            lines = computation.instructions
            place = {line.name: at for at, line in enumerate(lines)}
            alive = [0] * len(lines)
            for at, line in enumerate(lines):
                if (name, line.name) in sizes:
                    for later in range(at, _end(computation, place, line.name) + 1):
                        alive[later] += sizes[name, line.name]
                called = [callee for _, callee in line.called if callee in module.computations]
                if line.opcode in SCHEDULED:
                    alive[at] += max(map(peak, called), default=0)
            known[name] = max(alive)
        return known[name]

    return peak(module.entry.name)


def source_of(module: Module, record: Collective) -> str:
    """Return the instruction that made what a collective takes, under its first name.

    %g = f32[8,4] fusion(%x);  %b = f32[32] bitcast(%g);  %s = f32[4] reduce-scatter(%b)

    %s reduces what %g made. Of a fused collective that the text does not follow, its own name.
    """
    computation = module.computations.get(record.computation)
    lines = {line.name: line for line in computation.instructions} if computation else {}
    name, part = record.name, record.part if record.combined > 1 else 0
    while name in lines and len(lines[name].operands) > part:
        name, part = lines[name].operands[part], 0
        if name not in lines or lines[name].opcode not in _NAMES - {"tuple", "get-tuple-element"}:
            return name
    return name


def _end(
    computation: Computation, place: Mapping[str, int], name: str, index: int | None = None
) -> int:
    """Return the line that uses a result last, under other names and within tuples too.

    Of a tuple, `index` says which part. A barrier leaves such lines behind: of

    %t = (f32[8], f32[8]) tuple(%a, %b);  %c = f32[8] get-tuple-element(%t), index=1

    the second uses %b, and %a ends with the first.
    """
    last = place[name]
    for user in computation.users.get(name, ()):
        if user.opcode not in _NAMES:
            parts, at = [], place[user.name]
        elif user.opcode == "tuple":
            parts, at = [i for i, operand in enumerate(user.operands) if operand == name], 0
        elif user.opcode == "get-tuple-element" and index is not None:
            parts, at = [None] if user.attribute("index") == str(index) else [], 0
        else:
            parts, at = [index], 0
        last = max(last, at, *(_end(computation, place, user.name, part) for part in parts))
    return last
