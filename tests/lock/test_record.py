"""What a lock file keeps of a step, and what it says of its theory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.audit import Program
from zerojax.lock import StepRecord, compare, read_lock, write_lock

LAYERS, WIDTH = 3, 64


def test_layers_are_one_line_and_the_theory_is_told_without_a_layout(mesh8, tmp_path):
    params = [{"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)} for _ in range(LAYERS)]

    def loss(params, x):
        for layer in params:
            x = jnp.tanh(x @ layer["w"])
        return jnp.mean(x**2)

    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=8)
    recipe = zerojax.Recipe(precision="bf16")
    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, recipe)
    batch = jax.ShapeDtypeStruct((16, WIDTH), jnp.float32)
    program = Program.of(step.lower(step.abstract_state(), batch).compile())
    record = StepRecord.of(program, list(mesh8.devices.flat), {})
    held = record.leaves["0/masters/*/w"]
    assert (held.count, held.dtype, held.bytes) == (LAYERS, "float32", 4 * LAYERS * WIDTH**2 // 8)
    assert record.leaves["0/opt_state/0/mu/*/w"].count == LAYERS
    assert f"{LAYERS * WIDTH**2:,} parameters, 0 of {LAYERS} leaves sharded" in record.theory
    assert "ZeRO moves 1.750 elements a parameter, this step 1.75" in record.theory
    write_lock(tmp_path / "zerojax.lock", {"train @ cpu:8": record})
    assert compare(read_lock(tmp_path / "zerojax.lock")["train @ cpu:8"], record) == ()


@pytest.mark.parametrize("parts", [1, 8])
def test_arguments_without_placements_are_read(parts, mesh8):
    """Only a constraint within the step names the mesh, or it runs on one device."""
    placed = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("data"))
    tx = optax.adam(1e-3)

    def step(w, state, x):
        x = jax.lax.with_sharding_constraint(x, placed) if parts > 1 else x
        updates, state = tx.update(jax.grad(lambda w: jnp.mean((x @ w["w"]) ** 2))(w), state, w)
        return optax.apply_updates(w, updates), state

    x = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    compiled = jax.jit(step).lower({"w": x}, jax.eval_shape(tx.init, {"w": x}), x).compile()
    record = StepRecord.of(compiled, mesh8.devices.flat[:parts])
    assert record.mesh == ({"device": 8} if parts > 1 else {})
    assert ("bytes over device" in record.totals) == (parts > 1)
    assert f"ZeRO moves {2 * (parts - 1) / parts:.3f}" in record.theory
