"""A turn of a loop that gathers, cut where weights come out of their gathers.

What it gathers, which must not depend on what the loop computes, can be gathered a turn ahead; the
rest computes the layer. A backward turn reduces gradients as well, and compilers start both as late
as they can: at its end each waited for the others. Barriers end the gathers, the last where most of
the layer is computed, so that the last reductions have the links for themselves.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from zerojax import _jaxpr
from zerojax.collectives.gathers import REDUCED
from zerojax.collectives.passes._equations import Equations, bytes_of, is_gather, is_named

#: Of a backward layer with what it computes again. Compiled for h100:1x8 and v5p:2x2x2, a GPT and
#: an MLP expose the same from 0.7 to 0.8; at 0.5 and 0.9 the ends of loops wait again.
COMPUTED = 0.75

#: The share of that arithmetic that runs beside a reduction before products wait for it (v5e).
MERGED = 0.12


class Turn(Equations):
    def __init__(self, body: Any, params: Any, layers: float, parts: int, is_tpu: bool) -> None:
        """Choose what is gathered ahead, of `layers` by bytes.

        `parts` are those of the batch, where reductions run within products (no SparseCores).
        """
        super().__init__(body)
        self.parts, self.is_tpu = parts, is_tpu
        _, self.carried, sliced = _jaxpr.scan_split(params, self.jaxpr.invars)
        self.counters = {*filter(self._is_counter, self.carried)}
        self.reduces = any(is_named(eqn, REDUCED) for eqn in self.eqns)
        self.pure = [eqn for eqn in self.eqns if not eqn.effects]
        called_back = {var for eqn in self.eqns if eqn.effects for var in eqn.outvars}
        computed = _jaxpr.depending(self.eqns, {*self.carried} - self.counters | called_back)
        own = _jaxpr.depending(self.eqns, [*self.counters, *sliced])
        gathers = [eqn for eqn in self.eqns if is_gather(eqn)]
        #: the equations that gather what only this turn knows
        self.late = [eqn for eqn in gathers if not computed.isdisjoint(eqn.outvars)]
        outs = [eqn.outvars[0] for eqn in gathers]
        weights = {x for eqn in _needed(self.pure, outs) for x in _jaxpr.variables(eqn.invars)}
        #: what it reads of stacks beside weights: what the forward pass has kept
        self.activations = [var for var in sliced if var not in weights]
        branches = (eqn for eqn in self.eqns if eqn.primitive.name == "cond")
        self.late += [x for x in branches if any(map(is_gather, _jaxpr.with_inner(x)))]
        early = [x for x in gathers if x not in self.late and own.issuperset(x.outvars)]
        sizes = [bytes_of(eqn.outvars) for eqn in early]
        bound, done = layers * sum(sizes), 0
        #: those that gather what the next turn uses, and the product before which each ends
        self.gathers = list[Any]()
        for eqn, size in zip(early, sizes, strict=True):
            if done + size <= bound or done < bound / 8:
                self.gathers.append(eqn)
            done += size
        self.ends = self._ends() if self.reduces else []

    def keeps(self, parts: int) -> bool:
        """Whether a turn stacks, or reads of stacks, more than it gathers, on a device.

        libtpu lays the stacks out anew for what stands between the two loops, and for a second
        layer in a turn. GPTs that are not rematerialised took up to 16% longer than with a plain
        forward loop, those that keep products 9% with two backward layers a turn (v6e). A
        rematerialised layer's input, however long, does not count.
        """
        inputs = {var.aval.shape for var in self.carried}
        values = self.activations if self.reduces else self.jaxpr.outvars[len(self.carried) :]
        stacked = (x for x in values if x.aval.shape not in inputs)
        return bytes_of(stacked) / parts > bytes_of(x.outvars[0] for x in self.gathers) > 0

    def _is_counter(self, var: Any) -> bool:
        """Whether a turn counts a carried value on: `out = add var 1`."""
        out = self.jaxpr.outvars[self.carried.index(var)]
        sums = (eqn for eqn in self.eqns if eqn.primitive.name in ("add", "sub"))
        return any(eqn.outvars[0] is out and _jaxpr.variables(eqn.invars) == [var] for eqn in sums)

    def _ends(self) -> list[Any]:
        products = [(eqn, work) for eqn in self.eqns if (work := _jaxpr.num_products(eqn))]
        done = [*itertools.accumulate(work for _, work in products)]
        moved = [*itertools.accumulate(eqn.outvars[0].aval.size for eqn in self.gathers)]
        most = COMPUTED * (done[-1] if done else 0)
        parts = (most * (1 if self.is_tpu else size / moved[-1]) for size in moved if done)
        return [products[bisect.bisect_left(done, part)][0] for part in parts]

    def counted(self, carry: Sequence[Any]) -> list[Any]:
        """Advance the loop's counters among the carried values; leave the others as they are."""
        pairs = zip(self.carried, self.jaxpr.outvars, strict=False)
        wanted = [out if var in self.counters else var for var, out in pairs]
        given = dict(zip(self.carried, carry, strict=True))
        return _jaxpr.run_equations(_needed(self.pure, wanted), given, wanted)

    def gather(self, given: Sequence[Any]) -> list[Any]:
        wanted = [eqn.outvars[0] for eqn in self.gathers]
        inputs = _jaxpr.inputs_of(self.program, given)
        return _jaxpr.run_equations(_needed(self.pure, wanted), inputs, wanted)

    def compute(
        self, given: Sequence[Any], gathered: Sequence[Any], following: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Compute a layer with its gathered weights; return also the next one's."""
        made = {eqn.outvars[0]: x for eqn, x in zip(self.gathers, gathered, strict=True)}
        rest = [eqn for eqn in self.eqns if made.keys().isdisjoint(eqn.outvars)]
        lag = MERGED * sum(map(_jaxpr.num_products, self.eqns)) if self.parts else 0
        reduced, done = list[tuple[float, Any]](), 0.0  # gradients, behind how much arithmetic

        def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
            nonlocal done
            ahead = [i for i, end in enumerate(self.ends) if end is eqn and following]
            waits = _jaxpr.num_products(eqn) if self.parts else len(self.ends) - 1 in ahead
            due = [x for at, x in reduced if waits and at + lag <= done]
            del reduced[: len(due)]
            if due or ahead:
                # Its smallest operand alone: what makes another may be merged with it.
                least = min(range(len(values)), key=lambda i: values[i].nbytes)
                given = values[least], [following[i] for i in ahead], due
                values[least], ended, _ = jax.lax.optimization_barrier(given)
                for i, x in zip(ahead, ended, strict=True):
                    following[i] = x
            done += _jaxpr.num_products(eqn)
            results = _jaxpr.bind(eqn, values)
            if is_named(eqn, REDUCED) and (not self.parts or self._is_small(eqn)):
                reduced.append((done, results[0]))
            return results

        wanted, inputs = self.jaxpr.outvars, _jaxpr.inputs_of(self.program, given) | made
        return _jaxpr.run_equations(_needed(rest, wanted), inputs, wanted, step), following

    def _is_small(self, eqn: Any) -> bool:
        """Whether a gradient takes, whole, at most half the room of what its product reads."""
        while eqn and not _jaxpr.num_products(eqn):
            at = self.places.get(next(iter(_jaxpr.variables(eqn.invars)), None))
            eqn = None if at is None else self.eqns[at]
        room = max(x.aval.size for x in eqn.invars) if eqn else 0
        return room > 0 and 2 * self.parts * eqn.outvars[0].aval.size <= room


def _needed(eqns: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    live, found = set(_jaxpr.variables(wanted)), []
    for eqn in reversed(eqns):
        if eqn.effects or not live.isdisjoint(eqn.outvars):
            found.append(eqn)
            live.update(_jaxpr.variables(eqn.invars))
    return found[::-1]
