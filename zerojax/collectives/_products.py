"""Products of bf16 with an fp32 result, in orders of dims that XLA:CPU multiplies as they are.

XLA:CPU widens what a bf16 product reads to fp32, and keeps wide weights for the backward pass. With
an fp32 result a library multiplies bf16. It lacks some orders, as `dot(x[t, d], y[t, h, k])` over
`t`, which fails: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32" (jaxlib 0.10).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import bind

Labels = Sequence[int]


def labels_of(eqn: Any) -> tuple[Labels, Labels, Labels]:
    """Label the dims of a product's operands and result: of [8, 4] x [4, 6] they are 01, 13, 03."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    left, right = (atom.aval.ndim for atom in eqn.invars)
    lhs, rhs = [*range(left)], [*range(left, left + right)]
    for a, b in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[b] = a
    return lhs, rhs, [*lhs_batch, *(x for x in (*lhs, *rhs) if (x in lhs) != (x in rhs))]


def is_taken(lhs: Labels, rhs: Labels, out: Labels) -> bool:
    """Whether the library has this order, whichever sizes are 1.

    The left operand ends with what is summed over, or both begin with it, behind what both have in
    common with the result, and the right one has at most one dim more.
    """
    batch, summed = [x for x in out if x in lhs and x in rhs], {*lhs} & {*rhs} - {*out}
    first = len(batch) + len(summed)
    is_first = [*lhs[:first]] == [*rhs[:first]] and [*lhs[: len(batch)]] == batch
    is_last = bool(summed) and {*lhs[len(lhs) - len(summed) :]} == summed
    return is_last or (is_first and len(rhs) <= first + 1)


def product(
    left: Any, lhs: Labels, right: Any, rhs: Labels, out: Labels, dtype: Any, hold: Any, **how: Any
) -> jax.Array:
    """Multiply as `einsum` does, with a wider result; `hold` keeps XLA from changing the order."""
    if not is_taken(lhs, rhs, out) and is_taken(rhs, lhs, out):
        left, lhs, right, rhs = right, rhs, left, lhs
    elif not is_taken(lhs, rhs, out):
        left, right = (x.astype(jnp.promote_types(x.dtype, dtype)) for x in (left, right))
    batch = [x for x in out if x in lhs and x in rhs]
    summed = [x for x in lhs if x in rhs and x not in out]
    dims: Any = [[[of.index(x) for x in xs] for of in (lhs, rhs)] for xs in (summed, batch)]
    made = [*batch, *(x for x in (*lhs, *rhs) if x in out and x not in batch)]
    left, right = hold((left, right))
    result = hold(jax.lax.dot_general(left, right, dims, preferred_element_type=dtype, **how))
    return result.transpose([made.index(x) for x in out])


def is_narrow(eqn: Any) -> bool:
    """Whether an equation is a product of bf16, of which nobody says how it is computed."""
    if eqn.primitive.name != "dot_general" or eqn.params["precision"] is not None:
        return False
    placed = getattr(eqn.params["out_sharding"], "spec", ())  # over Auto axes it says nothing
    return not any(placed) and all(atom.aval.dtype == jnp.bfloat16 for atom in eqn.invars)


def bind_narrow(eqn: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a product of bf16 in fp32, where XLA:CPU can, and round it as the trace has it."""
    (left, right), (lhs, rhs, out) = values, labels_of(eqn)
    dtype = eqn.outvars[0].aval.dtype
    is_there = is_taken(lhs, rhs, out) or is_taken(rhs, lhs, out)
    if dtype != jnp.float32 and not (is_there and dtype == jnp.bfloat16):
        return bind(eqn, values)
    with eqn.ctx.manager:  # unless held, XLA takes transposes into it, and comes upon what it lacks
        wide = product(left, lhs, right, rhs, out, jnp.float32, jax.lax.optimization_barrier)
    return [wide.astype(dtype)]
