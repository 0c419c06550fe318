"""The proof of `zerojax doctor`: a step that is taken, audited, saved and restored."""

from __future__ import annotations

from typing import Any

from zerojax.cli.doctor._checks import Bench, Finding

STAGE = 2
#: Examples on each device.
NUM_EXAMPLES = 8
WIDTH = 256


def check_bf16(bench: Bench) -> Finding:
    """Multiply bf16 matrices on every device, whose product is known."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    devices = bench.devices
    layout = _layout(devices, {"x": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)})
    left = jnp.full((WIDTH, WIDTH), 0.5, jnp.bfloat16)
    right = jnp.ones((len(devices) * NUM_EXAMPLES, WIDTH), jnp.bfloat16)
    product = jax.jit(jnp.matmul)(jax.device_put(right, layout.batch), left)
    for shard in product.addressable_shards:
        if not np.all(np.asarray(shard.data, np.float32) == WIDTH / 2):
            found = f"a product of bf16 matrices is wrong on {shard.device}"
            return Finding(status="failed", found=found, remedy="train with --precision fp32")
    return Finding(status="ok", found="products of bf16 matrices are right on every device")


def check_step(bench: Bench) -> Finding:
    """Take a step of a small model at stage 2."""
    import math

    import jax

    import zerojax

    init, loss, tx, batch = _problem(bench.devices)
    params = _shapes(init)
    layout = _layout(bench.devices, params)
    step = zerojax.make_train_step(loss, tx, layout)
    state = step.init(init, _key())
    batch = jax.device_put(batch, layout.batch)
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    found = float(metrics["loss"])
    if not math.isfinite(found):
        remedy = "try JAX_PLATFORMS=cpu; if it passes there, the accelerator or its driver is ill"
        return Finding(status="failed", found=f"the loss is {found}", remedy=remedy)
    bench.layout, bench.state, bench.compiled = layout, state, compiled
    held = f"{layout.num_params:,} parameters over {len(bench.devices)} devices, loss {found:.3f}"
    return Finding(status="ok", found=held)


def check_audit(bench: Bench) -> Finding:
    """Audit the compiled step."""
    import zerojax

    report = zerojax.audit(bench.compiled, bench.layout)
    if report.problems:
        first, *others = report.problems
        found = f"{first.kind}: {first.where}: {first.seen}; expected {first.expected}"
        found += f"; and {len(others)} more" if others else ""
        return Finding(status="failed", found=found, remedy=first.remedy)
    moved = f"{report.judged_volume:.3f} elements a parameter, theory {report.theory_volume:.3f}"
    return Finding(status="ok", found=f"states are partitioned; moves {moved}")


def check_checkpoint(bench: Bench) -> Finding:
    """Save the state, restore it and compare every bit."""
    import tempfile
    from pathlib import Path

    import jax
    import numpy as np

    import zerojax

    _, loss, tx, _ = _problem(bench.devices)
    like = zerojax.make_train_step(loss, tx, bench.layout).abstract_state()
    with tempfile.TemporaryDirectory(prefix="zerojax-doctor-") as folder:
        path = Path(folder) / "checkpoint"
        zerojax.save(path, bench.state, bench.layout)
        back = zerojax.restore(path, bench.layout, like)
    want, got = jax.tree.leaves_with_path(bench.state), jax.tree.leaves(back)
    for (name, a), b in zip(want, got, strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            found = f"{jax.tree_util.keystr(name)} came back otherwise than it was saved"
            return Finding(status="failed", found=found, remedy="check the disk that TMPDIR is on")
    return Finding(status="ok", found=f"{len(got)} arrays saved and restored to the bit")


def _problem(devices: list[Any]) -> tuple[Any, Any, Any, Any]:
    """Give the proof's model, loss, optimizer and batch."""
    import functools

    import jax
    import optax

    from zerojax.models import mlp

    config = mlp.Config(num_layers=3, width=WIDTH, input_size=WIDTH, output_size=WIDTH)
    inputs = jax.random.normal(jax.random.key(1), (len(devices) * NUM_EXAMPLES, WIDTH))
    init, loss = functools.partial(mlp.init, config), functools.partial(mlp.loss, config)
    return init, loss, optax.adamw(1e-3), (inputs, inputs)


def _key() -> Any:
    import jax

    return jax.random.key(0)


def _shapes(init: Any) -> Any:
    import jax

    return jax.eval_shape(init, _key())


def _layout(devices: list[Any], params: Any) -> Any:
    import zerojax

    mesh = zerojax.make_mesh({"data": len(devices)}, devices=devices)
    return zerojax.make_layout(params, mesh, stage=STAGE)
