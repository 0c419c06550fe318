"""Order: when layers of a Python list are gathered, and when their gradients are reduced.

Nothing in a Python list of layers says when a layer's weights may be gathered, so a compiler may
gather all of them first. In the order of the program, gathers are put into groups of half a layer,
and a barrier ties what a group gathers to the first product of the group before it. Of

    a = GATHER w0; h1 = dot_general h0 a
    b = GATHER w1; h2 = dot_general h1 b
    c = GATHER w2; h3 = dot_general h2 c

where each weight is a group, `b` is gathered beside the first product, and `c` beside the second:

    a = GATHER w0; h0, a, w1 = BARRIER h0 a w1; h1 = dot_general h0 a
    b = GATHER w1; h1, b, w2 = BARRIER h1 b w2; h2 = dot_general h1 b
    c = GATHER w2; h3 = dot_general h2 c

Compilers schedule products that make weight gradients late, so that unreduced gradients, and the
activations that these products read, stay in memory until the links are free. So on GPUs and
SparseCores a product waits until the gradients of the group before the last two are reduced:

    d2 = REDUCE (dot_general g x2); g1, d4 = BARRIER g1 d4; h = dot_general g1 w1; d1 = REDUCE ...

What is computed again for the backward pass stands behind a barrier of all that it is given. Shards
that are tied pass by it: they need not wait for the gradient of this layer.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from zerojax._jaxpr import (
    bind,
    inputs_of,
    num_products,
    num_summed,
    opened,
    run_equations,
    variables,
    with_inner,
)
from zerojax._tree import num_bytes
from zerojax.collectives._boxed import REDUCED, makes_gathered
from zerojax.layout import Layout


def run_in_order(
    program: Any,
    args: Sequence[Any],
    layout: Layout,
    ahead: float = 0,
    waiting: float = 0,
    *,
    is_turn: bool = False,
) -> tuple[list[Any], int]:
    """Run a program whose calls are in place, one group of gathers after another.

    `ahead` elements may be gathered ahead of a product: two groups; a weight that is larger than
    one is a group of its own; 0 leaves gathers as they are. `waiting` bytes of gradients, or of
    what they are made of, may wait on each device: three groups; 0 does not order them. A loop's
    turn (`is_turn`) has a layer's gradients at most, so it waits only for those that are smaller
    than what they are made of.

    Returns:
        Its results, and how many gathers wait for something.
    """
    jaxpr, _ = opened(program)
    order = _Order(jaxpr.eqns)
    if ahead:
        order.tie(ahead / 2)
    num_gathers = sum(map(len, order.tied.values()))
    if layout.platform == "gpu":
        order.tie_padded()
    if waiting:
        order.tie_products(waiting / 3, layout, variables(jaxpr.outvars), is_turn=is_turn)
    inputs = inputs_of(program, args)
    return run_equations(order.equations(), inputs, jaxpr.outvars, order.step), num_gathers


class Handed(NamedTuple):
    """What hands on values: those of a gather before, or its own behind a barrier (`_order`)."""

    invars: Sequence[Any]
    outvars: Sequence[Any]
    source_info: Any


class _Order:
    """The equations of a program, and which of their operands wait for each other."""

    def __init__(self, eqns: Sequence[Any]) -> None:
        self.eqns = eqns
        self.places = {var: at for at, eqn in enumerate(eqns) for var in eqn.outvars}
        #: the place of the first equation that reads each value
        uses = ((var, at) for at, eqn in enumerate(eqns) for var in variables(eqn.invars))
        self.readers = dict(reversed([*uses]))
        #: shards by the place of the product that they wait for, or that waits for them
        self.tied: dict[int, list[Any]] = {}
        #: results of barriers that wait for something else already
        self.loose: set[Any] = set()
        #: shards and what is done to them until they are gathered
        self.gathered: set[Any] = set()

    def tie(self, bound: float) -> None:
        """Tie each group of gathers to the first product of the group before it.

        A loop that gathers has an order of its own; what stands behind it begins anew.
        """
        size, product, previous = 0, None, None
        for at, eqn in enumerate(self.eqns):
            if is_gather(eqn):
                path = self._new_path(eqn.invars[-1])  # behind constants
                if not path:
                    continue
                if product is not None and size + eqn.outvars[0].aval.size > bound:
                    size, product, previous = 0, None, product
                size += eqn.outvars[0].aval.size
                if previous is not None:
                    self._wait(path, previous)
            elif is_named(eqn, BACKWARD) and not is_named(self.eqns[at - 1], BACKWARD):
                self.tie_sums(at)
            elif any(map(is_gather, with_inner(eqn))):
                size, product, previous = 0, None, None
            elif size and product is None and any(map(num_products, with_inner(eqn))):
                product = at

    def tie_sums(self, end: int) -> None:
        """Let a backward loop wait for gradients that are made before it.

        Else they are made behind it, and the logits' gradient lies there all along. One that is not
        reduced yet, of a table that is looked up too, lies there whole instead: only if it takes
        half the room of what it is made of.
        """
        starts = itertools.takewhile(lambda eqn: is_named(eqn, BACKWARD), self.eqns[end:])
        live = {*variables(var for eqn in starts for var in eqn.invars)}
        found = self.tied.setdefault(end, [])
        for eqn in reversed(self.eqns[:end]):
            is_read = not live.isdisjoint(eqn.outvars)
            if is_read or is_named(eqn, REDUCED) or eqn.primitive.name == "reduce_sum":
                found += [] if is_read else eqn.outvars
                live.update(variables(eqn.invars))
            elif num_products(eqn):
                largest = max(x.aval.size for x in eqn.invars)
                found += eqn.outvars if 2 * eqn.outvars[0].aval.size <= largest else []

    def tie_padded(self) -> None:
        """Let a product that pads its operands wait until what a cast makes narrower is there.

        Else XLA:GPU pads the cast computed again: 50,257 logits lie there in fp32, cast and padded.
        Long sums are made in up to 16 parts, each of a multiple of 8 elements of bf16.
        """
        for at, eqn in enumerate(self.eqns):
            multiple = 16 * 8 if num_summed(eqn) > 4096 else 8
            for var in variables(eqn.invars) if num_summed(eqn) % multiple else ():
                made = [x for x in path_to(var, self.eqns, self.places)[0] if x in self.places]
                if made and made[-1].aval.dtype.itemsize > var.aval.dtype.itemsize:
                    self.tied.setdefault(at, [])

    def tie_products(
        self, bound: float, layout: Layout, outvars: Sequence[Any], *, is_turn: bool
    ) -> None:
        """Let the product behind each group of gradients wait for the group two before it.

        A gradient waits, or what makes it with all that this reads: the larger counts. One that is
        not cut, as all at stage 0, has no name. Of a table's sum the product waits, if it shrinks.
        """
        parts = layout.num_batch_parts
        is_reduced = functools.partial(is_named, name=REDUCED)
        ends = (self._maker(x, is_reduced) or self._maker(x, adds_up) for x in outvars)
        plain = {eqn for eqn in ends if eqn and not is_reduced(eqn) and eqn.outvars[0].aval.ndim}
        for x in outvars if layout.platform == "gpu" else ():  # libtpu keeps these in their place
            last = self.places.get(path_to(x, self.eqns, self.places)[0][-1], 0)
            terms = self.eqns[last].invars if self.eqns[last].primitive.name == "add_any" else ()
            made = filter(None, (self._maker(y, num_products) for y in variables(terms)))
            room = 2 * parts * x.aval.size
            plain.update(eqn for eqn in made if room <= max(y.aval.size for y in eqn.invars))
        size, groups, ready = 0.0, [[], [], []], []
        for at, eqn in enumerate(self.eqns):
            if is_reduced(eqn) or eqn in plain:
                product = self._maker(eqn.outvars[0], num_products)
                read = _bytes_of(product.invars) / parts if product else 0
                made = _bytes_of(eqn.outvars)
                if is_turn and read <= made:
                    continue
                groups[-1] += eqn.outvars
                size += max(made, read)
                if size >= bound:
                    size, groups, ready = 0.0, [*groups[1:], []], [*ready, *groups[0]]
            elif ready and num_products(eqn):
                self.tied.setdefault(at, []).extend(self._latest(var, at) for var in ready)
                ready = []

    def _maker(self, var: Any, is_it: Callable[[Any], Any]) -> Any:
        path, _ = path_to(var, self.eqns, self.places)
        eqns = (self.eqns[self.places[x]] for x in path if x in self.places)
        return next(filter(is_it, eqns), None)

    def _latest(self, var: Any, end: int) -> Any:
        """Return what is made of a gradient before a place: a barrier is for what others read."""
        while (reader := self.readers.get(var, end)) < end:
            var = self.eqns[reader].outvars[0]
        return var

    def _new_path(self, var: Any) -> list[Any]:
        """Return `path_to` a gather's operand; nothing where the same path was asked for before.

        A compiler gathers the same weight once, if it waits for the same.
        """
        path, key = path_to(var, self.eqns, self.places)
        if key in self.gathered:
            return []
        self.gathered.add(key)
        return path

    def _wait(self, path: list[Any], product: int) -> None:
        """Let a gather wait for a product; of what it is made of, what is there by then."""
        after = [var for var in path if self.places.get(var, -1) > product]
        for var in path[len(after) : len(after) + 1]:
            self.tied.setdefault(product, []).append(var)
            self.loose.update(var for var in after if is_barrier(self.eqns[self.places[var]]))

    def equations(self) -> list[Any]:
        """Return the equations with a barrier before each product that something waits for."""
        eqns: list[Any] = []
        for at, eqn in enumerate(self.eqns):
            if at in self.tied:
                together = [*dict.fromkeys((*variables(eqn.invars), *self.tied[at]))]
                eqns.append(Handed(together, together, eqn.source_info))
            eqns.append(eqn)
        return eqns

    def step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        if isinstance(eqn, Handed):
            values = jax.lax.optimization_barrier(values)
            return [*map(self._placed, eqn.invars, values)]
        if self.loose.isdisjoint(eqn.outvars):
            return bind(eqn, values)
        is_loose = [var in self.loose for var in eqn.outvars]
        waiting = iter(
            bind(eqn, [x for x, passes in zip(values, is_loose, strict=True) if not passes])
        )
        return [x if passes else next(waiting) for x, passes in zip(values, is_loose, strict=True)]

    def _placed(self, var: Any, value: Any) -> Any:
        """Place what came out of a barrier as before, or the partitioner gathers ahead of it."""
        maker = self.eqns[self.places[var]] if var in self.places else None
        is_placed = maker is not None and maker.primitive.name == "sharding_constraint"
        return bind(maker, [value])[0] if is_placed else value


def _bytes_of(found: Sequence[Any]) -> int:
    return sum(num_bytes(var.aval.shape, var.aval.dtype) for var in variables(found))


#: The name of what a backward loop starts with.
BACKWARD = "zerojax_backward"


def is_named(eqn: Any, name: str) -> bool:
    """Whether an equation gives its result a name: `REDUCED`, a gradient that has been reduced."""
    return eqn.primitive.name == "name" and eqn.params["name"] == name


def adds_up(eqn: Any) -> bool:
    return eqn.primitive.name == "reduce_sum" or num_products(eqn) > 0


def is_gather(eqn: Any) -> bool:
    return makes_gathered(eqn.primitive.name, eqn.params)


def path_to(var: Any, eqns: Sequence[Any], places: dict[Any, int]) -> tuple[list[Any], Any]:
    """Return the values that a gather's operand is made of, one from the next, and a key of them.

    `places` are those of the equations by their results. The key is the first value with what is
    done to it, and the places of the barriers on the way. `([], None)` for a gathered weight.
    """
    path, steps, barriers = [var], [], []
    while (at := places.get(path[-1])) is not None:
        eqn = eqns[at]
        if is_gather(eqn):  # copies of a gathered weight
            return [], None
        inputs = variables(eqn.invars)
        if is_barrier(eqn):
            inputs = [eqn.invars[eqn.outvars.index(path[-1])]]
            barriers.append(at)
        elif len(inputs) != 1:
            break
        else:
            steps.append((eqn.primitive, str(eqn.params)))
        path += inputs
    return path, ((path[-1], *steps), (*barriers,))


def is_barrier(eqn: Any) -> bool:
    return eqn.primitive.name == "optimization_barrier"
