"""How much of a traced program lies in memory at most. Pure.

The clock runs over the launches in order: what one leaves is added, what dies is taken away, and
within a loop the clock runs over its body.

Example: `loss = sum(sin(x @ w))` and its gradient for w of 4 x 4 and x of 8 x 4, fp32, on a CPU;
w 64 bytes, x 128, y = x @ w 128, dy = cos(y) 128 and dw = x.T @ dy 64:

    launch                     while it runs                       bytes
    y = x @ w                  w, x, y                             320
    loss = sum(sin(y))         w, x, y, loss                       324
    dy = cos(y)                w, x, loss, dy in the place of y    324
    dw = x.T @ dy              w, x, loss, dy, dw                  388    the peak
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zerojax.planner.traced._lifetimes import Launch, Lifetimes
from zerojax.planner.traced._operations import Op
from zerojax.planner.traced._split import is_padded

#: Small values of a scan take a third of v6e's 128 MiB: this part of `vector_memory`, 96 MiB.
_ROOM = 4 / 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldLeaf:
    held: float = 0.0  # bytes that lie there between steps
    gathered: float  # bytes when it is whole (along the ZeRO axes); equal to `held` below stage 3
    gradient: float = 0.0  # bytes of its gradient when it has been reduced
    is_gathered: bool = False  # whether it is made whole for each use
    kept: float = 0.0  # bytes of what is made whole once, for the forward and the backward pass
    parts: int = 1  # parts that model parallelism cuts it into


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the devices of a model axis share activations, what the host keeps, what goes ahead."""

    #: devices that share the values within layers, all but those of the shape that layers hand on
    #: to each other, which Megatron-LM has whole on every device
    model_axis: int = 1
    #: whether these devices share what layers hand on to each other as well, where a loop stacks it
    #: for its backward pass (Pa)
    partitions: bool = False
    #: whether that goes to the host's memory, all but two layers of it (Pa+cpu)
    offloads: bool = False
    #: how much of the next layer's weights a loop gathers while one computes (prefetch)
    ahead: float = 0.0
    #: bytes of weights that a list of layers gathers together (GPU); 0 where nothing goes ahead
    group: float = 0.0
    #: bytes of new parameters of a list that wait to be written over the old ones (SparseCores)
    unwritten: float = 0.0
    #: bytes of the largest gradient that SparseCores reduce: it lies in memory, however small
    reduced: float = 0.0
    #: bytes of the largest brief value that lies in no memory but vector memory
    vector_memory: float = 0.0

    @property
    def checkpoint_parts(self) -> int:
        return self.model_axis if self.partitions else 1


def peak_of(
    lifetimes: Lifetimes,
    leaves: Sequence[HeldLeaf],
    examples: float,
    *,
    frees: bool,
    accumulate: int = 1,
    sharing: Sharing | None = None,
) -> float:
    """Find the most bytes that lie in memory while a gradient is computed.

    Parameters and gradients are included, and the batch: `examples` in each of `accumulate`
    microbatches, all of which lie there from the beginning. `frees` says whether a parameter's
    buffer serves other things after its last use, as where the step gets it back from a master.
    """
    program, parameters = lifetimes.program, lifetimes.weights.parameters
    others = (v for v in program.inputs if v not in parameters)
    batch = {v: accumulate * program.values[v].bytes.at(examples) for v in others}
    owners = {v: leaves[x.leaf] for v, x in parameters.items() if v in program.inputs}
    held = {v: leaf.held + leaf.kept for v, leaf in owners.items()} | batch
    clock = _Clock(lifetimes, leaves, examples, sharing or Sharing(), program.carried_shapes())
    if lifetimes.is_list:
        clock.group, clock.unwritten = clock.sharing.group, clock.sharing.unwritten
    else:
        clock.room = _ROOM * clock.sharing.vector_memory
    return clock.peak(held, frozenset(batch if frees else held))


def checkpoint_bytes(lifetimes: Lifetimes, examples: float, sharing: Sharing) -> float:
    handed_on = [v for v, is_handed_on in lifetimes.stacked.items() if is_handed_on]
    values = lifetimes.program.values
    return sum(values[v].bytes.at(examples) for v in handed_on) / sharing.checkpoint_parts


