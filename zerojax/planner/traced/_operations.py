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

`BACKENDS` has the few ways in which compilers depart from the plain rules, and `run_late` the order
in which one runs operations, read off compiled programs.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A quantity that grows with the examples in a device's microbatch: fixed + each * examples."""

    fixed: float
    each: float = 0.0

    def at(self, examples: float) -> float:
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
    name: str  # the primitive's
    #: "fused" (an elementwise operation that compilers merge with its neighbours), "reduce" (merged
    #: with what comes before it), "gather", "scatter", "kernel" or "loop"
    kind: str
    inputs: tuple[int | None, ...]  # indices of values; None for a literal
    outputs: tuple[int, ...]  # indices of values
    bodies: "tuple[Operations, ...]" = ()  # of a scan, a while loop or the branches of a cond
    length: Line = Line(1.0)  # how often a scan runs; of a while loop nobody knows, and 1 is taken
    num_carry: int = 0  # of a scan or a while loop
    #: floating-point operations of dot products and convolutions; multiply and add are two
    flops: Line = Line(0.0)
    is_wide: bool = False  # whether these are in fp32 or wider
    contracted: Line = Line(0.0)  # the elements that a dot product sums over; 0 for anything else
    region: int = 0  # the rematerialised call that it stands in, counted from 1; 0 for none

    @property
    def read(self) -> tuple[int, ...]:
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

    def readers(self) -> dict[int, list[int]]:
        """Map values to the indices of the operations that read them, in order."""
        found: dict[int, list[int]] = {}
        for t, op in enumerate(self.ops):
            for v in op.read:
                found.setdefault(v, []).append(t)
        return found

    def carried_shapes(self) -> frozenset[tuple[int, ...]]:
        """Return the shapes of what loops carry from layer to layer, loops within loops too."""
        scans = [op for op in self.ops if op.name == "scan"]
        found = {self.values[v].shape for op in scans for v in op.outputs[: op.num_carry]}
        inner = (body.carried_shapes() for op in self.ops for body in op.bodies)
        return frozenset(shape for shape in found if len(shape) > 1).union(*inner)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend:
    """How a compiler departs from the plain rules."""

    #: whether elementwise operations and slices are merged into the one dot product that reads
    #: them, and reductions into the one that makes what they read (TPU); else operands of a dot
    #: product lie in memory, and what a gather reads is merged into it (GPU, CPU)
    fuses_operands: bool = False
    #: whether it is XLA:GPU, which runs operations as late as possible, makes dot products in parts
    #: that are added up (`_split`), and gives the kernel of a softmax a buffer of its own
    is_gpu: bool = False
    #: whether a gradient is on its way into shards, whole, while the next product runs (stage 3)
    overlaps: bool = False
    #: bytes of shards up to which gradients wait to be reduced together (GPU; `options.toml`)
    combines: float = 0.0


BACKENDS: Mapping[str, Backend] = {
    "gpu": Backend(is_gpu=True, overlaps=True, combines=1e6),
    "tpu": Backend(fuses_operands=True, overlaps=True),
    "cpu": Backend(),
}


def run_late(
    program: Operations, gradients: Collection[int], examples: int = 0, *, waits: bool = False
) -> Operations:
    """Return the operations as late as possible, as XLA's scheduler runs them on a GPU.

    It goes backwards from the results, and puts each operation right before the first that reads
    it; those that wait for the same one keep their order. Seen in compiled programs: where loops
    are, a tied embedding's gradient is a sum with the look-up's part, so that the logits' gradient
    waits for the end of the backward pass; and a layer's softmax is computed again behind the
    gradient of the scores, which lie there twice.

    Outside of loops (in a loop's body `examples` is 0) what the loss is made of, the first output,
    comes in its place, and a gradient that one product makes is reduced beside the next product.
    It `waits` behind a loop unless that gathers ahead: nothing else asks for a product before it.
    """
    if not examples:
        gradients = ()
    end, made = len(program.ops), {v: op for op in program.ops for v in op.outputs}
    readers = program.readers()
    reduced, todo = set(gradients), [v for v in gradients if v in made]
    while todo:  # and what they are only views of
        op = made[todo.pop()]
        found = [v for v in op.read if v in made and op.kind == "fused" and len(op.read) == 1]
        reduced.update(found)
        todo += found
    loss = set(program.outputs[:1] if examples else ())
    for op in reversed(program.ops):
        if not loss.isdisjoint(op.outputs):
            loss.update(op.read)
    order, waiting, product = [end], {}, end  # what each waits for; the first product
    is_behind = False  # whether a loop comes in between
    for t in reversed(range(end)):
        op = program.ops[t]
        least = end if reduced.isdisjoint(op.outputs) else product
        found = {least}.union(*(readers.get(v, ()) for v in op.outputs))
        at = 0 if not loss.isdisjoint(op.outputs) else min(map(order.index, found))
        waiting[t] = order[at]
        while at and waiting[order[at - 1]] == waiting[t]:
            at -= 1
        order.insert(at, t)
        is_beside = op.kind == "kernel" and reduced.isdisjoint(op.outputs) and not is_behind
        if is_beside and at < order.index(product):
            product = t
        is_behind = is_behind or (waits and op.kind == "loop")
    return dataclasses.replace(program, ops=tuple(program.ops[t] for t in order[:-1]))
