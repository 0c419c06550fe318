"""A light install: what works without the extras, and how each missing one is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: Modules of a requirement where they are not called as it is.
MODULES = {"orbax-checkpoint": "orbax"}
#: The extras that are missing in the tests; no program here needs a compiler.
ABSENT = ("checkpoint", "cli", "notebooks", "dev")

BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
LIGHT = """
import jax, jax.numpy as jnp, optax
import zerojax

def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)

params, batch = {"w": jnp.ones((64, 64))}, jnp.ones((8, 64))
tx, mesh = optax.adamw(1e-3), zerojax.make_mesh({"data": 8})
layout = zerojax.make_layout(params, mesh, stage=2)
zerojax.sharded(tx, layout).init(params)
step = zerojax.make_train_step(loss, tx, layout)
step.audit(batch).raise_if_problems()
step(step.init(params), jax.device_put(batch, layout.batch))
zerojax.plan(params, tx, stage=2, num_devices=8, hardware="h100")
"""
STATE = """
import jax.numpy as jnp, zerojax
state = {"w": jnp.ones(8)}
layout = zerojax.make_layout(state, zerojax.make_mesh({"data": 8}), stage=0)
"""
BATCHES = """
import numpy as np
from zerojax.data import make_batches
make_batches(np.zeros(99, np.uint8), context=4, batch_size=2)
"""
COMMAND = "import sys; from zerojax.__main__ import main; sys.exit(main())"


def modules_of(extras):
    """Return the modules that the extras bring."""
    lines = [line for name in extras for line in EXTRAS[name]]
    names = {re.split(r"[\[<>=;]", line)[0] for line in lines} - {"zerojax"}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def run(program, absent, *arguments, folder=None):
    """Run a program that can't import some modules."""
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(absent=absent) + program, *arguments],
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_layout_a_step_an_audit_and_a_plan_need_no_extra():
    done = run(LIGHT, modules_of(ABSENT))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("extra", "program"),
    [
        ("checkpoint", "zerojax.save('there', state, layout)"),
        ("checkpoint", "zerojax.restore('there', layout, state)"),
        ("checkpoint", "zerojax.Checkpoints('there')"),
        ("cli", BATCHES),
    ],
)
def test_what_is_missing_is_named_with_its_pip_line(tmp_path, extra, program):
    done = run(STATE + program, modules_of(ABSENT), folder=tmp_path)
    assert done.returncode == 1
    assert f"in a clone of zerojax, pip install '.[{extra}]'" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("absent", "arguments"),
    [
        ("typer", ["plan"]),
        ("matplotlib", ["plan", "--model", "tiny", "--devices", "8", "--plot", "plot.png"]),
        ("grain", ["train", "--data", "text.txt"]),
        ("orbax", ["train", "--data", "text.txt", "--steps", "1", "--save-every", "1"]),
    ],
)
def test_the_command_says_it_in_one_line(tmp_path, absent, arguments):
    (tmp_path / "text.txt").write_text("text " * 1000)
    done = run(COMMAND, {absent}, *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("zerojax: ")
    assert re.search(r"pip install '\.\[(cli|checkpoint)\]'\n$", done.stderr)
    assert done.stderr.count("\n") == 1


@pytest.mark.aot("cuda")
def test_an_import_beside_the_compilers_prints_nothing():
    """jax itself does: it asks CUDA's libraries for their versions when it is imported."""
    done = run("import zerojax", set())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("zerojax ")


def test_a_package_that_is_broken_is_not_called_missing(tmp_path):
    (tmp_path / "grain.py").write_text("raise ImportError('libgrain.so: no such file')")
    done = run("sys.path.insert(0, '.')" + BATCHES, set(), folder=tmp_path)
    assert done.stderr.splitlines()[-1] == "ImportError: libgrain.so: no such file"
