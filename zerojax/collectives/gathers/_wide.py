"""Operations on a weight whose gradient is born in the dtype in which devices are summed.

A bf16 product has a bf16 gradient: rounded before it is summed. Here the weight comes in the wide
dtype, and the gradient is accumulated and returned in it; the product itself stays narrow. Values
are rounded as the program has it, and only values:

    w:f32, holding what bf16 holds       (1 + w) in f32, its value rounded to bf16; the gradient not
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import bind, has_inside
from zerojax.collectives.forms import labels_of, product
from zerojax.layout import Layout


def bind_wide(eqn: Any, operands: Sequence[Any], layout: Layout) -> list[Any]:
    """Run an equation on operands of which some are wider than it was traced with.

    Results are in the traced dtypes or in the wide one; their values are the traced ones.
    """
    traced = [atom.aval.dtype for atom in eqn.invars]
    wide = [x.dtype for x, t in zip(operands, traced, strict=True) if jnp.result_type(x) != t]
    if not wide:
        return bind(eqn, operands)
    if eqn.primitive.name == "dot_general":
        return [_wide_dot(eqn, operands, layout.platform == "cpu")]
    if eqn.primitive.name == "convert_element_type" and _is_float(eqn.params["new_dtype"]):
        return [_rounded(operands[0], eqn.params["new_dtype"])]
    upcast = [x.astype(wide[0]) if _is_float(jnp.result_type(x)) else x for x in operands]
    narrow = [jax.lax.convert_element_type(x, t) for x, t in zip(operands, traced, strict=True)]
    if not _means_the_same(eqn, upcast, narrow):
        return bind(eqn, narrow)
    out = zip(bind(eqn, upcast), eqn.outvars, strict=True)
    return [x if x.dtype == var.aval.dtype else _rounded(x, var.aval.dtype) for x, var in out]


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def _means_the_same(eqn: Any, upcast: Sequence[Any], narrow: Sequence[Any]) -> bool:
    """Whether an equation takes wide operands, and returns what it returned but for the width.

    `bitcast_convert_type` of bf16 to uint16 doesn't: of fp32 it makes two numbers of each.
    """
    if has_inside(eqn):
        return False
    try:
        results = jax.eval_shape(lambda *xs: bind(eqn, xs), *upcast)
    except (TypeError, ValueError):
        return False
    return all(
        x.shape == y.shape and _is_float(x.dtype) == _is_float(y.dtype)
        for x, y in zip(results, jax.eval_shape(lambda *xs: bind(eqn, xs), *narrow), strict=True)
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Round values as a cast to `dtype` does; the gradient is not rounded.

    What `dtype` holds with more digits comes in `dtype`.
    """
    return x.astype(dtype).astype(jnp.promote_types(x.dtype, dtype))


@_rounded.defjvp
def _rounded_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    out = _rounded(primals[0], dtype)
    return out, tangents[0].astype(out.dtype)


def _wide_dot(eqn: Any, operands: Sequence[jax.Array], is_cpu: bool) -> jax.Array:
    """Multiply by a weight whose gradient is accumulated and returned in the weight's dtype.

    The weight comes in a wide dtype and is multiplied in the narrow one of the trace.
    """
    types = tuple(atom.aval.dtype for atom in eqn.invars)
    lhs, rhs, out = labels_of(eqn)
    multiplied = functools.partial(product, is_cpu=is_cpu, precision=eqn.params["precision"])

    @jax.custom_vjp
    def dot(left: jax.Array, right: jax.Array) -> jax.Array:
        return bind(eqn, [left.astype(types[0]), right.astype(types[1])])[0]

    def forward(left: jax.Array, right: jax.Array) -> tuple[jax.Array, Any]:
        return dot(left, right), (left.astype(types[0]), right.astype(types[1]))

    def backward(kept: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = (operands[0].dtype, operands[1].dtype)
        return (
            multiplied(cotangent, kept[1], (out, rhs, lhs), wide[0]),
            multiplied(kept[0], cotangent, (lhs, out, rhs), wide[1]),
        )

    dot.defvjp(forward, backward)
    return dot(*operands)
