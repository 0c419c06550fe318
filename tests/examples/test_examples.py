"""The programs of examples/ under every stage: the same losses, the bytes that were promised."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.texts import roundings
from zerojax.layout import STAGES

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {path.stem: path for path in sorted((ROOT / "examples").glob("*.py"))}
NUM_STEPS = 4
#: What a loss is summed over: the logits of a batch's bytes, the widest sums of these models.
NUM_SUMMANDS = 16 * 32 * 256


@functools.cache
def trained(name, stage):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES[name])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(stage, NUM_STEPS)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_example_learns_and_holds_what_its_stage_promises(name, stage):
    losses, held, promised = trained(name, stage)
    bound = roundings(NUM_STEPS, NUM_SUMMANDS)
    np.testing.assert_allclose(losses, trained(name, 0)[0], rtol=bound)
    assert losses[-1] < losses[0]
    assert held == {kind: promised[kind] for kind in held}


def test_an_example_is_a_program():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, EXAMPLES["with_equinox"], "--stage", "3"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert "bytes per device: {'parameters': " in done.stdout
