"""What a loop or a rule of the user's keeps for its backward pass, and what that makes again.

Of `q = jnp.round(w / s); return x @ (q * s), (x, q, s)`, where `w` is gathered at stage 3, `q` is
as large as the weight. The backward pass gathers `w` for it again, and is handed `x` and `s`. A
policy of `jax.checkpoint` can't say so, and jax asks it for each operation within loops: of what a
fused cross-entropy carries, a whole gradient, it would stack one for each chunk.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.tree_util import Partial

from zerojax import _jaxpr
from zerojax._traced import sliced
from zerojax.collectives.gathers._boxed import Boxed, Opening, makes_gathered
from zerojax.collectives.gathers._copies import Copied


def keep_no_weights(
    function: Callable[..., Any], opening: Opening, *, looped: bool
) -> Callable[..., Any]:
    """Let a function keep all that it would, but for what it has of weights (boxes) alone.

    Its backward pass runs for a zero cotangent too, of which flax's fp8 scales are results. What is
    not differentiated stays so: jax refuses it of what a rule of the user's own closes over.
    """

    def forward(*values: Any) -> tuple[Any, Any]:
        def used(*own: Any) -> Any:
            stop = jax.lax.stop_gradient
            return function(*jax.tree.map(lambda x, v: v if x.perturbed else stop(v), values, own))

        return _vjp(used, jax.tree.map(lambda x: x.value, values), opening, looped)

    def backward(pull: Any, grads: Any) -> Any:
        return pull(jax.tree.map(_filled, grads))

    own = jax.custom_vjp(function)
    own.defvjp(forward, backward, symbolic_zeros=True)
    return own


def _vjp(function: Callable[..., Any], args: Any, opening: Opening, looped: bool) -> Any:
    """Do as `jax.vjp`; the second result makes again what is of weights, and not small."""
    traced, out = jax.make_jaxpr(functools.partial(jax.vjp, function), return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    traced = jax.make_jaxpr(lambda *leaves: _jaxpr.run(traced, leaves, _inline))(*leaves)
    jaxpr, count = traced.jaxpr, len(jax.tree.leaves(out[0]))
    flags = [isinstance(x, Boxed | Copied) for x in args for _ in jax.tree.leaves(x)]
    weights = {var for var, is_weight in zip(jaxpr.invars, flags, strict=True) if is_weight}
    others = _jaxpr.depending(jaxpr.eqns, {*jaxpr.invars} - weights)
    kept = jaxpr.outvars[count:]
    own = {x for x in _jaxpr.variables(kept) if weights and x not in others}
    least = opening.layout.min_size  # what is smaller lies whole anyway
    again = [_jaxpr.is_variable(x) and x in own and x.aval.size >= least for x in kept]
    gathers = (eqn for eqn in jaxpr.eqns if makes_gathered(eqn.primitive.name, eqn.params))
    stops = {var for eqn in gathers for var in eqn.outvars} if opening.keeps else set[Any]()
    remade = [x for x, is_remade in zip(kept, again, strict=True) if is_remade]
    part = sliced(jaxpr.eqns, remade, stops.__contains__)
    wanted = [*jaxpr.outvars, *part.inputs]
    found = _jaxpr.run_equations(jaxpr.eqns, _jaxpr.inputs_of(traced, leaves), wanted)
    held = [x for x, is_remade in zip(found[count:], again, strict=False) if not is_remade]

    def pull(held: list[Any], given: list[Any], grads: Any) -> Any:
        if not looped:  # else compilers keep what was gathered, or gather it at once
            arrays = [x for x in jax.tree.leaves(grads) if x.dtype != jax.dtypes.float0]
            given, _ = jax.lax.optimization_barrier((given, arrays))
        ways = iter(held), iter(part.run(given))
        both = [next(ways[is_remade]) for is_remade in again]
        return jax.tree.structure(out[1]).unflatten(both)(grads)

    value = jax.tree.structure(out[0]).unflatten(found[:count])
    return value, Partial(pull, held, found[len(jaxpr.outvars) :])


def _inline(eqn: Any, values: list[Any]) -> list[Any]:
    """Run what a plain call holds, so that what it makes of weights alone is told from the rest."""
    if not _jaxpr.runs_in_place(eqn):
        return _jaxpr.bind(eqn, values)
    return _jaxpr.run(_jaxpr.called(eqn), values, _inline)


def _filled(grad: Any) -> Any:
    if not isinstance(grad, SymbolicZero):
        return grad
    aval: Any = grad.aval
    zeros = np.zeros if aval.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(aval.shape, aval.dtype)
