"""Values are followed back to what they are made of, and what is planted runs in its place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from zerojax._jaxpr import num_products
from zerojax.collectives.passes._equations import Equations, Planted


def doubled_product(w, h):
    held, _ = jax.lax.optimization_barrier((2 * w, h))
    return h @ held.T


ARGS = jnp.arange(6.0).reshape(2, 3), jnp.ones((4, 3))


def test_a_path_goes_through_barriers_to_the_input():
    flat = Equations(jax.make_jaxpr(doubled_product)(*ARGS))
    (out,) = flat.jaxpr.outvars
    assert flat.path_to(out)[0] == [out]  # a product has two operands
    path, ((first, *steps), barriers) = flat.path_to(flat.maker(out, num_products).invars[1])
    assert path[-1] is first is flat.jaxpr.invars[0]
    assert [primitive.name for primitive, *_ in steps] == ["transpose", "mul"]
    assert [flat.eqns[at].primitive.name for at in barriers] == ["optimization_barrier"]


@pytest.mark.parametrize(
    "function",
    [
        lambda w: (0.5 * w, 2.0 * w),
        lambda w: (w - 1.0, 1.0 - w),
        lambda w: jnp.split(w, 3, axis=1)[:2],
        lambda w: tuple(jax.lax.dynamic_index_in_dim(w, i) for i in (0, 1)),
    ],
    ids=["numbers", "sides", "parts", "rows"],
)
def test_what_differs_in_a_number_or_a_part_has_another_key(function):
    flat = Equations(jax.make_jaxpr(function)(ARGS[0]))
    keys = {flat.path_to(out)[1] for out in flat.jaxpr.outvars}
    assert len(keys) == 2
    same = Equations(jax.make_jaxpr(lambda w: (function(w)[0], function(w)[0]))(ARGS[0]))
    assert len({same.path_to(out)[1] for out in same.jaxpr.outvars}) == 1


def test_what_is_planted_runs_in_the_place_of_an_equation():
    flat = Equations(jax.make_jaxpr(doubled_product)(*ARGS))
    product = flat.maker(flat.jaxpr.outvars[0], num_products)
    zeros = Planted(
        lambda values: [jnp.zeros((4, 2))], product.invars, product.outvars, product.source_info
    )
    (got,) = flat.run(ARGS, [zeros if eqn is product else eqn for eqn in flat.eqns])
    assert (got == 0).all()
    (got,) = flat.run(ARGS, flat.eqns)
    assert (got == doubled_product(*ARGS)).all()
