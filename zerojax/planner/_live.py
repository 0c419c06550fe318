"""When the most of a traced program lies in memory, and what lies there then. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from zerojax.planner._backends import BACKENDS
from zerojax.planner._program import Op, Program
from zerojax.planner._scopes import Analysis, Scope, Step

#: Gathers below this are never what matters: norms and biases.
_SMALL = 2**14
#: Elements of a GPU's output tile.
_TILE = 128 * 128
#: Of what a split contraction has to be a multiple.
_MULTIPLE = 8
#: Values that a peak names.
_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a parameter takes on one device.

    Attributes:
        number: which one, in flattening order.
        held: bytes that lie there between steps.
        gathered: bytes when it is whole (along the ZeRO axes); equal to `held` below stage 3.
        gradient: bytes of its gradient when it has been reduced.
        is_gathered: whether it is made whole for each use.
        parts: parts that model parallelism cuts it into.
    """

    number: int
    held: float
    gathered: float
    gradient: float
    is_gathered: bool
    parts: int = 1


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


class Simulation:
    """Runs the clock over the gradient of a loss, for one kind of backend.

    Args:
        program: `loss, *gradients = f(*parameters, *batch)`, flattened.
        platform: "gpu", "tpu" or "cpu".
    """

    def __init__(self, program: Program, platform: str) -> None:
        self.program = program
        self.backend = BACKENDS[platform]
        self._scopes: dict[object, Scope] = {}

    def peak(
        self,
        leaves: Sequence[Leaf],
        examples: float,
        *,
        frees: bool,
        accumulate: int = 1,
        model_axis: int = 1,
        checkpoint_parts: int = 1,
        offloads: bool = False,
    ) -> Peak:
        """Find the most that lies in memory while the gradient is computed.

        Args:
            leaves: one per parameter.
            examples: examples in a device's microbatch.
            frees: whether a parameter's buffer may be used for other things after its last use, as
                it may where the step gets it back from a master.
            accumulate: microbatches, all of which lie there from the beginning to the end.
            model_axis: devices that share the values within layers, all but those of the shape that
                layers hand on to each other, which Megatron-LM has whole on every device.
            checkpoint_parts: devices that share what layers hand on to each other, where a loop
                stacks it for its backward pass.
            offloads: whether what a loop stacks goes to the host's memory, all but two of it.
        """
        run = _Run(self, examples, model_axis, checkpoint_parts, offloads)
        parameters, gradients = self.ends(leaves)
        values = self.program.values
        batch = {
            v: accumulate * values[v].bytes.at(examples)
            for v in self.program.inputs
            if v not in parameters
        }
        held = {v: leaf.held for v, leaf in parameters.items()} | batch
        kept = batch if frees else held
        return run.peak(self.program, parameters, gradients, held, frozenset(kept))

    def stacked_bytes(
        self,
        leaves: Sequence[Leaf],
        examples: float,
        *,
        model_axis: int = 1,
        checkpoint_parts: int = 1,
    ) -> float:
        """Count what loops stack for their backward pass: the activation checkpoints.

        The arguments are those of `peak`.
        """
        scope = self.scope(self.program, *self.ends(leaves))
        return sum(
            self.program.values[v].bytes.at(examples)
            / (checkpoint_parts if is_handed_on else model_axis)
            for v, is_handed_on in _stacked(self.program, scope).items()
        )

    @cached_property
    def handed_on(self) -> frozenset[tuple[int, ...]]:
        """The shapes of what loops carry from layer to layer."""

        def shapes(program: Program) -> Iterator[tuple[int, ...]]:
            for op in program.ops:
                if op.name == "scan":
                    yield from (program.values[v].shape for v in op.outputs[: op.num_carry])
                for body in op.bodies:
                    yield from shapes(body)

        return frozenset(shape for shape in shapes(self.program) if len(shape) > 1)

    def scope(
        self, program: Program, parameters: Mapping[int, Leaf], gradients: Mapping[int, Leaf]
    ) -> Scope:
        """Analyse a program or a loop within it, once."""
        by_leaf = {leaf.number: v for v, leaf in gradients.items()}
        pairs = tuple((v, by_leaf[x.number]) for v, x in parameters.items() if x.number in by_leaf)
        key = (id(program), tuple(parameters), tuple(gradients), pairs)
        if key not in self._scopes:  # programs live as long as the one that holds them
            analysis = Analysis(program, tuple(parameters), tuple(gradients), pairs, self.backend)
            self._scopes[key] = analysis.scope()
        return self._scopes[key]

    def ends(self, leaves: Sequence[Leaf]) -> tuple[dict[int, Leaf], dict[int, Leaf]]:
        """Give the parameters and the gradients among the program's values."""
        count = len(leaves)
        outputs = self.program.outputs[1 : 1 + count]
        parameters = dict(zip(self.program.inputs[:count], leaves, strict=True))
        pairs = zip(outputs, leaves, strict=True)
        return parameters, {value: leaf for value, leaf in pairs if value is not None}


