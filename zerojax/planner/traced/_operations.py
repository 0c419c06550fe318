"""A traced gradient as flat lists of operations, one per loop body: what the planner reads.

Calls are written out in their place, a reshape is the value that it looks at, operations that
nothing needs are dropped, and every value knows its bytes as a line in the number of examples, so
that one trace answers for every batch.

Example: `w -> sum(sin(x @ w))` for x of n rows of 4 fp32 numbers, w of 4 x 2:

    value  shape    bytes     made by
    0      [4, 2]   32        the input w
    1      [n, 4]   16 n      the input x
    2      [n, 2]   8 n       dot_general, a kernel: 16 n FLOPs
    3      [n, 2]   8 n       sin, fused with what reads it
    4      []       4         reduce_sum, a reduction
"""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A quantity that grows with the examples in a device's microbatch: fixed + each * examples."""

    fixed: float
    each: float = 0.0

    def at(self, examples: float) -> float:
        """Return the quantity for a number of examples."""
        return self.fixed + self.each * examples


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One array of the program: the shape that the trace saw, and what grows with the examples."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: Line
    dims: tuple[Line, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation."""

    name: str  # the primitive's
    #: "fused" (an elementwise operation that compilers merge with its neighbours), "reduce" (merged
    #: with what comes before it), "gather", "scatter", "kernel" or "loop"
    kind: str
    inputs: tuple[int | None, ...]  # indices of values; None for a literal
    outputs: tuple[int, ...]  # indices of values
    bodies: "tuple[Operations, ...]" = ()  # of a scan, a while loop or the branches of a cond
    length: Line = Line(1.0)  # how often a scan runs; of a while loop nobody knows, and 1 is taken
    num_consts: int = 0  # of a scan
    num_carry: int = 0
    #: floating-point operations of dot products and convolutions; multiply and add are two
    flops: Line = Line(0.0)
    is_wide: bool = False  # whether these are in fp32 or wider
    contracted: Line = Line(0.0)  # the elements that a dot product sums over; 0 for anything else

    @property
    def read(self) -> tuple[int, ...]:
        """The values among the inputs."""
        return tuple(v for v in self.inputs if v is not None)


@dataclasses.dataclass(frozen=True, slots=True)
class Operations:
    """Operations in order; inputs and outputs are indices of values."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]

    def carried_elements(self, examples: float) -> float:
        """Count the elements that scanned layers hand on to each other in a forward pass.

        A forward scan is one that stacks what a later scan reads.
        """
        read = {v for op in self.ops if op.name == "scan" for v in op.inputs}
        total = 0.0
        for op in self.ops:
            if op.name == "scan" and read.intersection(op.outputs[op.num_carry :]):
                for v in op.outputs[: op.num_carry]:
                    elements = math.prod(dim.at(examples) for dim in self.values[v].dims)
                    total += op.length.at(examples) * elements
        return total

    def carried_shapes(self) -> frozenset[tuple[int, ...]]:
        """Return the shapes of what loops carry from layer to layer, loops within loops too."""
        scans = [op for op in self.ops if op.name == "scan"]
        found = {self.values[v].shape for op in scans for v in op.outputs[: op.num_carry]}
        inner = (body.carried_shapes() for op in self.ops for body in op.bodies)
        return frozenset(shape for shape in found if len(shape) > 1).union(*inner)
