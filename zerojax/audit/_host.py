"""What a program moves between a device and its host's memory. Pure.

Programs spell it three ways: a computation that the host runs takes its operands from where they
lie; a copy has its source in one memory and its result in the other; a slice is read from, or
written into, a tensor that the host's memory holds. The memory stands in the layout: `S(5)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.audit._arguments import Held, item_bits
from zerojax.audit._evidence import Evidence
from zerojax.hlo._loops import Frame, trip_count
from zerojax.hlo._module import Instruction, Module, parse_shapes
from zerojax.planner import offload_traffic_bytes

_TENSOR = re.compile(r"([a-z]\w*\[[\d,<=]*\])(\{[^{}]*\})?")
#: How the layout of a tensor names the host's memory.
HOST_MEMORY = "S(5)"
#: What names values and moves none.
_NAMES = frozenset(
    {
        "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "while", "conditional",
        "call", "opt-barrier", "optimization-barrier", "after-all", "copy-done", "custom-call-done",
        "async-start", "async-update", "partition-id",
    }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HostMove:
    """Hold what one instruction moves each time it runs, in bytes of one device.

    Attributes:
        name: the instruction.
        op_name: the jax operation that it came from.
        to_host: bytes from the device's memory to the host's.
        from_host: bytes the other way.
        trips: how often it runs in a step, None where the text doesn't tell.
        is_computed: whether the host computes with them.
    """

    name: str
    op_name: str
    to_host: int
    from_host: int
    trips: int | None
    is_computed: bool


@dataclass(frozen=True, kw_only=True)
class HostTraffic:
    """Count the bytes between one device and its host in a step.

    Attributes:
        to_host: from the device's memory to the host's.
        from_host: from the host's memory to the device's.
        updated: both ways for what the host itself computes: the optimizer's update.
        theory: bytes that this update has to move: gradients down and parameters up, 4 Psi / N
            with 16 bits (ZeRO-Offload); 0 where no state lives in the host's memory.
        moves: one by one.
    """

    to_host: int
    from_host: int
    updated: int
    theory: int
    moves: tuple[HostMove, ...]

    @property
    def total(self) -> int:
        """Add both ways."""
        return self.to_host + self.from_host

    def to_dict(self) -> dict[str, object]:
        """Give the counts as plain data."""
        names = ("to_host", "from_host", "total", "updated", "theory")
        return {name: getattr(self, name) for name in names}


def traffic_of(evidence: Evidence) -> HostTraffic:
    """Count what a program moves to and from the host; an unknown loop counts once."""
    moves = tuple(find_moves(evidence.module))
    down, up = (sum(getattr(m, way) * (m.trips or 1) for m in moves) for way in _WAYS)
    computed = [m for m in moves if m.is_computed]
    updated = sum((m.to_host + m.from_host) * (m.trips or 1) for m in computed)
    return HostTraffic(
        to_host=down, from_host=up, updated=updated, theory=_theory(evidence), moves=moves
    )


_WAYS = ("to_host", "from_host")


def held_on_host(evidence: Evidence) -> list[Held]:
    """List the arguments in the host's memory, as their sharding or the program says."""
    numbers = {
        int(line.literal)
        for line in evidence.module.entry.instructions
        if line.opcode == "parameter" and HOST_MEMORY in line.type
    }
    return [
        one for one in evidence.held if one.argument.memory_kind or one.argument.number in numbers
    ]


def find_moves(module: Module) -> Iterator[HostMove]:
    """Visit what moves bytes to or from the host's memory, once for each place that runs it."""
    yield from _visit(module, Frame(computation=module.entry), 1)


def _theory(evidence: Evidence) -> int:
    """Count what ZeRO-Offload's update moves: of each leaf a gradient down and a parameter up."""
    states = [one for one in held_on_host(evidence) if one.kind in ("master", "optimizer")]
    owners = {one.parameter for one in states if one.parameter is not None}
    has_masters = bool(evidence.states("master"))
    wide = evidence.recipe.accumulate > 1 or evidence.recipe.precision.reduce is not None
    bits = 0.0
    for index in owners:
        leaf = evidence.layout.leaves[index]
        own = evidence.parameter_bits.get(index, item_bits(str(leaf.dtype)))
        gradient = max(own, 32) if wide else own
        # Without masters the parameters themselves are updated, and go down as well.
        each = gradient + own if has_masters else gradient + 2 * own
        size = leaf.bytes_per_device(partitioned=True, dtype="uint8")
        bits += offload_traffic_bytes(size) / 4 * each if size else 0
    return round(bits / 8)


def _visit(module: Module, frame: Frame, trips: int | None) -> Iterator[HostMove]:
    for line in frame.computation.instructions:
        if line.opcode in ("while", "call", "conditional"):
            for _, name in line.called:
                if name in module.computations:
                    inner = Frame(computation=module.computations[name], caller=line, parent=frame)
                    count = trip_count(module, line, frame) if line.opcode == "while" else 1
                    known = None if trips is None or count is None else trips * count
                    yield from _visit(module, inner, known)
        elif line.opcode not in _NAMES:
            down, up, is_computed = _moved(line, frame)
            if down or up:
                yield HostMove(
                    name=line.name, op_name=line.op_name, to_host=down, from_host=up, trips=trips,
                    is_computed=is_computed,
                )  # fmt: skip


def _moved(line: Instruction, frame: Frame) -> tuple[int, int, bool]:
    """Count the bytes that one instruction moves down and up."""
    by_name = frame.computation.by_name
    operands = [by_name[name].type for name in line.operands if name in by_name]
    if 'async_execution_thread="host"' in line.attributes or "HostExecute" in line.attributes:
        tensors = _tensors(line.type)
        if line.opcode.endswith("-start"):  # operands, results, context
            tensors = tensors[sum(len(_tensors(x)) for x in operands) : -1]
        down = sum(size for x in operands for size, far in _tensors(x) if not far)
        return down, sum(size for size, far in tensors if not far), True
    given = [tensor for x in operands for tensor in _tensors(x)]
    made = _tensors(line.type)
    if line.opcode == "copy-start":
        made = made[:1]
    elif line.opcode.endswith("-start"):  # counted where it is done
        return 0, 0, False
    if not given or not made or all(far == made[0][1] for _, far in given + made):
        return 0, 0, False
    size, far = made[0]
    if far:  # a copy, or a slice written into what lies there
        inserted = [n for n, is_far in given if not is_far and n > _SCALAR]
        return (min(size, sum(inserted)), 0, False) if inserted else (0, 0, False)
    source = [n for n, is_far in given if is_far]
    return 0, min(size, sum(source)), False


#: Indices and other scalars ride along.
_SCALAR = 8


def _tensors(text: str) -> list[tuple[int, bool]]:
    """List the bytes of the tensors in a type and whether they lie in the host's memory."""
    found = []
    for shape, layout in _TENSOR.findall(text):
        (parsed,) = parse_shapes(shape)
        found.append((parsed.elements * (parsed.bits or 0) // 8, HOST_MEMORY in layout))
    return found
