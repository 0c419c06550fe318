"""What a scheduled program does, in its order, and what each instruction costs."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zerojax.hlo._module import Computation, Instruction, Module, Tensor
from zerojax.hlo._parse import async_ends, async_role, is_collective, is_end
from zerojax.hlo._spellings import having, mark
from zerojax.hlo._values import Frame
from zerojax.hlo._walk import BESIDE, SCHEDULED, Loop, Site, inner_sites

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d," ]*)')
_WINDOW = re.compile(r"window=\{size=([\dx]+)")
#: Custom calls of a TPU that name a part of the memory and move nothing.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast")
#: What runs beside others: copies between memories, and collectives.
_BESIDE = re.compile(r"send|recv|.*-(?:start|update|done)")
_PRODUCTS = ("dot", "convolution", "custom-call")
_FREE = having("no buffer") | having("moves")
_PARTS = ("dynamic-slice", "slice", "gather")
#: What is written over its first operand, and which operand says what.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
#: Bytes below which an instruction without an estimate is a counter or an index, which takes none.
_LEAST = 1024
_CYCLES, _REMATERIALISED = mark("CYCLES"), mark("REMATERIALISED")


@dataclass(frozen=True)
class Cost:
    """Count what one run of an instruction takes of a device."""

    cycles: int = 0  # as a TPU's compiler estimates; 0 where it does not
    flops: float = 0.0  # of its products
    flops_fp32: float = 0.0  # of those of them that multiply fp32
    bytes: int = 0  # read and written

    def __bool__(self) -> bool:
        return self != Cost()


def cost_of(module: Module, computation: Computation, line: Instruction) -> Cost:
    """Return the cost of a scheduled instruction; none for what only hands values on.

        %f = bf16[2048,4096] fusion(%x, %w), calls=%dot, backend_config={"estimated_cycles":"36864"}

    costs 36,864 cycles on a TPU. A GPU's compiler writes no estimate: with %x of bf16[2048,1024]
    and %w of bf16[1024,4096] it is 2 x 2048 x 1024 x 4096 FLOP, and the bytes of all three.
    """
    if cycles := _CYCLES.search(line.attributes):
        return Cost(cycles=int(cycles[1]))
    is_free = line.opcode in _FREE or _BESIDE.fullmatch(line.opcode)
    if is_free or line.attribute("custom_call_target") in _NAMES_MEMORY:
        return Cost()
    size = _bytes(module, computation, line)
    if size < _LEAST:
        return Cost()
    flops = dict.fromkeys((False, True), 0.0)
    for operand, count in _products(module, computation, line):
        flops[operand.dtype in ("f32", "f64")] += count
    return Cost(flops=flops[False], flops_fp32=flops[True], bytes=size)


def _products(
    module: Module, computation: Computation, line: Instruction
) -> Iterator[tuple[Tensor, float]]:
    """List the products that an instruction does, as an operand and the FLOP of each.

    %d = f32[8,64] dot(%x, %w), lhs_contracting_dims={1}      2 x 8 x 64 x the size of dim 1 of %x
    """
    if line.opcode in ("fusion", "call") and (callee := module.callee(line)) is not None:
        for inner in callee.instructions:
            yield from _products(module, callee, inner)
        return
    if line.opcode not in _PRODUCTS:
        return
    operands = [computation.by_name.get(name) for name in line.operands[:2]]
    known = [operand.shapes[0] for operand in operands if operand and operand.shapes]
    if len(known) < 2 or not line.shapes:
        return
    if dims := _CONTRACTED.search(line.attributes):
        sizes = [known[0].dims[int(dim)] for dim in re.findall(r"\d+", dims[1])]
        yield known[0], 2 * line.shapes[0].elements * math.prod(sizes)
    elif window := _WINDOW.search(line.attributes):
        # [b s, i] and [k, i, o] give [b s, o]: the three and the window's k are (b s i o k)^2.
        # Exact for any of a convolution's three products at stride 1.
        all_three = math.prod(tensor.elements for tensor in (*known, line.shapes[0]))
        kernel = math.prod(int(size) for size in window[1].split("x"))
        yield known[0], 2 * math.sqrt(all_three * kernel)


def _bytes(module: Module, computation: Computation, line: Instruction) -> int:
    """Count what an instruction reads and writes; of a slice, an update or a scatter, that part.

    %f { %p = f32[8,64] parameter(0);  ROOT %s = f32[1,64] dynamic-slice(%p, %i, %zero) }

    reads and writes 256 bytes each, not the 2,048 of its operand.
    """
    operands = [computation.by_name.get(name) for name in line.operands]
    callee = module.callee(line) if line.opcode == "fusion" else None
    if callee is None:
        written = _written(computation, line)
        if line.opcode in (*_PARTS, *_IN_PLACE):
            return 2 * written
        return written + sum(_size(operand) for operand in operands if operand)
    given = ((n, x) for n, x in enumerate(operands) if x and n in callee.parameters)
    read = sum(_bytes_read(callee, callee.parameters[n], x) for n, x in given)
    root = callee.root
    roots = [callee.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return read + sum(_written(callee, one) for one in roots)


def _bytes_read(callee: Computation, parameter: Instruction, operand: Instruction) -> int:
    users = callee.users.get(parameter.name, [])
    while len(users) == 1 and users[0].opcode == "bitcast":
        parameter, users = users[0], callee.users.get(users[0].name, [])
    total = 0
    for user in users:
        if user.operands[0] != parameter.name:
            return _size(operand)
        if user.opcode in _PARTS:
            total += _size(user)
        elif user.opcode not in _IN_PLACE:
            return _size(operand)
    return min(total, _size(operand))


def _written(computation: Computation, line: Instruction) -> int:
    while line.opcode == "bitcast":
        line = computation.by_name[line.operands[0]]
    if line.opcode in _IN_PLACE:
        update = computation.by_name.get(line.operands[_IN_PLACE[line.opcode]])
        return _size(update) if update else 0
    return _size(line)


def _size(line: Instruction) -> int:
    return sum(tensor.bytes for tensor in line.shapes)


#: Names a collective: the computation and the instruction, and the loops around them.
Key = tuple[str, str, tuple[Loop, ...]]
Held = tuple[Computation, Instruction]  # a collective and the computation that it stands in


@dataclass(frozen=True, kw_only=True)
class Operation:
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

    are three operations: the gather's beginning, what costs what the fusion does, and its end.
    """
    if "is_scheduled=true" not in module.header:
        return None
    lines = ((one, line) for one in module.computations.values() for line in one.instructions)
    lines = (pair for pair in lines if _REMATERIALISED.search(pair[1].name))
    again = [line.name for one, line in lines if cost_of(module, one, line)]
    operations = _read(module, Site(frame=Frame(computation=module.entry)))
    return Schedule(operations=tuple(operations), rematerialised=tuple(again))


