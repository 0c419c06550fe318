"""Which values of a traced program are parameters, gradients, or a layer of a stack of them. Pure.

Example, for `w` of 3 x 4 x 8, a stack of three layers that a Python loop indexes:

    b = slice(w)[0]             a parameter: a third of w, gathered where it is used
    db = x.T @ dy               marked as a third of w's gradient: scattered as soon as it is there
    e = pad(db)                 a sum: zeros but for db, of shards
    dw = e + pad(dc)            a sum as well
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zerojax.planner.traced._operations import Operations, Value


class Part(NamedTuple):
    """A parameter, or what one iteration of a loop sees of it."""

    leaf: int  # which parameter, in flattening order
    share: float = 1.0  # of its elements

    def sliced(self, outer: Value, inner: Value) -> "Part":
        return Part(self.leaf, self.share * math.prod(inner.shape) / max(math.prod(outer.shape), 1))


#: Parts of parameters by the values that they, or their gradients, are.
Parts = Mapping[int, Part]


class Weights:
    """Finds the parameters and gradients of a program, or of the body of a loop."""

    def __init__(self, program: Operations, parameters: Parts, gradients: Parts) -> None:
        self._program, self.gradients = program, gradients
        #: the operation that makes each value
        self.maker = {v: op for op in program.ops for v in op.outputs}
        #: what is made whole for its uses; with layers that are read out of stacks
        self.parameters = dict(parameters)
        #: values that are a parameter seen in another way, with that parameter
        self.owner = {v: v for v in parameters}
        self._find_parameters()
        #: values that become gradients by elementwise operations, with what of a gradient they are
        self.marked: dict[int, Part] = {}
        #: those of them that are the gradient of a layer, and those that such are written into
        self.layers, self.sums = set[int](), set[int]()
        for wanted, part in gradients.items():
            self._mark(wanted, part)

    def elements(self, value: int) -> int:
        return math.prod(self._program.values[value].shape)

    def _find_parameters(self) -> None:
        """Find which values are a parameter and no other array, elementwise: cast, sliced.

        What is larger than the parameter, a bias for every token, is a value of its own.
        """
        owner = self.owner
        for op in self._program.ops:
            if op.kind != "fused":
                continue
            found = {owner.get(v) for v in op.read if self.elements(v) > 1}
            if len(found) == 1 and (one := found.pop()) is not None:
                v, values = op.outputs[0], self._program.values
                if "slice" in op.name and self._is_layer(v, one):
                    owner[v] = v
                    self.parameters[v] = self.parameters[one].sliced(values[one], values[v])
                elif self.elements(v) <= self.elements(one):
                    owner[v] = one

    def _mark(self, wanted: int, part: Part) -> None:
        todo, found, has_layers = [(wanted, part)], set[int](), False
        while todo:
            v, one = todo.pop()
            if v in self.marked or v in self.owner:
                continue
            self.marked[v] = one
            found |= {v} if one == part else set()
            if (op := self.maker.get(v)) is None:
                continue
            if op.kind == "fused":
                todo += [(i, one) for i in op.read if self.elements(i) == self.elements(v)]
                layers = [i for i in op.read if self._is_layer(i, v)]
                if op.name in ("pad", "dynamic_update_slice") and layers:
                    values = self._program.values
                    todo += [(i, one.sliced(values[v], values[i])) for i in layers]
                    self.layers.update(layers)
                    has_layers = True
        self.sums |= found if has_layers else set()

    def _is_layer(self, value: int, stack: int) -> bool:
        one, whole = (self._program.values[v].shape for v in (value, stack))
        return one[1:] == whole[1:] and one[:1] == (1,) < whole[:1]
