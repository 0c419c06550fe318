"""What a lock file keeps of a step, and what it says of its theory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

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
