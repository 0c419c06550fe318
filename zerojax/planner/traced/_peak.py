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

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from zerojax.planner.traced._lifetimes import Launch
from zerojax.planner.traced._operations import Op
from zerojax.planner.traced._simulation import HeldLeaf, Scope, Sharing, Simulation

#: Gathers below this are never what matters: norms and biases.
_SMALL = 2**14
#: Elements of a GPU's output tile.
_TILE = 128 * 128
#: Of what a split contraction has to be a multiple.
_MULTIPLE = 8


def peak_of(
    simulation: Simulation,
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
    program, scope = simulation.program, simulation.scope(leaves)
    batch = {
        v: accumulate * program.values[v].bytes.at(examples)
        for v in program.inputs
        if v not in scope.parameters
    }
    held = {v: leaf.held for v, leaf in scope.parameters.items()} | batch
    clock = _Clock(scope, examples, sharing or Sharing())
    return clock.peak(held, frozenset(batch if frees else held))


class _Clock:
    """Runs over a program or the body of a loop, once."""

    def __init__(self, scope: Scope, examples: float, sharing: Sharing) -> None:
        self.scope, self.examples, self.sharing = scope, examples, sharing
        self.program, self.lifetimes, self.marked = scope.program, scope.lifetimes, scope.marked
        self.backend = scope.simulation.backend
        self.sizes = self._sizes()

    def peak(
        self, held: Mapping[int, float] = MappingProxyType({}), kept: frozenset[int] = frozenset()
    ) -> float:
        """Find the peak; what a loop reads from outside is counted there.

        `held` lies there from the beginning; what of it is `kept` is never freed nor written over.
        """
        alive = dict(held)
        change = _changes([*self._gathers(), *self._copies()])
        total, beside, worst, clock = sum(alive.values()), 0.0, 0.0, 0
        for launch in self.lifetimes.launches:
            op = self.program.ops[launch.op]
            while clock <= launch.op:  # what starts before this operation or with it
                beside += change.get(clock, 0.0)
                clock += 1
            inside = (_Clock(one, self.examples, self.sharing) for one in self.scope.bodies(op))
            within = max((one.peak() for one in inside), default=0.0)
            wanted = {v: self._result(v, op) for v in launch.results}
            reused = _reused(launch, alive, wanted, kept)
            worst = max(worst, total + sum(wanted.values()) - reused + within + beside)
            for v, size in wanted.items():
                alive[v] = size
                total += size
                if v in self.marked and op.kind != "loop" and size > self.marked[v].gradient:
                    total += self.marked[v].gradient - size  # scattered as soon as it is there
                    alive[v] = self.marked[v].gradient
            for v in launch.dies:
                if v in alive and v not in kept:
                    total -= alive.pop(v)
        return worst

    def _sizes(self) -> Sequence[float]:
        """Count the bytes of every value on this device."""
        sizes = [value.bytes.at(self.examples) for value in self.program.values]
        sharing = self.sharing
        if sharing.model_axis == 1 and not sharing.offloads:
            return sizes
        stacked = self.scope.stacked
        for v, size in enumerate(sizes):
            value = self.program.values[v]
            if v in stacked:
                parts = sharing.checkpoint_parts if stacked[v] else sharing.model_axis
                leaves = sharing.offloads and stacked[v]
                kept = min(1.0, 2 / value.dims[0].at(self.examples)) if leaves else 1.0
                sizes[v] = size * kept / parts
            elif v in self.marked:
                sizes[v] = size / self.marked[v].parts
            elif value.shape not in self.scope.simulation.handed_on:
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

    def _gathers(self) -> list[tuple[int, int, float]]:
        """List when parameters are whole: first and last operation, bytes."""
        found = []
        for owner, first, last in self.lifetimes.uses:
            leaf = self.scope.parameters[owner]
            if leaf.is_gathered and leaf.gathered > _SMALL:
                found.append((first, last, leaf.gathered))
        found.sort()
        if not self.backend.prefetches:
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
            owners = [self.lifetimes.owner[v] for v in operands if v in self.lifetimes.owner]
            waits = any(self.scope.parameters[owner].is_gathered for owner in owners)
            out = self.program.values[op.outputs[0]]
            tiles = self.sizes[op.outputs[0]] / out.dtype.itemsize / _TILE
            fits = op.contracted.at(self.examples) % _MULTIPLE == 0
            if fits or tiles >= self.backend.splits_contraction:
                continue
            size = sum(self.sizes[v] for v in operands)
            found.append((last if waits else first, last, size))
        return found


def _changes(passing: Sequence[tuple[int, int, float]]) -> dict[int, float]:
    """Add up what starts at each operation, less what has ended before it."""
    found: dict[int, float] = {}
    for first, last, size in passing:
        found[first] = found.get(first, 0.0) + size
        found[last + 1] = found.get(last + 1, 0.0) - size
    return found


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
