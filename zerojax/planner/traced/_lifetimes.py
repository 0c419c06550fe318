"""Which values of a traced program lie in memory, and when each is read for the last time. Pure.

A compiler merges elementwise operations with their neighbours, lets a result take the place of an
operand that is read for the last time, and frees what nobody reads any more. What of this does not
depend on the sizes that a stage or a batch changes is worked out here, once per program.

Example: `y = x @ w; z = sin(y) + 1; u = z @ v` runs as three launches on a GPU:

    y = x @ w         reads x and w, leaves y
    z = sin(y) + 1    one launch of two operations; y dies, and z may take its place
    u = z @ v         reads z and v, leaves u; z dies

On a TPU the second one is merged into the third, which then reads y.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from zerojax.planner.traced._operations import BACKENDS, Backend, Op, Operations, run_late
from zerojax.planner.traced._split import num_parts
from zerojax.planner.traced._weights import Part, Parts, Weights

#: Launches from the one that makes a value to its last use, for libtpu to keep it in vector memory.
_SOON = 5


class Launch(NamedTuple):
    """An operation that runs by itself."""

    time: int  # its index among the operations
    op: Op
    results: tuple[int, ...]  # values that it leaves in memory
    dies: tuple[int, ...]  # values that are freed after it
    takes_over: tuple[int, ...]  # those of them whose buffers its results may take
    reads: frozenset[int]  # buffers and parameters that it reads
    bodies: "tuple[Lifetimes, ...]"  # of a loop, or the branches of a cond


def lifetimes_of(
    program: Operations, num_leaves: int, platform: str, n: int = 1, *, waits: bool = False
) -> "Lifetimes":
    """Analyse `loss, *gradients = f(*parameters, *batch)` of n examples as a platform runs it.

    `waits`: no loop gathers ahead, so that gradients wait behind it (`run_late`).
    """
    outputs = program.outputs[1 : 1 + num_leaves]
    parameters = {v: Part(n) for n, v in enumerate(program.inputs[:num_leaves])}
    gradients = {v: Part(n) for n, v in enumerate(outputs) if v is not None}
    return Lifetimes(program, parameters, gradients, BACKENDS[platform], n, waits=waits)


class Lifetimes:
    """Decides what of a program, or of the body of a loop, lies in memory, and until when."""

    def __init__(
        self,
        program: Operations,
        parameters: Parts,
        gradients: Parts,
        backend: Backend,
        examples: int = 0,  # of the whole program; 0 for the body of a loop
        *,
        waits: bool = False,
    ) -> None:
        self.weights = Weights(program, parameters, gradients)
        if backend.is_gpu:
            made = gradients.keys() | self.weights.layers
            program = run_late(program, made, examples, waits=waits)
        self.program, self.backend = program, backend
        self.maker = {v: t for t, op in enumerate(program.ops) for v in op.outputs}
        self.readers = program.readers()
        self.results = {v for v in program.outputs if v is not None}
        #: scatters, and the sums that they are written into, in memory
        self.summed = self._sums()
        self.stored = {v for v in range(len(program.values)) if self._is_stored(v)}
        #: the buffers that values are made from
        self.sources: dict[int, frozenset[int]] = {}
        for op in program.ops:
            if op.kind != "loop":
                behind = frozenset().union(*map(self._behind, op.read))
                self.sources |= dict.fromkeys(op.outputs, behind)
        # What runs by itself is not merged into those that read it.
        reads = {
            t: self._reads(t, op)
            for t, op in enumerate(program.ops)
            if op.kind == "loop" or self.stored.intersection(op.outputs)
        }
        self.launches = self._launches(reads)
        self.is_list = all(launch.op.kind != "loop" for launch in self.launches)
        #: in a list of layers on a TPU, products that wait for the rest of a tied table's gradient
        self.waiting = self._waiting() if examples and self.is_list else frozenset[int]()
        #: values outside of loops that vector memory may keep: their last use comes soon
        self.brief = self._brief() if examples else frozenset[int]()
        #: parameter and operation of each use, for which it has to be whole
        single = (x for x in self.launches if x.op.kind != "loop")
        self.uses = [(v, x.time) for x in single for v in x.reads & self.weights.parameters.keys()]
        #: what loops stack for the backward pass, and whether layers hand it on to each other
        self.stacked = self._stacked()

    def _launches(self, reads: Mapping[int, frozenset[int]]) -> tuple[Launch, ...]:
        last = {v: t for t, values in reads.items() for v in values}
        dies: dict[int, list[int]] = {}
        for v, t in last.items():
            if v not in self.results:
                dies.setdefault(t, []).append(v)
        launches = []
        for t, read in reads.items():
            op, gone = self.program.ops[t], tuple(dies.get(t, ()))
            results = tuple(v for v in op.outputs if v in self.stored)
            unread = tuple(v for v in results if v not in last and v not in self.results)
            taken, bodies = self._takes_over(op, gone, read), tuple(self._bodies(op))
            launches.append(Launch(t, op, results, gone + unread, taken, read, bodies))
        return tuple(launches)

    def _brief(self) -> frozenset[int]:
        """Find values, but no gradients, whose last use comes within `_SOON` launches.

        What loops make or carry lies in memory.
        """
        single = [(n, x) for n, x in enumerate(self.launches) if x.op.kind != "loop"]
        made = {v: n for n, launch in single for v in launch.results}
        pairs = ((v, n) for n, launch in single for v in launch.dies)
        soon = (v for v, n in pairs if n - made.get(v, -math.inf) <= _SOON)
        return frozenset(soon) - self.weights.marked.keys()

    def _waiting(self) -> frozenset[int]:
        """Find the logits' part of a tied table's gradient: a product, added to a scatter."""
        found = set[int]()
        for op in self.program.ops if self.backend.fuses_operands else ():
            behind = [self._behind_views(v) for v in op.read] if op.name == "add_any" else []
            kinds = {x.kind: x for x in behind if x is not None}
            if kinds.keys() == {"kernel", "scatter"}:
                found.update(kinds["kernel"].outputs)
        return frozenset(found)

    def _bodies(self, op: Op) -> "Iterator[Lifetimes]":
        """Go into a loop, or the branches of a cond, with what of a parameter is seen there."""
        values, seen = self.program.values, self.weights
        for body in op.bodies:
            given = op.inputs if op.name == "scan" else op.inputs[-len(body.inputs) :]
            read = zip(body.inputs, given, strict=False)
            made = zip(body.outputs, op.outputs, strict=False)
            parameters = {
                slot: seen.parameters[v].sliced(values[v], body.values[slot])
                for slot, v in {slot: seen.owner[v] for slot, v in read if v in seen.owner}.items()
            }
            gradients = {
                slot: seen.marked[v].sliced(values[v], body.values[slot])
                for slot, v in made
                if slot is not None and v in seen.marked
            }
            yield Lifetimes(body, parameters, gradients, self.backend)

    def _stacked(self) -> dict[int, bool]:
        found, values = {}, self.program.values
        of_weights = self.weights.marked.keys()
        for launch in self.launches:
            op = launch.op
            carried = {values[v].shape for v in op.outputs[: op.num_carry]}
            for v in op.outputs[op.num_carry :] if op.name == "scan" else ():
                if v in launch.results and v not in of_weights:
                    found[v] = values[v].shape[1:] in carried
        return found

    def _sums(self) -> dict[int, int]:
        found = {}
        for t, op in enumerate(self.program.ops):
            if op.kind != "scatter" or op.inputs[0] is None or not self._is_constant(op.inputs[0]):
                continue
            readers = self.readers.get(op.outputs[0], [])
            if len(readers) == 1 and self.program.ops[readers[0]].name in ("add", "add_any"):
                found[t] = readers[0]
        return found

    def _is_constant(self, value: int) -> bool:
        op = self.weights.maker.get(value)
        if op is None or op.kind != "fused":
            return False
        return all(self.weights.elements(v) == 1 for v in op.read)

    def _behind_views(self, value: int) -> Op | None:
        op = self.weights.maker.get(value)
        is_view = op is not None and op.kind == "fused" and len(op.read) == 1
        return self._behind_views(op.read[0]) if op and is_view else op

    def _is_stored(self, value: int) -> bool:
        t = self.maker.get(value)
        if t is None or value in self.weights.owner:
            return False
        op = self.program.ops[t]
        if op.kind == "scatter":
            return t not in self.summed
        if op.kind != "fused" or value in self.results:
            return True
        return t in self.summed.values() or self._is_operand(value)

    def _is_operand(self, value: int) -> bool:
        """Return whether an elementwise result is read by something that wants it in memory."""
        merged = 0  # dot products that it is merged into
        for t in self.readers.get(value, ()):
            op = self.program.ops[t]
            if op.name == "dot_general" and self.backend.fuses_operands:
                merged += 1
            elif (
                op.kind in ("loop", "kernel")
                or (op.kind == "gather" and self.backend.fuses_operands)
                or (op.kind == "scatter" and t not in self.summed)
            ):
                return True
        if len(self.readers.get(value, ())) < 2:
            return False
        # The product that a sum reads, such as a residual stream's, writes it for all its readers.
        op = self.program.ops[self.maker[value]]
        if op.name in ("add", "add_any") and len(op.read) == 2:
            return len({*map(self.weights.elements, (value, *op.read))}) == 1
        if not self.backend.fuses_operands:
            return False
        # Two products make a softmax's gradient again; what a cast narrows they read.
        return merged > 1 and any(self.itemsize(v) > self.itemsize(value) for v in op.read)

    def _reads(self, t: int, op: Op) -> frozenset[int]:
        behind = [self._behind(v) for v in op.read]
        for scatter, add in self.summed.items():
            if add == t:
                behind += map(self._behind, self.program.ops[scatter].read[1:])
        return frozenset().union(*behind)

    def _behind(self, value: int) -> frozenset[int]:
        """List what is read for a value: its buffer, or where it has none, what it is made from."""
        owner = self.weights.owner
        if value in owner or value not in self.maker:
            return frozenset({owner.get(value, value)})
        return frozenset({value}) if value in self.stored else self.sources[value]

    def num_parts(self, op: Op, examples: float) -> int:
        k = op.contracted.at(examples)
        if op.name != "dot_general" or not self.backend.is_gpu or not k:
            return 1
        read = [self.program.values[v] for v in (*op.read[:2], op.outputs[0])]
        left, right, made = (x.bytes.at(examples) / x.dtype.itemsize for x in read)
        batch = left * right / (made * k * k)  # bmk * bkn / (bmn * k * k)
        m, n = left / (batch * k), right / (batch * k)
        return num_parts(m, n, k, batch, self.itemsize(op.outputs[0]))

    def itemsize(self, value: int) -> int:
        return self.program.values[value].dtype.itemsize

    def _takes_over(self, op: Op, gone: tuple[int, ...], read: frozenset[int]) -> tuple[int, ...]:
        if op.kind in ("fused", "scatter"):
            # A GPU's kernel of a softmax, elementwise behind a reduction, writes elsewhere.
            makers = (self.program.ops[self.maker[v]] for v in read & self.maker.keys())
            is_softmax = op.kind == "fused" and any(x.kind == "reduce" for x in makers)
            return () if is_softmax and self.backend.is_gpu else gone
        return ()
