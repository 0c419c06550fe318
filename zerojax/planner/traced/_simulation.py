"""A traced gradient under one kind of backend: analysed once, asked for many batches and stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property

from zerojax.planner.traced._backends import BACKENDS
from zerojax.planner.traced._leaves import ByValue, HeldLeaf, ends_of
from zerojax.planner.traced._lifetimes import Analysis, Lifetimes
from zerojax.planner.traced._operations import Operations


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How the devices of a model axis share activations, and what the host keeps of them.

    Attributes:
        model_axis: devices that share the values within layers, all but those of the shape that
            layers hand on to each other, which Megatron-LM has whole on every device.
        partitions: whether these devices share what layers hand on to each other as well, where a
            loop stacks it for its backward pass (Pa).
        offloads: whether that goes to the host's memory, all but two layers of it (Pa+cpu).
    """

    model_axis: int = 1
    partitions: bool = False
    offloads: bool = False

    @property
    def checkpoint_parts(self) -> int:
        """Devices that share what layers hand on to each other."""
        return self.model_axis if self.partitions else 1


class Simulation:
    """The gradient of a loss as one kind of backend runs it.

    Args:
        program: `loss, *gradients = f(*parameters, *batch)`, flattened.
        platform: "gpu", "tpu" or "cpu".
    """

    def __init__(self, program: Operations, platform: str) -> None:
        self.program = program
        self.backend = BACKENDS[platform]
        self._lifetimes: dict[object, Lifetimes] = {}

    def checkpoint_bytes(
        self, leaves: Sequence[HeldLeaf], examples: float, sharing: Sharing
    ) -> float:
        """Count the layer inputs that loops stack for their backward pass."""
        lifetimes = self.lifetimes(self.program, *ends_of(self.program, leaves))
        stacked = stacked_values(self.program, lifetimes)
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
            analysis = Analysis(program, tuple(parameters), tuple(gradients), pairs, self.backend)
            self._lifetimes[key] = analysis.lifetimes()
        return self._lifetimes[key]


def stacked_values(program: Operations, lifetimes: Lifetimes) -> dict[int, bool]:
    """List what loops stack for the backward pass, and whether layers hand it on to each other.

    It is all that is no gradient; what is handed on has the shape of a carried value.
    """
    found = {}
    for launch in lifetimes.launches:
        op = program.ops[launch.op]
        if op.name == "scan":
            carried = {program.values[v].shape for v in op.outputs[: op.num_carry]}
            for v in op.outputs[op.num_carry :]:
                if v in launch.results and v not in lifetimes.gradients:
                    found[v] = program.values[v].shape[1:] in carried
    return found
