"""What the re-traced loss knows JAX's operations by: a new JAX that renames one fails here.

Renamed silently, a weight would be gathered and kept where it used to stay on its shards.
"""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas
from jax.extend import core

from zerojax._jaxpr import LOOPS, PLAIN_CALLS, REMATERIALISED, is_elementwise, runs_in_place
from zerojax._primitives import LISTS, primitives

SIZE = 8


@jax.custom_vjp
def doubled(w):
    return 2 * w


doubled.defvjp(lambda w: (doubled(w), None), lambda _, g: (2 * g,))


def constrained(w):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    spec = jax.sharding.PartitionSpec("x")
    return lax.with_sharding_constraint(w, jax.sharding.NamedSharding(mesh, spec))


def of_index(w, take):
    return lax.fori_loop(0, 2, lambda i, x: x + take(w, i), jnp.zeros(SIZE))


#: A program of a weight [8, 8] per operation, and the parameters that are read of it.
OPERATIONS = {
    "argmax": (lambda w: lax.argmax(w, 0, jnp.int32), "axes"),
    "argmin": (lambda w: lax.argmin(w, 0, jnp.int32), "axes"),
    "broadcast_in_dim": (lambda w: w[None], "broadcast_dimensions"),
    "concatenate": (lambda w: jnp.concatenate([w, w]), ""),
    "cond": (lambda w: lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, w), "branches"),
    "convert_element_type": (lambda w: w.astype(jnp.bfloat16), "new_dtype"),
    "copy": (lambda w: jnp.array(w, copy=True), ""),
    "custom_jvp_call": (jax.nn.relu, "call_jaxpr"),
    "custom_vjp_call": (doubled, "call_jaxpr"),
    "dot_general": (lambda w: w @ w, "dimension_numbers precision"),
    "dynamic_slice": (lambda w: of_index(w, lambda w, i: w[i]), ""),
    "gather": (lambda w: of_index(w, lambda w, i: jnp.take(w, i, axis=0)),
               "dimension_numbers slice_sizes"),
    "jit": (jax.jit(jnp.sin), "jaxpr in_shardings out_shardings"),
    "name": (lambda w: checkpoint_name(w, "w"), "name"),
    "optimization_barrier": (lax.optimization_barrier, ""),
    "pad": (lambda w: jnp.pad(w, 1), ""),
    "reduce_max": (lambda w: w.max(0), "axes"),
    "reduce_min": (lambda w: w.min(0), "axes"),
    "reduce_prod": (lambda w: w.prod(0), "axes"),
    "reduce_sum": (lambda w: w.sum(0), "axes"),
    "remat2": (jax.checkpoint(jnp.sin), "jaxpr policy prevent_cse"),
    "reshape": (lambda w: w.reshape(-1), "dimensions"),
    "rev": (lambda w: w[::-1], "dimensions"),
    "scan": (lambda w: lax.scan(lambda x, w: (x + w, None), w[0], w)[0],
             "jaxpr length reverse unroll"),
    "sharding_constraint": (constrained, ""),
    "slice": (lambda w: w[1:3], ""),
    "split": (lambda w: jnp.split(w, 2)[0], ""),
    "squeeze": (lambda w: w[:1].squeeze(0), "dimensions"),
    "stack": (lambda w: jnp.stack([w, w]), "axis"),
    "stop_gradient": (lax.stop_gradient, ""),
    "tile": (lambda w: jnp.tile(w, (2, 1)), "reps"),
    "transpose": (jnp.transpose, "permutation"),
    "while": (lambda w: lax.while_loop(lambda w: w[0, 0] < 1, lambda w: w + 1, w), "body_jaxpr"),
}  # fmt: skip


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def traced(function):
    return [*equations(jax.make_jaxpr(function)(jnp.ones((SIZE, SIZE))).jaxpr)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_name_and_the_parameters_that_are_read(name):
    function, keys = OPERATIONS[name]
    found = [eqn for eqn in traced(function) if eqn.primitive.name == name]
    assert found, f"it is called {[eqn.primitive.name for eqn in traced(function)]} now"
    assert set(keys.split()) <= set(found[0].params)


def test_every_name_that_is_known_is_looked_at():
    known = {
        *primitives("moves", "joins", "reductions", "from_gathered"),
        *PLAIN_CALLS, *LOOPS, REMATERIALISED,
    }  # fmt: skip
    assert known - set(OPERATIONS) == {"closed_call", "eval_jaxpr"}
    assert core.primitives.closed_call_p.name in known


@pytest.mark.parametrize("trait", LISTS)
def test_every_listed_name_is_a_primitive_of_jax(trait):
    """Or of one of the two that are run: a `closed_call` is jax 0.10's, an `eval_jaxpr` 0.12's."""
    there = {x.name for x in gc.get_objects() if isinstance(x, core.Primitive)}
    there |= {"closed_call", "eval_jaxpr", pallas.pallas_call.__name__}
    listed = {*LISTS[trait]} if isinstance(LISTS[trait], dict) else primitives(trait)
    assert listed <= there


def test_a_plain_jit_says_nothing_of_placement():
    (plain,) = (e for e in traced(jax.jit(jnp.sin)) if e.primitive.name == "jit")
    assert runs_in_place(plain)
    single = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (placed,) = (e for e in traced(jax.jit(jnp.sin, in_shardings=single)) if "jaxpr" in e.params)
    assert not runs_in_place(placed)


ELEMENTWISE = [
    jnp.sinh, jnp.exp2, lax.erf, lax.digamma, lax.bessel_i0e, jnp.isfinite, lax.round, lax.sign,
    lambda w: lax.clamp(-1.0, w, 1.0), lambda w: w > 0.5, lambda w: w**2.5, lax.stop_gradient,
    lambda w: lax.reduce_precision(w, 5, 5), lambda w: w / w[:1], jax.nn.softplus,
]  # fmt: skip
MIXING = [
    lambda w: lax.cumsum(w, 0), lambda w: lax.cumlogsumexp(w, 1), lambda w: w.T, lambda w: w[::-1],
    lambda w: lax.sort(w, dimension=0), lambda w: lax.top_k(w, SIZE), lambda w: w @ w, constrained,
    doubled, lambda w: w.reshape(-1).reshape(SIZE, SIZE),
    lambda w: lax.reduce_window(w, 0.0, lax.add, (2, 2), (1, 1), "SAME"),
    lambda w: lax.dynamic_update_slice(w, w, (0, 0)), lambda w: w.at[0].set(1.0),
]  # fmt: skip


def last(function):
    return jax.make_jaxpr(function)(jnp.ones((SIZE, SIZE))).jaxpr.eqns[-1]


def test_elementwise_is_what_works_on_scalars():
    assert all(map(is_elementwise, map(last, ELEMENTWISE)))
    assert [e for e in map(last, MIXING) if is_elementwise(e)] == []
