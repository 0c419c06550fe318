"""The guard of a loss scale: what a step with gradients that are not finite leaves as it was.

Chosen among whole results, a new moment would be needed beside the old one until the choice: a copy
of the state on backends that don't compute both and the parameter in one kernel (a CPU: ten percent
of a step's temporaries at stage 2). So the choice is made where a new leaf is computed, and what
the optimizer computes from it reads the chosen one, which lies in the old one's place already.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from zerojax._jaxpr import bind, opened
from zerojax._types import PyTree


def kept_unless(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Give the new leaves where the gradients are finite, else the old ones as they were."""
    return jax.tree.map(lambda x, was: jnp.where(finite, x, was), new, old)


def guarded(
    tx: optax.GradientTransformationExtraArgs, finite: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that its state stays what it was unless the gradients are finite.

    Its updates are then of no use: NaN, or computed from the old state.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
    ) -> tuple[PyTree, PyTree]:
        args = (updates, state, params, extra)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), args)
        closed, out = jax.make_jaxpr(lambda g, s, p, e: tx.update(g, s, p, **e), return_shape=True)(
            *shapes
        )
        (jaxpr, consts), structure = opened(closed), jax.tree.structure(out)
        _, places = structure.unflatten(range(len(jaxpr.outvars)))
        if jax.tree.structure(places) != jax.tree.structure(state):
            return tx.update(updates, state, params, **extra)  # whoever stores it refuses it
        pairs = list(zip(jax.tree.leaves(places), jax.tree.leaves(state), strict=True))
        env = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *jax.tree.leaves(args)], strict=True)
        )
        chosen: dict[Any, int] = {}
        for place, was in pairs:
            var = jaxpr.outvars[place]
            if isinstance(var, core.Literal) or var in env or var.aval.dtype != was.dtype:
                continue
            chosen.setdefault(var, place)
        olds = dict(pairs)

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            for var, x in zip(eqn.outvars, bind(eqn, [read(x) for x in eqn.invars]), strict=True):
                env[var] = jnp.where(finite, x, olds[chosen[var]]) if var in chosen else x
        results = [read(x) for x in jaxpr.outvars]
        for place, was in pairs:
            var = jaxpr.outvars[place]
            if isinstance(var, core.Literal) or chosen.get(var) != place:
                results[place] = jnp.where(finite, results[place], was)
        return structure.unflatten(results)

    return optax.GradientTransformationExtraArgs(tx.init, update)
