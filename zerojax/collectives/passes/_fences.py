"""Fences: on CPUs the gradient of a residual stream is computed once, not anew for each layer.

XLA:CPU fuses a sum into each operation that reads it, however many they are. Of

    d2 = add_any d3 n3; w2 = dot_general d2 h2; d1 = add_any d2 n2; w1 = dot_general d1 h1; ...

`w1` adds up `d3 + n3 + n2` again, and the product of the first layer all that the layers behind it
added: a quarter of the step of a GPT with six layers in a list. An `optimization_barrier` is gone
before XLA:CPU fuses, and nothing is fused across a conditional:

    d2 = add_any d3 n3; d2 = cond[branches=(zeros, identity)] (step >= 0) d2

A loop carries its gradients from turn to turn, so that nothing is added up again there. Products of
bf16 get the form that CPUs multiply fast (`_products`), in loops too.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _jaxpr
from zerojax.collectives.forms import bind_narrow, is_narrow

#: Elements on a device from which a sum is worth a conditional.
LARGE = 2**14


def fenced(function: Callable[..., Any], platform: str, num_parts: int = 1) -> Callable[..., Any]:
    """Make a function that on CPUs computes a sum once for all readers, and bf16 products fast.

    It is `function(params, given, carried)`, the gradient of a loss; `given["step"]` counts steps
    from 0, which XLA doesn't know. `num_parts` of the examples lie on a device each.
    """
    if platform != "cpu":
        return function

    def wrapped(params: Any, given: dict[str, Any], carried: Any) -> Any:
        traced, out = jax.make_jaxpr(function, return_shape=True)(params, given, carried)
        leaves = jax.tree.leaves((params, given, carried))
        sums = _shared(traced, LARGE * num_parts)
        shared = set(sums) if len(sums) > 1 else set()

        def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
            if eqn.primitive.name == _jaxpr.REMATERIALISED:  # as jax does it
                return _jaxpr.run(_jaxpr.called(eqn), jax.lax.optimization_barrier(values), step)
            if _jaxpr.runs_in_place(eqn):
                return _jaxpr.run(_jaxpr.called(eqn), values, step)
            if is_narrow(eqn):
                return bind_narrow(eqn, values)
            is_loop = eqn.primitive.name in ("scan", "cond") and not eqn.effects
            if is_loop and any(map(is_narrow, _jaxpr.with_inner(eqn))):
                return _jaxpr.run_bodies(eqn, values, functools.partial(_jaxpr.run, step=step))
            results = _jaxpr.bind(eqn, values)
            if shared.isdisjoint(eqn.outvars):
                return results
            return [jax.lax.cond(given["step"] >= 0, lambda x: x, jnp.zeros_like, *results)]

        return jax.tree.unflatten(jax.tree.structure(out), _jaxpr.run(traced, leaves, step))

    return wrapped


def _shared(program: Any, size: int) -> list[Any]:
    """Return the sums of at least `size` elements that are read more than once, in calls too.

    Layers that are calls of one program have one variable, which is here once for each of them.
    """
    jaxpr, _ = _jaxpr.opened(program)
    reads = collections.Counter(_jaxpr.variables([x for eqn in jaxpr.eqns for x in eqn.invars]))
    reads.update(2 * _jaxpr.variables(jaxpr.outvars))  # nobody knows how often a call's are read
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == _jaxpr.REMATERIALISED or _jaxpr.runs_in_place(eqn):
            found += _shared(_jaxpr.called(eqn), size)
        elif eqn.primitive.name == "add_any" and eqn.outvars[0].aval.size >= size:
            found += [var for var in eqn.outvars if reads[var] > 1]
    return found
