"""Operations on a weight whose gradient is born in the dtype in which devices are summed.

A bf16 product has a bf16 gradient: rounded before it is summed. Here the weight comes in the wide
dtype, and the gradient is accumulated and returned in it; the product itself stays narrow.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import bind


def bind_wide(eqn: Any, operands: Sequence[Any], wide: Any, *, num_weights: int) -> list[Any]:
    """Run an equation that was traced in a narrow dtype.

    Args:
        eqn: the equation; it holds no program of its own.
        operands: its inputs, weights in the wide dtype.
        wide: the dtype of the weights' gradients.
        num_weights: how many of the inputs are weights.
    """
    if eqn.primitive.name == "dot_general" and num_weights == 1:
        return [_wide_dot(eqn, operands)]
    upcast = [
        x.astype(wide) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x for x in operands
    ]
    narrow = [var.aval.dtype for var in eqn.outvars]
    return [x.astype(t) for x, t in zip(bind(eqn, upcast), narrow, strict=True)]


def _wide_dot(eqn: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """Multiply by a weight whose gradient is accumulated and returned in the weight's dtype.

    The weight comes in a wide dtype and is multiplied in the narrow one that the equation was
    traced with.
    """
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    left, right = operands
    types = tuple(atom.aval.dtype for atom in eqn.invars)
    letters = iter(string.ascii_letters)
    lhs = [next(letters) for _ in range(left.ndim)]
    rhs = [""] * right.ndim
    for a, b in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[b] = lhs[a]
    rhs = [letter or next(letters) for letter in rhs]
    out = [lhs[d] for d in lhs_batch]
    out += [lhs[d] for d in range(left.ndim) if d not in (*lhs_sum, *lhs_batch)]
    out += [rhs[d] for d in range(right.ndim) if d not in (*rhs_sum, *rhs_batch)]
    to_left = f"{''.join(out)},{''.join(rhs)}->{''.join(lhs)}"
    to_right = f"{''.join(lhs)},{''.join(out)}->{''.join(rhs)}"
    einsum = functools.partial(jnp.einsum, precision=eqn.params["precision"])

    @jax.custom_vjp
    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return bind(eqn, [left.astype(types[0]), right.astype(types[1])])[0]

    def forward(left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
        return dot(left, right), (left.astype(types[0]), right.astype(types[1]))

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = (operands[0].dtype, operands[1].dtype)
        return (
            einsum(to_left, cotangent, kept[1], preferred_element_type=wide[0]),
            einsum(to_right, kept[0], cotangent, preferred_element_type=wide[1]),
        )

    dot.defvjp(forward, backward)
    return dot(left, right)
