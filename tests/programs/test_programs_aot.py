"""Whole programs compiled for GPUs that are not here: clean, at the volume of theory."""

from __future__ import annotations

import jax
import pytest

import zerojax
from tests.programs.plain_programs import PROGRAMS
from tests.programs.program import LARGE


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", ["gemma", "gpt2"])
def test_a_program_is_clean_and_moves_what_zero_says(name, stage):
    mesh = zerojax.topology_mesh("h100:1x8", {"data": 8})
    program = PROGRAMS[name](LARGE)
    step = program.step(mesh, stage, jax.random.key(0))
    report = step.audit(program.batch)
    report.raise_if_problems()
    bound = 1.05 if step.layout.partitions("parameter") else 1.02
    assert report.judged_volume <= bound * report.theory_volume