def inside(
    program: Program,
    op: Op,
    body: Program,
    scope: Scope,
    parameters: Mapping[int, Leaf],
    marked: Mapping[int, Leaf],
) -> tuple[dict[int, Leaf], dict[int, Leaf]]:
    """Give the parameters and the gradients that the body of a loop sees, by its own values."""
    seen: dict[int, Leaf] = {}
    given = op.inputs if op.name == "scan" else op.inputs[-len(body.inputs) :]
    for slot, value in zip(body.inputs, given, strict=False):
        owner = scope.owner.get(value) if value is not None else None
        if owner is not None:
            seen[slot] = _slice(parameters[owner], program, owner, body, slot)
    results = {
        slot: _slice(marked[value], program, value, body, slot)
        for slot, value in zip(body.outputs, op.outputs, strict=False)
        if slot is not None and value in marked
    }
    return seen, results


def _stacked(program: Program, scope: Scope) -> dict[int, bool]:
    """List what loops stack for the backward pass, and whether layers hand it on to each other.

    It is all that is no gradient; what is handed on has the shape of a carried value.
    """
    found = {}
    for step in scope.steps:
        op = program.ops[step.op]
        if op.name == "scan":
            carried = {program.values[v].shape for v in op.outputs[: op.num_carry]}
            for v in op.outputs[op.num_carry :]:
                if v in step.results and v not in scope.gradients:
                    found[v] = program.values[v].shape[1:] in carried
    return found


