"""The programs of examples/ under every stage: plain optax's losses, the promised bytes."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import optax
import pytest

import zerojax
from tests.processes.starting import free_port
from tests.texts import roundings
from zerojax.checkpoint import verify

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
NUM_STEPS = 4
#: What a loss is summed over: the logits of a batch's bytes, the widest sums of these models.
NUM_SUMMANDS = 16 * 32 * 256


#: What is left of zerojax where ZeRO is taken out of a loop: data parallelism with plain optax.
PLAIN = types.SimpleNamespace(
    make_mesh=zerojax.make_mesh,
    make_layout=zerojax.make_layout,
    make_train_step=zerojax.make_train_step,
    Recipe=zerojax.Recipe,
    Checkpoints=zerojax.Checkpoints,
    unpad=zerojax.unpad,
    sharded=lambda tx, layout: tx,
    gather_where_used=lambda loss_fn, layout: loss_fn,
    apply_updates=lambda params, updates, layout: optax.apply_updates(params, updates),
)


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def trained(name, stage):
    if name == "resnet":
        pytest.importorskip("sklearn", reason="its digits need scikit-learn, of the extra `dev`")
    module = load(name)
    if stage is None:
        module.__dict__["zerojax"] = PLAIN
    return module.train(stage or 0, NUM_STEPS)


#: Without microbatches stages 1 and 2 are one program: each example runs at one of them.
CASES = [(name, stage) for n, name in enumerate(EXAMPLES) for stage in (0, 1 + n % 2, 3)]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_an_example_learns_and_holds_what_its_stage_promises(name, stage):
    losses, held, promised = trained(name, stage)
    bound = roundings(NUM_STEPS, NUM_SUMMANDS)
    np.testing.assert_allclose(losses, trained(name, None)[0], rtol=bound)
    assert losses[-1] < losses[0]
    assert held == {kind: promised[kind] for kind in held}


def test_hosts_share_a_run_and_another_number_of_them_goes_on(tmp_path):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = ["--num-processes=2", f"--coordinator=127.0.0.1:{free_port()}", "--steps=10"]
    program = [
        sys.executable,
        EXAMPLES["several_hosts"],
        "--cpu=4",
        "--stage=3",
        f"--out={tmp_path}",
    ]
    started = [
        subprocess.Popen(
            [*program, *run, f"--process-id={index}"],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        printed = [process.communicate(timeout=250)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for words in ("8 x cpu", "bytes per device"):
        assert [words in text for text in printed] == [True, False], "process 0 alone"
    assert verify(tmp_path / "10").step == 10
    module = load("several_hosts")
    np.testing.assert_allclose(module.train(2, 12, tmp_path)[0], module.train(2, 12)[0][10:], 1e-5)


def test_an_example_is_a_program_whose_devices_are_a_choice():
    """Those that jax finds, here the CPU as one; or as many virtual ones as are asked for."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    env.pop("XLA_FLAGS")
    for more, found in (["--cpu"], "8 x cpu"), ([], "1 x cpu"):
        command = [sys.executable, EXAMPLES["with_equinox"], "--stage", "3", *more]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        first, last = done.stdout.splitlines()
        assert first == found
        assert "bytes per device: {'parameters': " in last


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_asks_for_no_platform_by_itself(name):
    assert "environ" not in EXAMPLES[name].read_text()
    assert 'add_argument("--cpu"' in EXAMPLES[name].read_text()