def _read(module: Module, site: Site) -> Iterator[Operation]:
    started: dict[str, str] = {}  # by the start's name or its chain: the start
    for line in site.frame.computation.instructions:
        inner = list(inner_sites(module, site, line, SCHEDULED))
        count = inner[0].loops[-1].trip_count if line.opcode == "while" and inner else 1
        held = list(_collectives(module, site.frame.computation, line))
        begun = (pair for pair in held if async_role(*pair)[0] != "repeat")
        begins = tuple((where.name, one.name, site.loops) for where, one in begun)
        cost = Cost() if inner else cost_of(module, site.frame.computation, line)
        one = Operation(
            name=line.name,
            op_name=line.op_name,
            source=module.source(line),
            cost=cost if cost.cycles or not held else Cost(),  # moving is not computing
            begins=begins,
            ends=_ends(module, line, bool(begins), held, started),
            times=1 if count is None else count,
            bodies=tuple(body for one in inner if (body := tuple(_read(module, one)))),
        )
        if one.begins or one.ends or one.bodies or one.cost:
            yield one


def _collectives(module: Module, computation: Computation, line: Instruction) -> Iterator[Held]:
    callee = module.callee(line)
    if is_collective(line):
        if not is_end(line) and line.opcode != "recv":  # the other end of a send
            yield computation, line
    elif callee is not None and line.opcode in ("fusion", *BESIDE):
        for inner in callee.instructions:
            yield from _collectives(module, callee, inner)


def _ends(
    module: Module, line: Instruction, begins: bool, held: Sequence[Held], started: dict[str, str]
) -> str:
    """Return which operation's collectives a line waits for; notes in `started` what it starts."""
    callee = module.callee(line) if line.opcode == "fusion" else None
    marks = async_ends(callee.instructions) if callee else set()
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