@dataclasses.dataclass
class _Clock:
    lifetimes: Lifetimes
    leaves: Sequence[HeldLeaf]
    examples: float
    sharing: Sharing
    carried_shapes: frozenset[tuple[int, ...]]  # of what loops carry from layer to layer
    room: float = 0.0  # bytes of vector memory that small values may take
    group: float = 0.0  # bytes of weights that are gathered together, outside of loops
    unwritten: float = 0.0  # most bytes of new parameters beside the old ones

    def __post_init__(self) -> None:
        self.program, self.weights = self.lifetimes.program, self.lifetimes.weights
        self.gathers = any(leaf.is_gathered or leaf.kept for leaf in self.leaves)
        self.sizes = self._sizes()

    def peak(
        self, held: Mapping[int, float] = MappingProxyType({}), kept: frozenset[int] = frozenset()
    ) -> float:
        """Find the peak; what a loop reads from outside is counted there.

        `held` lies there from the beginning; what of it is `kept` is never freed nor written over.
        """
        alive = dict(held)
        change = _changes(self._gathers())
        total, beside, worst, clock = sum(alive.values()), 0.0, 0.0, 0
        leaving = sent = 0.0  # of gradients that are on their way, and of their shards
        updated = 0.0  # of parameters whose gradients are there: their new values are gathered
        for launch in self.lifetimes.launches:
            op = launch.op
            while clock <= launch.time:  # what starts before this operation or with it
                beside += change.get(clock, 0.0)
                clock += 1
            wanted = {v: self._result(v, op) for v in launch.results}
            now = (alive | wanted).items() if self.room else ()
            small = sum(x for v, x in now if v not in held and x <= self.room)
            apart = min(self.room, max(small - self.sharing.reduced, 0.0))  # in vector memory
            left = self.room - apart
            inside = (dataclasses.replace(self, lifetimes=x, room=left) for x in launch.bodies)
            within = max((one.peak() for one in inside), default=0.0)
            reused = _reused(launch, alive, wanted, kept)
            marks = [self.weights.marked[v] for v in wanted if v in self.weights.marked]
            beyond = within + self._parts(launch, kept) + beside + leaving - apart
            beyond += min(updated, self.unwritten)
            worst = max(worst, total + sum(wanted.values()) - reused + beyond)
            if op.kind == "kernel" and sent >= self.lifetimes.backend.combines:
                leaving = sent = 0.0
            if op.kind != "fused":  # else a gradient that was counted is turned around
                updated += sum(x.share * self.leaves[x.leaf].held for x in marks)
            for v, size in wanted.items():
                # A gradient is scattered as soon as it is there, beside the next product.
                alive[v] = size if op.kind == "loop" else min(size, self._gradient(v))
                total += alive[v]
                leaving += (size - alive[v]) * self.lifetimes.backend.overlaps * self.gathers
                sent += alive[v] * (alive[v] < size)
            for v in launch.dies:
                if v in alive and v not in kept:
                    total -= alive.pop(v)
        return worst

    def _gradient(self, value: int) -> float:
        part = self.weights.marked.get(value)
        if part is None or value in self.lifetimes.waiting:
            return math.inf
        return part.share * self.leaves[part.leaf].gradient

    def _sizes(self) -> Sequence[float]:
        sharing = self.sharing
        sizes = [value.bytes.at(self.examples) for value in self.program.values]
        for v in self.lifetimes.brief - self._logits():
            if sizes[v] <= sharing.vector_memory:
                sizes[v] = 0.0
        if sharing.model_axis == 1 and not sharing.offloads:
            return sizes
        stacked, marked = self.lifetimes.stacked, self.weights.marked
        for v, size in enumerate(sizes):
            value = self.program.values[v]
            if v in stacked:
                parts = sharing.checkpoint_parts if stacked[v] else sharing.model_axis
                leaves = sharing.offloads and stacked[v]
                kept = min(1.0, 2 / value.dims[0].at(self.examples)) if leaves else 1.0
                sizes[v] = size * kept / parts
            elif v in marked:
                sizes[v] = size / self.leaves[marked[v].leaf].parts
            elif value.shape not in self.carried_shapes:
                sizes[v] = size / sharing.model_axis
        return sizes

    def _logits(self) -> set[int]:
        """Find what waiting products read: below stage 3 it stays in memory for them (v6e)."""
        waiting = () if self.gathers else self.lifetimes.waiting
        return {v for op in self.program.ops if {*waiting} & {*op.outputs} for v in op.read}

    def _result(self, value: int, op: Op) -> float:
        """Count a result; parameters and gradients that a loop stacks are shards."""
        size = self.sizes[value]
        stacked = op.kind == "loop" and value not in op.outputs[: op.num_carry]
        # A product writes its transpose at once. Lists have several gradients on their way.
        is_view = op.kind == "fused" and len(op.read) == 1 and op.read[0] in self.weights.marked
        is_part = stacked or value in self.weights.sums or (is_view and not self.lifetimes.is_list)
        return min(size, self._gradient(value)) if is_part else size

    def _gathers(self) -> list[tuple[int, int, float]]:
        if self.group:
            return self._groups()
        found, ahead, end = [], {}, len(self.program.ops)
        for owner, time in self.lifetimes.uses:
            part = self.weights.parameters[owner]
            size = part.share * self.leaves[part.leaf].gathered
            if not self.leaves[part.leaf].is_gathered:
                continue
            # A loop's slice is carried into this iteration, and the next one's.
            if part.share < 1 and owner in self.program.inputs:
                ahead[owner] = (0, end, 2 * self.sharing.ahead * size)
                size *= 1 - self.sharing.ahead
            found.append((time, time, size))
        return [*ahead.values(), *found]

    def _groups(self) -> list[tuple[int, int, float]]:
        """List from when until when a list of layers has each weight, and its bytes.

        A weight that is read by a layer computed again, and by its backward pass, is gathered once
        for both. A group is gathered while the one before it is used (`passes/_order.py`).
        """
        spans: dict[tuple[int, int], list[int]] = {}
        for number, (owner, time) in enumerate(self.lifetimes.uses):
            spans.setdefault((owner, self.program.ops[time].region or -number), []).append(time)
        found, size, begins, earlier = [], math.inf, 0, 0
        for (owner, _), times in sorted(spans.items(), key=lambda pair: min(pair[1])):
            part = self.weights.parameters[owner]
            leaf = self.leaves[part.leaf]
            if not leaf.is_gathered:
                continue
            one = part.share * leaf.gathered
            if size + one > self.group:
                size, begins, earlier = 0.0, min(times), begins
            size += one
            found.append((earlier, max(times), one))
        return found

    def _parts(self, launch: Launch, kept: frozenset[int]) -> float:
        """Count what a dot product that is made in parts has beside it while it runs.

        That is its parts in fp32, and padded copies of its operands. In a list of layers, where it
        is the last to read a parameter, the copy of the other operand may lie in the parameter's
        buffer; the parameter's own copy is too large for that.
        """
        op, lives = launch.op, self.lifetimes
        if (parts := lives.num_parts(op, self.examples)) == 1:
            return 0.0
        written = 4 * parts * self.sizes[op.outputs[0]] / lives.itemsize(op.outputs[0])
        if not is_padded(op.contracted.at(self.examples), parts):
            return written
        last = dict(lives.uses) if lives.is_list else {}
        ends = {v for v, time in last.items() if time == launch.time} - kept
        copies = [(self.sizes[v], lives.weights.owner.get(v) in ends) for v in op.read[:2]]
        (least, _), (most, is_free) = sorted(copies)
        return written + most + least * (not is_free)


def _changes(passing: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for first, last, size in passing:
        found[first] = found.get(first, 0.0) + size
        found[last + 1] = found.get(last + 1, 0.0) - size
    return found


def _reused(
    launch: Launch, alive: Mapping[int, float], wanted: Mapping[int, float], kept: frozenset[int]
) -> float:
    free = [alive[v] for v in launch.takes_over if v in alive and v not in kept]
    reused = 0.0
    for size in wanted.values():
        if size in free:
            free.remove(size)
            reused += size
    return reused
