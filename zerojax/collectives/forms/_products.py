"""Products of bf16 with an fp32 result, in an order of dims that XLA:CPU multiplies as they are.

XLA:CPU widens what a bf16 product reads to fp32, and keeps wide weights for the backward pass. With
an fp32 result a library multiplies bf16, if the left operand ends with what is summed over and both
lie row by row. Of the gradients of attention's values, from the smaller operand,

    v[b, h, k, d] = sum over q of p[b, h, q, k] y[b, h, q, d]

    yt = BARRIER (transpose y); v = transpose (BARRIER (dot yt p))      yt: [b, h, d, q]

Unless held, XLA takes transposes into the product, and widens it or comes upon an order that it
can't run: "Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32" (jaxlib 0.10).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

Labels = Sequence[int]


def labels_of(eqn: Any) -> tuple[Labels, Labels, Labels]:
    """Label the dims of a product's operands and result: of [8, 4] x [4, 6] they are 01, 13, 03."""
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    left, right = (atom.aval.ndim for atom in eqn.invars)
    lhs, rhs = [*range(left)], [*range(left, left + right)]
    for a, b in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch), strict=True):
        rhs[b] = a
    return lhs, rhs, [*lhs_batch, *(x for x in (*lhs, *rhs) if (x in lhs) != (x in rhs))]


def product(left: Any, right: Any, labels: Any, dtype: Any, is_cpu: bool, **how: Any) -> jax.Array:
    """Multiply as `einsum` does, with a result of `dtype`; on CPUs in an order that they have."""
    lhs, rhs, out = labels
    summed = [x for x in lhs if x in rhs and x not in out]

    def hold(x: jax.Array) -> jax.Array:  # one more dim, or the layout is a transpose's
        return jax.lax.optimization_barrier(x[None]).squeeze(0) if is_cpu else x

    if is_cpu:
        size = dict(zip((*lhs, *rhs), (*left.shape, *right.shape), strict=True))
        costs = [
            0 if {*of[len(of) - len(summed) :]} == {*summed} else math.prod(size[x] for x in of)
            for of in (lhs, rhs)
        ]
        if costs[1] + math.prod(size[x] for x in out) < costs[0]:  # the result is transposed then
            left, lhs, right, rhs = right, rhs, left, lhs
        order = sorted(range(len(lhs)), key=lambda i: lhs[i] in summed)
        left, lhs = left.transpose(order), [lhs[i] for i in order]
    batch = [x for x in out if x in lhs and x in rhs]
    dims: Any = [[[of.index(x) for x in xs] for of in (lhs, rhs)] for xs in (summed, batch)]
    made = [*batch, *(x for x in (*lhs, *rhs) if x in out and x not in batch)]
    result = jax.lax.dot_general(hold(left), hold(right), dims, preferred_element_type=dtype, **how)
    return hold(result).transpose([made.index(x) for x in out])


def is_narrow(eqn: Any) -> bool:
    """Whether an equation is a product of bf16 with the default precision and placement."""
    if eqn.primitive.name != "dot_general" or eqn.params["precision"] is not None:
        return False
    placed = getattr(eqn.params["out_sharding"], "spec", ())  # over Auto axes it says nothing
    dtypes = [atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)]
    return not any(placed) and dtypes[:2] == [jnp.bfloat16] * 2 and dtypes[2].itemsize <= 4


def bind_narrow(eqn: Any, values: Sequence[jax.Array]) -> list[jax.Array]:
    """Run a product of bf16 in fp32, and round it as the trace has it."""
    with eqn.ctx.manager:
        wide = product(values[0], values[1], labels_of(eqn), jnp.float32, is_cpu=True)
    return [wide.astype(eqn.outvars[0].aval.dtype)]
