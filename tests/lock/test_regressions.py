"""Regressions that projects met: each is told from the accepted step, with the right leaf."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.audit import Program
from zerojax.lock import StepRecord, compare

CUT = P("data")
PARAMS = {
    "up": jax.ShapeDtypeStruct((64, 256), jnp.float32),
    "down": jax.ShapeDtypeStruct((256, 64), jnp.float32),
}
MICROBATCHES = 4
TX = optax.adam(1e-3)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)


def lower(
    mesh,
    *,
    states=CUT,
    master=jnp.float32,
    each=False,
    batch=CUT,
    extra=False,
    first=None,
):
    """Lower a step of stage 1 as people write it by hand; each argument plants a fault."""
    place = jax.lax.with_sharding_constraint
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, CUT)

    def gradients(params, batch):
        if not each:
            return jax.grad(loss_fn)(params, batch)
        found = []
        for part in batch.reshape(MICROBATCHES, -1, batch.shape[-1]):
            grads = place(jax.grad(loss_fn)(params, place(part, rows)), whole)
            found.append(jax.lax.optimization_barrier(grads))
        return jax.tree.map(lambda *grads: sum(grads) / MICROBATCHES, *found)

    def step(state, batch):
        masters, opt_state = state
        params = place(masters, whole)
        if extra:
            params = params | {"up": params["up"] + 0 * jnp.mean(place(batch, whole))}
        updates, opt_state = TX.update(gradients(params, batch), opt_state, masters)
        return optax.apply_updates(masters, updates), opt_state

    def placed(state, spec):
        return jax.tree.map(lambda x: NamedSharding(mesh, spec if x.ndim else P()), state)

    masters = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, master), PARAMS)
    state = (masters, jax.eval_shape(TX.init, masters))
    return jax.jit(
        step,
        in_shardings=(
            placed(state, states if first is None else first),
            NamedSharding(mesh, batch),
        ),
        out_shardings=placed(state, states),
        donate_argnums=0,
    ).lower(state, jax.ShapeDtypeStruct((64, 64), jnp.float32))


@functools.cache
def record(mesh, **fault):
    program = Program.of(lower(mesh, **fault).compile())
    return StepRecord.of(program, list(mesh.devices.flat), {"jax": jax.__version__})


#: Faults, the kind of the difference, and what it has to name.
REGRESSIONS = {
    "an optimizer left replicated by a flag that did nothing": (
        {"states": P()}, "argument", "0/1/0/mu/up", "P('data',)", "P()",
    ),
    "gradients reduced once per microbatch": (
        {"each": True}, "collective", "f32[64,256]", "1 a step", f"{MICROBATCHES} a step",
    ),
    "a batch that lost its axis": (
        {"batch": P()}, "argument", "1", "bytes 2,048", "bytes 16,384",
    ),
    "gathers that a compiler added": (
        {"extra": True}, "collective", "f32[64,64] over data of 1", "none", "1 a step",
    ),
    "a second executable, as the first state was placed otherwise": (
        {"first": P()}, "recompiled", "0/0/down", "as it is taken", "compiles anew",
    ),
    "masters in bf16": (
        {"master": jnp.bfloat16}, "argument", "0/0/up", "float32", "bfloat16",
    ),
}  # fmt: skip


def test_the_accepted_step_is_as_its_record_says(mesh8):
    assert compare(record(mesh8), record(mesh8)) == ()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@pytest.mark.parametrize("name", REGRESSIONS)
def test_each_regression_is_told_with_its_leaf(name, mesh8):
    fault, kind, where, expected, seen = REGRESSIONS[name]
    found = compare(record(mesh8), record(mesh8, **fault))
    told = [x for x in found if x.kind == kind and where in x.where]
    assert any(expected in x.expected and seen in x.seen for x in told), "\n".join(map(str, found))