class _Run:
    """Runs the clock once."""

    def __init__(
        self,
        simulation: Simulation,
        examples: float,
        model_axis: int,
        checkpoint_parts: int,
        offloads: bool,
    ) -> None:
        self.simulation = simulation
        self.backend = simulation.backend
        self.examples = examples
        self.model_axis = model_axis
        self.checkpoint_parts = checkpoint_parts
        self.offloads = offloads

    def peak(
        self,
        program: Program,
        parameters: Mapping[int, Leaf],
        gradients: Mapping[int, Leaf],
        held: Mapping[int, float] = MappingProxyType({}),
        kept: frozenset[int] = frozenset(),
    ) -> Peak:
        """Find the peak of a scope; what a loop reads from outside is counted there.

        `held` lies there from the beginning; what of it is `kept` is never freed nor written over.
        """
        scope = self.simulation.scope(program, parameters, gradients)
        marked = {v: gradients[g] for v, g in scope.gradients.items()}
        sizes = self._sizes(program, scope, marked)
        alive = dict(held)
        passing = [
            *self._gathers(scope, parameters),
            *self._copies(program, scope, parameters, sizes),
        ]
        starts, ends = _by_time(passing)
        total, beside = sum(alive.values()), 0.0
        worst: tuple[Any, ...] = (0.0, "", {}, (), 0.0)
        clock = 0
        for step in scope.steps:
            op = program.ops[step.op]
            while clock <= step.op:  # what starts before this operation or with it
                beside += starts.get(clock, 0.0) - ends.get(clock, 0.0)
                clock += 1
            inner = self._inside(program, op, scope, parameters, marked)
            wanted = {v: self._result(v, op, sizes, marked) for v in step.results}
            reused = _reused(step, alive, wanted, kept)
            here = total + sum(wanted.values()) - reused + inner.bytes + beside
            if here > worst[0]:
                worst = here, inner.at or op.name, {**alive, **wanted}, inner.alive, beside
            for v, size in wanted.items():
                alive[v] = size
                total += size
                if v in marked and op.kind != "loop" and size > marked[v].gradient:
                    total += marked[v].gradient - size  # scattered as soon as it is there
                    alive[v] = marked[v].gradient
            for v in step.dies:
                if v in alive and v not in kept:
                    total -= alive.pop(v)
        most, at, held, within, beside = worst
        largest = sorted(held.items(), key=lambda item: -item[1])[:_SHOWN]
        shown = [(self._name(program, scope, v), size) for v, size in largest]
        shown += within
        if beside:
            shown.append(("gathered parameters and padded copies", beside))
        return Peak(most, at, tuple(sorted(shown, key=lambda item: -item[1])[:_SHOWN]))

    def _name(self, program: Program, scope: Scope, value: int) -> str:
        """Call a value by its dtype, its shape and what made it."""
        known = program.values[value]
        shape = [round(dim.at(self.examples)) for dim in known.dims]
        dtype = getattr(known.dtype, "name", str(known.dtype))
        return f"{scope.makers.get(value, 'input')} {dtype}{shape}"

    def _sizes(self, program: Program, scope: Scope, marked: Mapping[int, Leaf]) -> Sequence[float]:
        sizes = [value.bytes.at(self.examples) for value in program.values]
        if self.model_axis == 1 and not self.offloads:
            return sizes
        stacked = _stacked(program, scope)
        for v, size in enumerate(sizes):
            if v in stacked:
                length = program.values[v].dims[0].at(self.examples)
                kept = min(1.0, 2 / length) if self.offloads else 1.0
                sizes[v] = size * kept / (self.checkpoint_parts if stacked[v] else self.model_axis)
            elif v in marked:
                sizes[v] = size / marked[v].parts
            elif program.values[v].shape not in self.simulation.handed_on:
                sizes[v] = size / self.model_axis
        return sizes

    def _result(
        self, value: int, op: Op, sizes: Sequence[float], marked: Mapping[int, Leaf]
    ) -> float:
        """Count a result; gradients that a loop stacks, or that are only viewed, are shards."""
        if value not in marked:
            return sizes[value]
        stacked = op.kind == "loop" and value not in op.outputs[: op.num_carry]
        given = [v for v in op.inputs if v is not None]
        viewed = op.kind == "fused" and len(given) == 1 and given[0] in marked
        return min(sizes[value], marked[value].gradient) if stacked or viewed else sizes[value]

    def _inside(
        self,
        program: Program,
        op: Op,
        scope: Scope,
        parameters: Mapping[int, Leaf],
        marked: Mapping[int, Leaf],
    ) -> Peak:
        """Find the peak within a loop or a branch."""
        best = Peak(0.0, "", ())
        for body in op.bodies:
            found = self.peak(body, *inside(program, op, body, scope, parameters, marked))
            if found.bytes > best.bytes:
                best = dataclasses.replace(found, at=f"{found.at} in a {op.name}")
        return best

    def _gathers(
        self, scope: Scope, parameters: Mapping[int, Leaf]
    ) -> list[tuple[int, int, float]]:
        """List when parameters are whole: first and last operation, bytes."""
        found = []
        for owner, first, last in scope.uses:
            leaf = parameters[owner]
            if leaf.is_gathered and leaf.gathered > _SMALL:
                found.append((first, last, leaf.gathered))
        found.sort()
        if not self.backend.prefetches:
            return found
        return [
            (found[number - 1][0] if number else first, last, size)
            for number, (first, last, size) in enumerate(found)
        ]

    def _copies(
        self,
        program: Program,
        scope: Scope,
        parameters: Mapping[int, Leaf],
        sizes: Sequence[float],
    ) -> list[tuple[int, int, float]]:
        """List when padded copies of a dot product's operands are there.

        A compiler makes them as soon as it can: behind the later of the two operands.
        """
        found = []
        for first, last in scope.padded:
            op = program.ops[last]
            owners = {scope.owner.get(v) for v in op.inputs[:2] if v is not None} - {None}
            waits = any(parameters[owner].is_gathered for owner in owners if owner is not None)
            out = program.values[op.outputs[0]]
            tiles = sizes[op.outputs[0]] / out.dtype.itemsize / _TILE
            fits = op.contracted.at(self.examples) % _MULTIPLE == 0
            if fits or tiles >= self.backend.splits_contraction:
                continue
            size = sum(sizes[v] for v in op.inputs[:2] if v is not None)
            found.append((last if waits else first, last, size))
        return found


def _slice(leaf: Leaf, program: Program, outer: int, body: Program, inner: int) -> Leaf:
    """Give what one iteration sees of a stacked leaf."""
    whole = math.prod(program.values[outer].shape)
    part = math.prod(body.values[inner].shape) / max(whole, 1)
    return dataclasses.replace(
        leaf, held=leaf.held * part, gathered=leaf.gathered * part, gradient=leaf.gradient * part
    )


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
    step: Step, alive: Mapping[int, float], wanted: Mapping[int, float], kept: frozenset[int]
) -> float:
    """Count what results take over from operands that are read for the last time."""
    free = [alive[v] for v in step.takes_over if v in alive and v not in kept]
    reused = 0.0
    for size in wanted.values():
        if size in free:
            free.remove(size)
            reused += size
    return reused
