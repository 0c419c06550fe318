"""What README.md shows, run as it stands there."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest

import zerojax
from zerojax.layout import STAGES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FOUR_LINES, *PROGRAM = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_commands_that_it_names_exist():
    named = set(re.findall(r"\bscripts/\w+", README))
    assert {"scripts/train", "scripts/test"} <= named
    for name in named:
        assert os.access(ROOT / name, os.X_OK), f"{name} is not there or can't be run"


def test_the_documents_that_it_names_exist():
    for name in re.findall(r"\]\((?!https?:)([^)]+)\)", README):
        assert (ROOT / name).exists(), name


def test_the_four_lines_are_those_of_the_program():
    assert len(FOUR_LINES.splitlines()) == 4
    assert FOUR_LINES in PROGRAM[0]


def test_the_programs_run_and_learn(capsys):
    # The second goes on where the first ends, as a reader would read it.
    names: dict[str, object] = {}
    printed = []
    for program in PROGRAM:
        exec(compile(program, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out)
    losses = [float(line) for line in printed[0].splitlines()[:3]]
    assert losses[2] < losses[0]
    assert "params/layers_0/kernel" in printed[0], "describe has a row per leaf"
    assert printed[2].count("'loss'") == 3


@pytest.mark.parametrize("stage", STAGES)
def test_its_own_loop_is_clean(stage):
    """The audit of the loop as it is printed, with another stage."""
    program = PROGRAM[0].replace("stage=2", f"stage={stage}").split("for _ in range")[0]
    names: dict[str, Any] = {}
    exec(compile(program, "README.md", "exec"), names)
    x = jax.device_put(names["x"], names["layout"].batch)
    compiled = names["step"].lower(names["params"], names["opt_state"], x).compile()
    report = zerojax.audit(compiled, names["layout"])
    report.raise_if_problems()
    assert report.memory.reused > 0, "donated"


def test_its_table_is_the_papers():
    # arXiv 1910.02054, figure 1; K = 12 bytes of optimizer state per parameter.
    psi, n, k = 7.5e9, 64, 12
    want = [
        (4 + k) * psi,
        4 * psi + k * psi / n,
        2 * psi + (2 + k) * psi / n,
        (4 + k) * psi / n,
    ]
    shown = [float(gb) for gb in re.findall(r"^\| \d \|.*\| ([\d.]+) GB \|", README, re.MULTILINE)]
    assert len(shown) == len(want)
    for gb, exact in zip(shown, want, strict=True):
        # The paper cuts large cells off and rounds small ones.
        assert abs(gb - exact / 1e9) < 0.0501, (gb, exact)
