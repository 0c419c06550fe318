"""When the most of a traced program lies in memory, and what lies there then. Pure.

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

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zerojax.planner.traced._leaves import ByValue, HeldLeaf, ends_of, inside
from zerojax.planner.traced._lifetimes import Launch
from zerojax.planner.traced._operations import Op, Operations
from zerojax.planner.traced._simulation import Sharing, Simulation, stacked_values

#: Gathers below this are never what matters: norms and biases.
_SMALL = 2**14
#: Elements of a GPU's output tile.
_TILE = 128 * 128
#: Of what a split contraction has to be a multiple.
_MULTIPLE = 8
#: Values that a peak names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Peak:
    """The worst moment.

    Attributes:
        bytes: all that is alive, parameters and gradients included.
        at: what was being computed, for people.
        alive: the largest values then: what they are and their bytes.
    """

    bytes: float
    at: str
    alive: tuple[tuple[str, float], ...]


def peak_of(
    simulation: Simulation,
    leaves: Sequence[HeldLeaf],
    examples: float,
    *,
    frees: bool,
    accumulate: int = 1,
    sharing: Sharing | None = None,
) -> Peak:
    """Find the most that lies in memory while a gradient is computed.

    Args:
        simulation: of the gradient.
        leaves: one per parameter.
        examples: examples in a device's microbatch.
        frees: whether a parameter's buffer may be used for other things after its last use, as
            it may where the step gets it back from a master.
        accumulate: microbatches, all of which lie there from the beginning to the end.
        sharing: what other devices and the host keep; None is nothing.
    """
    program = simulation.program
    parameters, gradients = ends_of(program, leaves)
    batch = {
        v: accumulate * program.values[v].bytes.at(examples)
        for v in program.inputs
        if v not in parameters
    }
    held = {v: leaf.held for v, leaf in parameters.items()} | batch
    clock = _Clock(simulation, examples, sharing or Sharing(), program, parameters, gradients)
    return clock.peak(held, frozenset(batch if frees else held))


@dataclasses.dataclass(frozen=True)
class _Moment:
    """What lies there while an operation runs."""

    bytes: float
    at: str
    values: Mapping[int, float]
    within: tuple[tuple[str, float], ...]
    beside: float


class _Clock:
    """Runs over a program or the body of a loop, once."""

    def __init__(
        self,
        simulation: Simulation,
        examples: float,
        sharing: Sharing,
        program: Operations,
        parameters: ByValue,
        gradients: ByValue,
    ) -> None:
        self.simulation = simulation
        self.examples = examples
        self.sharing = sharing
        self.program = program
        self.parameters = parameters
        self.lifetimes = simulation.lifetimes(program, parameters, gradients)
        self.marked = {v: gradients[g] for v, g in self.lifetimes.gradients.items()}
        self.sizes = self._sizes()

    def peak(
        self, held: Mapping[int, float] = MappingProxyType({}), kept: frozenset[int] = frozenset()
    ) -> Peak:
        """Find the peak; what a loop reads from outside is counted there.

        `held` lies there from the beginning; what of it is `kept` is never freed nor written over.
        """
        alive = dict(held)
        starts, ends = _by_time([*self._gathers(), *self._copies()])
        total, beside = sum(alive.values()), 0.0
        worst = _Moment(0.0, "", {}, (), 0.0)
        clock = 0
        for launch in self.lifetimes.launches:
            op = self.program.ops[launch.op]
            while clock <= launch.op:  # what starts before this operation or with it
                beside += starts.get(clock, 0.0) - ends.get(clock, 0.0)
                clock += 1
            inner = self._inside(op)
            wanted = {v: self._result(v, op) for v in launch.results}
            reused = _reused(launch, alive, wanted, kept)
            here = total + sum(wanted.values()) - reused + inner.bytes + beside
            if here > worst.bytes:
                values = {**alive, **wanted}
                worst = _Moment(here, inner.at or op.name, values, inner.alive, beside)
            for v, size in wanted.items():
                alive[v] = size
                total += size
                if v in self.marked and op.kind != "loop" and size > self.marked[v].gradient:
                    total += self.marked[v].gradient - size  # scattered as soon as it is there
                    alive[v] = self.marked[v].gradient
            for v in launch.dies:
                if v in alive and v not in kept:
                    total -= alive.pop(v)
        return self._show(worst)

    def _show(self, worst: _Moment) -> Peak:
        largest = sorted(worst.values.items(), key=lambda item: -item[1])[:_SHOWN]
        shown = [(self._name(v), size) for v, size in largest]
        shown += worst.within
        if worst.beside:
            shown.append(("gathered parameters and padded copies", worst.beside))
        shown = sorted(shown, key=lambda item: -item[1])[:_SHOWN]
        return Peak(worst.bytes, worst.at, tuple(shown))

    def _name(self, value: int) -> str:
        """Name a value by its dtype, its shape and what made it."""
        known = self.program.values[value]
        shape = [round(dim.at(self.examples)) for dim in known.dims]
        dtype = getattr(known.dtype, "name", str(known.dtype))
        return f"{self.lifetimes.makers.get(value, 'input')} {dtype}{shape}"

    def _sizes(self) -> Sequence[float]:
        """Count the bytes of every value on this device."""
        sizes = [value.bytes.at(self.examples) for value in self.program.values]
        sharing = self.sharing
        if sharing.model_axis == 1 and not sharing.offloads:
            return sizes
        stacked = stacked_values(self.program, self.lifetimes)
        for v, size in enumerate(sizes):
            value = self.program.values[v]
            if v in stacked:
                parts = sharing.checkpoint_parts if stacked[v] else sharing.model_axis
                leaves = sharing.offloads and stacked[v]
                kept = min(1.0, 2 / value.dims[0].at(self.examples)) if leaves else 1.0
                sizes[v] = size * kept / parts
            elif v in self.marked:
                sizes[v] = size / self.marked[v].parts
            elif value.shape not in self.simulation.handed_on:
                sizes[v] = size / sharing.model_axis
        return sizes

    def _result(self, value: int, op: Op) -> float:
        """Count a result; gradients that a loop stacks, or that are only viewed, are shards."""
        size, leaf = self.sizes[value], self.marked.get(value)
        if leaf is None:
            return size
        stacked = op.kind == "loop" and value not in op.outputs[: op.num_carry]
        viewed = op.kind == "fused" and len(op.read) == 1 and op.read[0] in self.marked
        return min(size, leaf.gradient) if stacked or viewed else size

    def _inside(self, op: Op) -> Peak:
        """Find the peak within a loop or a branch."""
        best = Peak(0.0, "", ())
        for body in op.bodies:
            ends = inside(self.program, op, body, self.lifetimes, self.parameters, self.marked)
            found = _Clock(self.simulation, self.examples, self.sharing, body, *ends).peak()
            if found.bytes > best.bytes:
                best = dataclasses.replace(found, at=f"{found.at} in a {op.name}")
        return best

    def _gathers(self) -> list[tuple[int, int, float]]:
        """List when parameters are whole: first and last operation, bytes."""
        found = []
        for owner, first, last in self.lifetimes.uses:
            leaf = self.parameters[owner]
            if leaf.is_gathered and leaf.gathered > _SMALL:
                found.append((first, last, leaf.gathered))
        found.sort()
        if not self.simulation.backend.prefetches:
            return found
        return [
            (found[number - 1][0] if number else first, last, size)
            for number, (first, last, size) in enumerate(found)
        ]

    def _copies(self) -> list[tuple[int, int, float]]:
        """List when padded copies of a dot product's operands are there.

        A compiler makes them as soon as it can: behind the later of the two operands.
        """
        found = []
        for first, last in self.lifetimes.padded:
            op = self.program.ops[last]
            operands = op.read[:2]
            owners = {self.lifetimes.owner.get(v) for v in operands} - {None}
            waits = any(self.parameters[owner].is_gathered for owner in owners if owner is not None)
            out = self.program.values[op.outputs[0]]
            tiles = self.sizes[op.outputs[0]] / out.dtype.itemsize / _TILE
            fits = op.contracted.at(self.examples) % _MULTIPLE == 0
            if fits or tiles >= self.simulation.backend.splits_contraction:
                continue
            size = sum(self.sizes[v] for v in operands)
            found.append((last if waits else first, last, size))
        return found


def _by_time(
    passing: Sequence[tuple[int, int, float]],
) -> tuple[dict[int, float], dict[int, float]]:
    """Add up what starts at each operation, and what has ended before each."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for first, last, size in passing:
        starts[first] = starts.get(first, 0.0) + size
        ends[last + 1] = ends.get(last + 1, 0.0) + size
    return starts, ends


def _reused(
    launch: Launch, alive: Mapping[int, float], wanted: Mapping[int, float], kept: frozenset[int]
) -> float:
    """Count what results take over from operands that are read for the last time."""
    free = [alive[v] for v in launch.takes_over if v in alive and v not in kept]
    reused = 0.0
    for size in wanted.values():
        if size in free:
            free.remove(size)
            reused += size
    return reused
