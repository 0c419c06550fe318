"""A traced gradient under one kind of backend: analysed once, asked for many batches and stages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from zerojax.planner.traced._lifetimes import BACKENDS, Lifetimes
from zerojax.planner.traced._operations import Op, Operations, Value


@dataclasses.dataclass(frozen=True)
class HeldLeaf:
    """What a parameter takes on one device."""

    number: int  # which one, in flattening order
    held: float  # bytes that lie there between steps
    gathered: float  # bytes when it is whole (along the ZeRO axes); equal to `held` below stage 3
    gradient: float  # bytes of its gradient when it has been reduced
    is_gathered: bool  # whether it is made whole for each use
    parts: int = 1  # parts that model parallelism cuts it into

    def sliced(self, outer: Value, inner: Value) -> HeldLeaf:
        """Return what one iteration of a loop sees of a stacked leaf."""
        part = math.prod(inner.shape) / max(math.prod(outer.shape), 1)
        held, gathered, gradient = (part * x for x in (self.held, self.gathered, self.gradient))
        return dataclasses.replace(self, held=held, gathered=gathered, gradient=gradient)


#: Leaves by the program's value that they are.
ByValue = Mapping[int, HeldLeaf]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the devices of a model axis share activations, and what the host keeps of them."""

    #: devices that share the values within layers, all but those of the shape that layers hand on
    #: to each other, which Megatron-LM has whole on every device
    model_axis: int = 1
    #: whether these devices share what layers hand on to each other as well, where a loop stacks it
    #: for its backward pass (Pa)
    partitions: bool = False
    #: whether that goes to the host's memory, all but two layers of it (Pa+cpu)
    offloads: bool = False

    @property
    def checkpoint_parts(self) -> int:
        """Devices that share what layers hand on to each other."""
        return self.model_axis if self.partitions else 1


class Simulation:
    """The gradient of a loss as a platform runs it: `loss, *gradients = f(*parameters, *batch)`."""

    def __init__(self, program: Operations, platform: str) -> None:
        self.program = program
        self.backend = BACKENDS[platform]
        self._lifetimes: dict[object, Lifetimes] = {}

    def scope(self, leaves: Sequence[HeldLeaf]) -> Scope:
        """Return the whole program with what its parameters take."""
        count, program = len(leaves), self.program
        outputs = program.outputs[1 : 1 + count]
        parameters = dict(zip(program.inputs[:count], leaves, strict=True))
        pairs = zip(outputs, leaves, strict=True)
        gradients = {value: leaf for value, leaf in pairs if value is not None}
        return Scope(self, program, parameters, gradients)

    def checkpoint_bytes(
        self, leaves: Sequence[HeldLeaf], examples: float, sharing: Sharing
    ) -> float:
        """Count the layer inputs that loops stack for their backward pass."""
        stacked = self.scope(leaves).stacked
        handed_on = [v for v, is_handed_on in stacked.items() if is_handed_on]
        values = self.program.values
        return sum(values[v].bytes.at(examples) for v in handed_on) / sharing.checkpoint_parts

    @cached_property
    def handed_on(self) -> frozenset[tuple[int, ...]]:
        """The shapes of what loops carry from layer to layer."""

        def shapes(program: Operations) -> Iterator[tuple[int, ...]]:
            for op in program.ops:
                if op.name == "scan":
                    yield from (program.values[v].shape for v in op.outputs[: op.num_carry])
                for body in op.bodies:
                    yield from shapes(body)

        return frozenset(shape for shape in shapes(self.program) if len(shape) > 1)

    def lifetimes(self, program: Operations, parameters: ByValue, gradients: ByValue) -> Lifetimes:
        """Analyse a program or a loop within it, once."""
        by_leaf = {leaf.number: v for v, leaf in gradients.items()}
        pairs = tuple((v, by_leaf[x.number]) for v, x in parameters.items() if x.number in by_leaf)
        key = (id(program), tuple(parameters), tuple(gradients), pairs)
        if key not in self._lifetimes:  # programs live as long as the one that holds them
            found = Lifetimes(program, tuple(parameters), tuple(gradients), pairs, self.backend)
            self._lifetimes[key] = found
        return self._lifetimes[key]


class Scope:
    """A program, or the body of a loop in it, with what parameters and gradients take there."""

    def __init__(
        self, simulation: Simulation, program: Operations, parameters: ByValue, gradients: ByValue
    ) -> None:
        self.simulation, self.program, self.parameters = simulation, program, parameters
        self.lifetimes = simulation.lifetimes(program, parameters, gradients)
        #: leaves by the values that become their gradients by elementwise operations
        self.marked = {v: gradients[g] for v, g in self.lifetimes.gradients.items()}

    def bodies(self, op: Op) -> Iterator[Scope]:
        """Go into a loop, or the branches of a cond."""
        values = self.program.values
        for body in op.bodies:
            parameters: dict[int, HeldLeaf] = {}
            given = op.inputs if op.name == "scan" else op.inputs[-len(body.inputs) :]
            for slot, value in zip(body.inputs, given, strict=False):
                owner = self.lifetimes.owner.get(value) if value is not None else None
                if owner is not None:
                    leaf = self.parameters[owner]
                    parameters[slot] = leaf.sliced(values[owner], body.values[slot])
            gradients = {
                slot: self.marked[value].sliced(values[value], body.values[slot])
                for slot, value in zip(body.outputs, op.outputs, strict=False)
                if slot is not None and value in self.marked
            }
            yield Scope(self.simulation, body, parameters, gradients)

    @cached_property
    def stacked(self) -> dict[int, bool]:
        """What loops stack for the backward pass, and whether layers hand it on to each other.

        It is all that is no gradient; what is handed on has the shape of a carried value.
        """
        found, values = {}, self.program.values
        for launch in self.lifetimes.launches:
            op = self.program.ops[launch.op]
            if op.name == "scan":
                carried = {values[v].shape for v in op.outputs[: op.num_carry]}
                for v in op.outputs[op.num_carry :]:
                    if v in launch.results and v not in self.lifetimes.gradients:
                        found[v] = values[v].shape[1:] in carried
        return found
