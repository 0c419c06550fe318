"""What parameters and gradients take on a device, in the program and within its loops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from zerojax.planner.traced._lifetimes import Lifetimes
from zerojax.planner.traced._operations import Op, Operations, Value


@dataclasses.dataclass(frozen=True)
class HeldLeaf:
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


#: Leaves by the program's value that they are.
ByValue = Mapping[int, HeldLeaf]


def ends_of(program: Operations, leaves: Sequence[HeldLeaf]) -> tuple[ByValue, ByValue]:
    """Return the parameters and the gradients of `loss, *gradients = f(*parameters, *batch)`."""
    count = len(leaves)
    outputs = program.outputs[1 : 1 + count]
    parameters = dict(zip(program.inputs[:count], leaves, strict=True))
    pairs = zip(outputs, leaves, strict=True)
    return parameters, {value: leaf for value, leaf in pairs if value is not None}


def inside(
    program: Operations,
    op: Op,
    body: Operations,
    lifetimes: Lifetimes,
    parameters: ByValue,
    marked: ByValue,
) -> tuple[ByValue, ByValue]:
    """Return the parameters and the gradients that the body of a loop sees, by its own values."""
    seen: dict[int, HeldLeaf] = {}
    given = op.inputs if op.name == "scan" else op.inputs[-len(body.inputs) :]
    for slot, value in zip(body.inputs, given, strict=False):
        owner = lifetimes.owner.get(value) if value is not None else None
        if owner is not None:
            seen[slot] = _slice(parameters[owner], program.values[owner], body.values[slot])
    results = {
        slot: _slice(marked[value], program.values[value], body.values[slot])
        for slot, value in zip(body.outputs, op.outputs, strict=False)
        if slot is not None and value in marked
    }
    return seen, results


def _slice(leaf: HeldLeaf, outer: Value, inner: Value) -> HeldLeaf:
    """Return what one iteration sees of a stacked leaf."""
    part = math.prod(inner.shape) / max(math.prod(outer.shape), 1)
    return dataclasses.replace(
        leaf, held=leaf.held * part, gathered=leaf.gathered * part, gradient=leaf.gradient * part
    )
