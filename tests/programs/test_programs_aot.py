"""Whole programs compiled for accelerators that you don't have: clean, at the volume of theory."""

from __future__ import annotations

import jax
import pytest

import zerojax
from tests.programs.program import LARGE

PROGRAMS = pytest.importorskip("tests.programs.table", exc_type=ImportError).PROGRAMS
GPU, TPU = pytest.mark.aot("cuda"), pytest.mark.aot("libtpu")


@pytest.mark.parametrize(
    ("name", "target", "stage"),
    [
        pytest.param("gpt2", "h100:1x8", 3, marks=GPU),
        pytest.param("gemma", "h100:1x8", 2, marks=GPU),
        pytest.param("gemma", "h100:1x8", 3, marks=GPU),
        # Heads of 32 features: a TPU's shards of them are no whole tiles.
        pytest.param("gemma", "v6e:2x4", 2, marks=TPU),
        pytest.param("nanodo", "v6e:2x4", 3, marks=TPU),
    ],
)
def test_a_program_is_clean_and_moves_what_zero_says(name, target, stage):
    mesh = zerojax.topology_mesh(target, {"data": 8})
    program = PROGRAMS[name](LARGE)
    report = program.step(mesh, stage, jax.random.key(0)).audit(program.batch)
    report.raise_if_problems()
    assert report.judged_volume <= 1.02 * report.theory_volume
