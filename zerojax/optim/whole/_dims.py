"""Which dims of a program's values belong together, and which an operation mixes.

Every dim of every value has a label. Operations that keep elements in their place pass labels on;
those that work along a dim *mix* its label; a product of matrices, or a factorisation, makes the
labels of rows and columns *meet*, since it needs whole matrices. With `x` of labels a, b, c:

    n = reduce_sum[axes=(1, 2)] x      n: a         mixes b, c
    y = dot_general x x                y: a, b, b   batched along a; mixes b, c, which meet
    z = div y n[:, None, None]         z: a, b, b

Nothing mixes a: each of its rows is a matrix of its own, and may be computed anywhere.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from zerojax import _jaxpr
from zerojax._primitives import primitives

Labels = tuple[int, ...]

#: The owner of scalars that were made of several parameters, as a global norm is.
SHARED = -1
_MATRICES, _ALL = primitives("matrices"), primitives("matrices", "other_matrices")


class Dims:
    """The labels of the dims of all values of a program, and whose values they are.

    Attributes:
        owners: per variable, the parameters whose leaves it was made of.
    """

    def __init__(self) -> None:
        self.owners: dict[Any, frozenset[int]] = {}
        self._labels: dict[Any, Labels] = {}
        self._parents: list[int] = []
        self._mixed: dict[int, set[int]] = {}
        self._met: dict[int, set[int]] = {}
        self._known: dict[Any, bool] = {}

    def fresh(self, count: int) -> Labels:
        first = len(self._parents)
        self._parents += range(first, first + count)
        return tuple(range(first, first + count))

    def give(self, var: Any, labels: Labels, owners: Iterable[int] = ()) -> None:
        """Give a variable its labels, or let those that it has be the same."""
        self._same(self._labels.setdefault(var, labels), labels)
        self.owners[var] = self.owners.get(var, frozenset()).union(owners)

    def labels(self, atom: Any) -> Labels:
        if not _jaxpr.is_variable(atom):
            return self.fresh(len(atom.aval.shape))
        if atom not in self._labels:
            self.give(atom, self.fresh(len(atom.aval.shape)))
        return tuple(map(self.find, self._labels[atom]))

    def find(self, label: int) -> int:
        while self._parents[label] != label:
            self._parents[label] = self._parents[self._parents[label]]
            label = self._parents[label]
        return label

    def mixed(self, eqns: Iterable[Any]) -> set[int]:
        return {self.find(label) for eqn in eqns for label in self._mixed[id(eqn)]}

    def met(self, eqn: Any) -> set[int]:
        return set(map(self.find, self._met[id(eqn)]))

    def read(self, eqns: Sequence[Any]) -> None:
        for eqn in eqns:
            self._mixed[id(eqn)], self._met[id(eqn)] = set(), set()
            inner = list(self._tied(eqn))
            for one in inner:
                self.read(one)
                for found in (self._mixed, self._met):
                    found[id(eqn)].update(*(found[id(x)] for x in one))
            if not inner:
                given = [self.labels(atom) for atom in eqn.invars]
                for var, labels in zip(eqn.outvars, self._results(eqn, given), strict=True):
                    self.give(var, labels)
            owners = frozenset[int]().union(*map(self._owners_of, eqn.invars))
            for var in eqn.outvars:
                of_all = {SHARED} if len(owners) > 1 else owners
                is_scalar = math.prod(var.aval.shape) == 1
                self.give(var, self.labels(var), of_all if is_scalar else owners - {SHARED})

    def _owners_of(self, atom: Any) -> frozenset[int]:
        return self.owners.get(atom, frozenset()) if _jaxpr.is_variable(atom) else frozenset()

    def _same(self, one: Iterable[int], other: Iterable[int]) -> None:
        for a, b in zip(one, other, strict=True):
            self._parents[self.find(a)] = self.find(b)

    def _tied(self, eqn: Any) -> Iterator[Sequence[Any]]:
        """Yield the equations that one holds, their inputs and results tied to its own."""
        name, ins, outs = eqn.primitive.name, list(eqn.invars), list(eqn.outvars)
        programs, first, carried = list(_jaxpr.bodies(eqn)), 0, 0
        if (program := _jaxpr.called(eqn)) is not None:
            programs = [program]
        elif name == "cond":
            ins = ins[1:]
        elif name == "scan":
            first, carried = _jaxpr.scan_parts(eqn.params)
        elif name == "while":  # how often it runs may differ from row to row: it mixes all
            return
        self._tie(eqn, ins[first : first + carried], outs[:carried])
        for program in programs:
            jaxpr = _jaxpr.opened(program)[0]
            self._tie(eqn, ins, jaxpr.invars)
            self._tie(eqn, outs, jaxpr.outvars)
            yield jaxpr.eqns

    def _tie(self, eqn: Any, atoms: Sequence[Any], inner: Sequence[Any]) -> None:
        for atom, other in zip(atoms, inner, strict=True):
            labels = self.labels(atom)
            more = len(labels) - len(other.aval.shape)
            self._mixed[id(eqn)].update(labels[:more])
            if _jaxpr.is_variable(other):
                self.give(other, labels[more:], self._owners_of(atom))

    def _results(self, eqn: Any, given: list[Labels]) -> list[Labels]:
        name, params = eqn.primitive.name, eqn.params
        mixed, met = self._mixed[id(eqn)], self._met[id(eqn)]
        if name == "transpose":
            return [tuple(given[0][d] for d in params["permutation"])]
        if name == "dot_general":
            return [self._product(eqn, *given)]
        if name in primitives("places"):
            return [self._placed(eqn, given[0])]
        if name.startswith("reduce_") and "axes" in params and len(eqn.outvars) == 1:
            mixed.update(given[0][d] for d in params["axes"])
            return [tuple(x for d, x in enumerate(given[0]) if d not in params["axes"])]
        if self._is_elementwise(eqn):
            return [self._elementwise(eqn, given)]
        rows = given[0][:-2] if name in _MATRICES else ()
        for labels in given:
            self._same(rows, labels[: len(rows)])
            mixed.update(labels[len(rows) :])
        if name in _ALL:
            met.update(mixed)
        results = [self.fresh(len(var.aval.shape) - len(rows)) for var in eqn.outvars]
        mixed.update(*results)
        return [(*rows, *labels) for labels in results]

    def _is_elementwise(self, eqn: Any) -> bool:
        """Ask once for all leaves of a shape: the answer takes a trace."""
        key = (eqn.primitive, str(eqn.params), *(str(x.aval) for x in (*eqn.invars, *eqn.outvars)))
        if key not in self._known:
            self._known[key] = _jaxpr.is_elementwise(eqn)
        return self._known[key]

    def _elementwise(self, eqn: Any, given: list[Labels]) -> Labels:
        shape = eqn.outvars[0].aval.shape
        result = self.fresh(len(shape))
        for atom, labels in zip(eqn.invars, given, strict=True):
            for d, label in enumerate(labels):
                if atom.aval.shape[d] == shape[d]:
                    self._same([label], [result[d]])
                else:
                    self._mixed[id(eqn)].add(label)  # one row for all: no row of its own
        return result

    def _placed(self, eqn: Any, labels: Labels) -> Labels:
        """Follow dims to where their elements begin.

        [4, 8, 6] as [4, 48] keeps the first, and what cuts the 8 cuts the 48; both are mixed.
        """
        old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        result = list(self.fresh(len(new)))
        spreads = eqn.primitive.name == "broadcast_in_dim"
        starts = {(math.prod(new[:d]), size > 1): d for d, size in enumerate(new)}
        for d, label in enumerate(labels):
            place = starts.get((math.prod(old[:d]), old[d] > 1))
            place = eqn.params["broadcast_dimensions"][d] if spreads else place
            if place is None or old[d] != new[place]:
                self._mixed[id(eqn)].add(label)
            if place is not None and (old[d] == new[place] or not spreads):
                result[place] = label
        if not spreads:
            self._mixed[id(eqn)].update({*result} - {*labels})
        return tuple(result)

    def _product(self, eqn: Any, left: Labels, right: Labels) -> Labels:
        contracting, batch = eqn.params["dimension_numbers"]
        for dims in (contracting, batch):
            self._same([left[d] for d in dims[0]], [right[d] for d in dims[1]])
        sizes, free = [math.prod(eqn.invars[0].aval.shape[d] for d in contracting[0])], []
        for labels, atom, *gone in zip((left, right), eqn.invars, contracting, batch, strict=True):
            own = [d for d in range(len(labels)) if d not in (*gone[0], *gone[1])]
            sizes.append(math.prod(atom.aval.shape[d] for d in own))
            free += [labels[d] for d in own]
        mixed = {*free, *(left[d] for d in contracting[0])}
        self._mixed[id(eqn)] |= mixed
        if min(sizes) > 1:  # else a vector is moved, or a number
            self._met[id(eqn)] |= mixed
        return (*(left[d] for d in batch[0]), *free)


def has_matrices(eqns: Iterable[Any]) -> bool:
    found = (inner for eqn in eqns for inner in _jaxpr.with_inner(eqn))
    return any(inner.primitive.name in _ALL for inner in found)
