"""The proof of `zerojax doctor`: a step that is taken, audited, saved and restored."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import zerojax
from zerojax.cli.doctor._findings import Bench, Finding
from zerojax.models import mlp

STAGE = 2
#: Examples on each device.
NUM_EXAMPLES = 8
WIDTH = 256


def check_step(bench: Bench) -> Finding:
    """Take a step of a small model at stage 2 in bf16."""
    config = mlp.Config(num_layers=3, width=WIDTH, input_size=WIDTH, output_size=WIDTH)
    init = functools.partial(mlp.init, config)
    step = make_step(bench.devices, init, functools.partial(mlp.loss, config))
    x = jax.random.normal(jax.random.key(1), (len(bench.devices) * NUM_EXAMPLES, WIDTH))
    state, batch = step.init(init, jax.random.key(0)), jax.device_put((x, x), step.layout.batch)
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    if not math.isfinite(loss):
        remedy = "try JAX_PLATFORMS=cpu; if it passes there, the accelerator or its driver is ill"
        return Finding("failed", f"the loss is {loss}", remedy)
    bench.step, bench.state, bench.compiled = step, state, compiled
    held = f"{step.layout.num_params:,} parameters over {len(bench.devices)} devices"
    return Finding("ok", f"{held}, loss {loss:.3f}")


def check_audit(bench: Bench) -> Finding:
    """Audit the compiled step."""
    report = zerojax.audit(bench.compiled, bench.step.layout, bench.step.recipe)
    if report.problems:
        first, *others = report.problems
        found = f"{first.kind}: {first.where}: {first.seen}; expected {first.expected}"
        found += f"; and {len(others)} more" if others else ""
        return Finding("failed", found, first.remedy)
    moved = f"{report.judged_volume:.3f} elements a parameter, theory {report.theory_volume:.3f}"
    return Finding("ok", f"states are partitioned; moves {moved}")


def check_checkpoint(bench: Bench) -> Finding:
    """Save the state, restore it and compare every bit."""
    layout = bench.step.layout
    with tempfile.TemporaryDirectory(prefix="zerojax-doctor-") as folder:
        path = Path(folder) / "checkpoint"
        zerojax.save(path, bench.state, layout)
        back = zerojax.restore(path, layout, bench.step.abstract_state())
    want, got = jax.tree.leaves_with_path(bench.state), jax.tree.leaves(back)
    for (name, a), b in zip(want, got, strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            found = f"{jax.tree_util.keystr(name)} came back otherwise than it was saved"
            return Finding("failed", found, "check the disk that TMPDIR is on")
    return Finding("ok", f"{len(got)} arrays saved and restored to the bit")


def make_step(devices: list[Any], init: Any, loss: Any) -> zerojax.TrainStep:
    """Make the proof's step over all devices."""
    mesh = zerojax.make_mesh({"data": len(devices)}, devices=devices)
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh, stage=STAGE)
    recipe = zerojax.Recipe(precision="bf16")
    return zerojax.make_train_step(loss, optax.adamw(1e-3), layout, recipe)
