"""`zerojax check` for a GPU node that you don't have: it locks what blocks and is exposed too."""

from __future__ import annotations

import pytest

from zerojax.cli import main
from zerojax.lock import read_lock

STEPS = """
import jax, jax.numpy as jnp, numpy as np, optax, zerojax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

WIDTH = 512
TX = optax.adam(1e-3)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


@zerojax.checked("h100:1x8")
def train(devices):
    mesh = Mesh(np.array(devices), ("data",))

    def place(tree):
        spec = lambda x: P("data") if x.ndim else P()
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x))), tree)

    def step(params, opt_state, x):
        grads = jax.grad(loss_fn)(params, x)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    state = place((params, jax.eval_shape(TX.init, params)))
    out = jax.tree.map(lambda x: x.sharding, state)
    x = place(jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32))
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(*state, x)
"""


@pytest.mark.aot("cuda")
def test_a_plain_step_is_checked_for_a_node_that_is_not_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "steps.py"
    path.write_text(STEPS)
    assert main(["check", str(path), "--accept"]) == 0
    record = read_lock(tmp_path / "zerojax.lock")["train @ h100:1x8"]
    size = 2 * 512 * 1024
    assert record.leaves["0/up"].bytes == 4 * size // 2 // 8
    # Placement alone: both weights are gathered, or activations in their place; 7/8 of each.
    assert record.totals["bytes over data"] >= 7 / 8 * 4 * size
    assert 0 <= record.totals["blocking bytes"] <= record.totals["bytes over data"]
    assert 0 <= record.totals["exposed share"] < 1
    assert f"{size:,} parameters, 2 of 2 leaves sharded" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    path.write_text(STEPS.replace("ndim else P()", "ndim and x.shape[0] > 512 else P()"))
    assert main(["check", str(path)]) == 1
    assert "argument: 0/up: expected spec P('data',)" in capsys.readouterr().out
