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
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from zerojax._jaxpr import bind, num_products, num_summed, variables, with_inner
from zerojax._traced import is_fill
from zerojax.collectives.gathers import REDUCED
from zerojax.collectives.passes import _equations
from zerojax.collectives.passes._equations import BACKWARD, is_barrier, is_gather, is_named
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
    """Run a program whose calls are in place; return its results, and how many gathers wait.

    At most `ahead` elements are gathered before the product that needs them, in two groups; a
    weight that is larger is a group of its own; 0 leaves gathers alone. At most `waiting` bytes a
    device wait to be reduced, in three groups: of each gradient its own bytes, or those of what it
    is made from, if these are more; 0 leaves reductions alone. In a loop's turn (`is_turn`) only
    gradients that are smaller than what they are made from are waited for.
    """
    order = _Order(program)
    if ahead:
        order.tie(ahead / 2)
    num_gathers = sum(map(len, order.tied.values()))
    if layout.platform == "gpu":
        order.tie_padded()
    if waiting:
        order.tie_products(waiting / 3, layout, is_turn=is_turn)
    return order.run(args, order.planted()), num_gathers


class _Order(_equations.Equations):
    """The equations of a program, and which of their operands wait for each other."""

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        #: the place of the first equation that reads each value
        uses = ((var, at) for at, eqn in enumerate(self.eqns) for var in variables(eqn.invars))
        self.readers = dict(reversed([*uses]))
        #: maybe zeros: what a loop adds to them becomes shards if XLA sees them
        self.fills = {var for eqn in self.eqns if is_fill(eqn) for var in eqn.outvars}
        #: shards by the place of the product that they wait for, or that waits for them
        self.tied: dict[int, list[Any]] = {}
        #: results of barriers that wait for something else already
        self.loose: set[Any] = set()
        #: of shards that were widened what they are made of: XLA:GPU gathers what waits as it is
        self.narrow: dict[Any, Any] = {}
        #: by the place of a gather the one that gathers the same: what waits keeps them apart
        self.again: dict[int, Any] = {}

    def tie(self, bound: float) -> None:
        """Tie each group of gathers to the first product of the group before it.

        A loop that gathers has an order of its own; what stands behind it begins anew.
        """
        size, product, previous = 0, None, None
        gathered: dict[Any, Any] = {}  # by shards and what is done to them until they are gathered
        for at, eqn in enumerate(self.eqns):
            if is_gather(eqn):
                path, key = self.path_to(eqn.invars[-1])  # behind constants
                first, made = gathered.setdefault(key, eqn), eqn.outvars[0].aval
                if path and first is not eqn and first.outvars[0].aval.shape == made.shape:
                    self.again[at] = first  # else one has copies for each device
                if not path or first is not eqn:
                    continue
                if product is not None and size + made.size > bound:
                    size, product, previous = 0, None, product
                size += made.size
                if previous is not None:
                    self._wait(path, previous, made.dtype)
            elif is_named(eqn, BACKWARD) and not is_named(self.eqns[at - 1], BACKWARD):
                self.tie_sums(at)
            elif any(map(is_gather, with_inner(eqn))):
                size, product, previous = 0, None, None
            elif size and product is None and any(map(num_products, with_inner(eqn))):
                product = at

    def tie_sums(self, end: int) -> None:
        """Let a backward loop wait for gradients that are made before it.

        Else they are made after it, and the logits' gradient stays in memory meanwhile. A gradient
        to which more is added later, of a table that is looked up too, stays whole meanwhile: it is
        made early only if it is at most half as large as what it is made from.
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
                made = [x for x in self.path_to(var)[0] if x in self.places]
                if made and made[-1].aval.dtype.itemsize > var.aval.dtype.itemsize:
                    self.tied.setdefault(at, [])

    def tie_products(self, bound: float, layout: Layout, *, is_turn: bool) -> None:
        """Let the product behind each group of gradients wait for the group two before it.

            a b | c d | e f      gradients in the order of the program, groups of `bound` bytes
                             p   the product behind the third group waits for a and b

        Each counts as the larger of the gradient and what it is made from. Gradients that stay
        whole, as all at stage 0, have no name, so their products are looked for; of a table's sum
        of gradients the product counts if its result is smaller than its operands.
        """
        parts, outvars = layout.num_batch_parts, variables(self.jaxpr.outvars)
        ends = (self.maker(x, _is_reduced) or self.maker(x, _adds_up) for x in outvars)
        plain = {eqn for eqn in ends if eqn and not _is_reduced(eqn) and eqn.outvars[0].aval.ndim}
        for x in outvars if layout.platform == "gpu" else ():  # libtpu keeps these in their place
            *_, first = self.path_to(x)[0] or [None]  # none of what is made of a weight: an average
            last = self.places.get(first, 0)
            terms = self.eqns[last].invars if self.eqns[last].primitive.name == "add_any" else ()
            made = filter(None, (self.maker(y, num_products) for y in variables(terms)))
            room = 2 * parts * x.aval.size
            plain.update(eqn for eqn in made if room <= max(y.aval.size for y in eqn.invars))
        size, groups, ready = 0.0, [[], [], []], []
        for at, eqn in enumerate(self.eqns):
            if _is_reduced(eqn) or eqn in plain:
                product = self.maker(eqn.outvars[0], num_products)
                read = _equations.bytes_of(product.invars) / parts if product else 0
                made = _equations.bytes_of(eqn.outvars)
                if is_turn and read <= made:
                    continue
                groups[-1] += eqn.outvars
                size += max(made, read)
                if size >= bound:
                    size, groups, ready = 0.0, [*groups[1:], []], [*ready, *groups[0]]
            elif ready and num_products(eqn):
                self.tied.setdefault(at, []).extend(self._latest(var, at) for var in ready)
                ready = []

    def _latest(self, var: Any, end: int) -> Any:
        """Return what is made of a gradient before a place: a barrier is for what others read.

        The sum of a stack that layers are added to has later gradients in it: of `s2 = add s1 g2`,
        where g1 is in s1, it is s1.
        """
        made = self.places[var]
        while (reader := self.readers.get(var, end)) < end:
            others = (self.maker(x, _is_reduced) for x in variables(self.eqns[reader].invars))
            if any(x and self.places[x.outvars[0]] > made for x in others):
                break
            var = self.eqns[reader].outvars[0]
        return var

    def _wait(self, path: list[Any], product: int, dtype: Any) -> None:
        """Let a gather wait for a product; of what it is made of, what is there by then."""
        after = [var for var in path if self.places.get(var, -1) > product]
        var, *made_of = path[len(after) :] or [None]
        if var is None:
            return
        self.tied.setdefault(product, []).append(var)
        if made_of and made_of[0].aval.dtype == dtype != var.aval.dtype:
            self.narrow[var] = made_of[0]
        self.loose.update(var for var in after if is_barrier(self.eqns[self.places[var]]))

    def planted(self) -> list[Any]:
        """Return the equations with a barrier before each product that something waits for."""
        eqns: list[Any] = []
        for at, eqn in enumerate(self.eqns):
            if at in self.tied:
                read = (var for var in variables(eqn.invars) if var not in self.fills)
                held = [*dict.fromkeys((*read, *self.tied[at]))]
                given = [self.narrow.get(var, var) for var in held]
                barrier = functools.partial(self._held, given, held)
                eqns.append(_equations.Planted(barrier, given, held, eqn.source_info))
            if (first := self.again.get(at)) is not None:
                cast = functools.partial(_cast, eqn.outvars)  # to what a use widens it to
                eqns.append(_equations.Planted(cast, first.outvars, eqn.outvars, eqn.source_info))
                continue
            if self.loose.isdisjoint(eqn.outvars):
                eqns.append(eqn)
                continue
            pairs = [*zip(eqn.invars, eqn.outvars, strict=True)]
            for run, is_loose in ((list, True), (jax.lax.optimization_barrier, False)):
                some = [(x, y) for x, y in pairs if (y in self.loose) == is_loose]
                ins, outs = [x for x, _ in some], [y for _, y in some]
                eqns.append(_equations.Planted(run, ins, outs, eqn.source_info))
        return eqns

    def _held(self, given: Sequence[Any], held: Sequence[Any], values: list[Any]) -> list[Any]:
        return _cast(held, map(self._placed, given, jax.lax.optimization_barrier(values)))

    def _placed(self, var: Any, value: Any) -> Any:
        """Place what came out of a barrier as before, or the partitioner gathers ahead of it."""
        maker = self.eqns[self.places[var]] if var in self.places else None
        is_placed = maker is not None and maker.primitive.name == "sharding_constraint"
        return bind(maker, [value])[0] if is_placed else value


def _cast(like: Sequence[Any], values: Iterable[Any]) -> list[Any]:
    dtypes = [var.aval.dtype for var in like]
    return [x if x.dtype == t else x.astype(t) for x, t in zip(values, dtypes, strict=True)]


_is_reduced = functools.partial(is_named, name=REDUCED)


def _adds_up(eqn: Any) -> bool:
    return eqn.primitive.name == "reduce_sum" or num_products(eqn) > 0
