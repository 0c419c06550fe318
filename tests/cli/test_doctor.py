"""`zerojax doctor` shows what is there, tries it, and names what is wrong with a remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import zerojax
from tests.cli.running import COMMAND
from zerojax.cli import _doctor, main
from zerojax.models import gpt

PROOF = ("step at stage 2", "its audit", "its checkpoint")


def test_the_storys_line_in_a_process_of_its_own(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    names = ("XLA_FLAGS", "COLUMNS", "JAX_COMPILATION_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [*COMMAND, "doctor"],
        cwd=tmp_path / "here",
        env={**environment, "TMPDIR": str(tmp_path / "tmp"), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    for name in ("packages", "devices", *PROOF):
        assert re.search(rf"^{name} +\S", done.stdout, re.M), done.stdout
    for said in (
        "8 x virtual, on the CPU",
        f"jax {jax.__version__}",
        "moves 1.750 elements a parameter, theory 1.750",
        "to the bit",
    ):
        assert said in done.stdout
    assert done.stdout.endswith("zerojax works here\n")
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "tmp").iterdir()]


def test_no_devices_end_it_with_a_remedy(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    error = ValueError("jax finds no devices: no ROCm\nat all")
    monkeypatch.setattr(_doctor, "find_devices", Mock(side_effect=error))
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    assert "no devices: no ROCm; unset JAX_PLATFORMS, which asks for rocm" in err


def test_devices_are_described_and_what_is_missing_has_a_remedy(monkeypatch):
    gpu = SimpleNamespace(
        process_index=0,
        platform="gpu",
        device_kind="H100",
        memory_stats=lambda: {"bytes_limit": 80 * 10**9},
    )
    assert _doctor.describe_devices([gpu] * 4) == "4 x H100 (gpu), 80 GB of memory each"
    assert "JAX_NUM_CPU_DEVICES=8" in _doctor.describe_devices(jax.devices()[:1])
    monkeypatch.setattr(_doctor, "has_accelerators", lambda: True)
    assert 'pip install "jax[cuda12]"' in _doctor.describe_devices(jax.devices())


def test_a_compiler_for_absent_tpus_is_not_loaded():
    program = """
import sys, jax
from zerojax.cli import _doctor
_doctor.has_accelerators = lambda: False
_doctor.version_of = lambda name: "0.1"
assert _doctor.start_devices()
print(jax.config.jax_platforms, "libtpu" in sys.modules)
"""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "False"]


def test_a_loss_that_is_not_finite_ends_it(monkeypatch, capsys):
    loss = gpt.loss
    monkeypatch.setattr(gpt, "loss", lambda *given: loss(*given) * jnp.nan)
    assert main(["doctor"]) == 1
    assert "the loss is nan; try JAX_PLATFORMS=cpu" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["audit", "restore"])
def test_a_proof_that_fails_ends_it(monkeypatch, capsys, part):
    audit, restore = zerojax.audit, zerojax.restore

    def of_another_stage(compiled, layout, recipe):
        return audit(compiled, zerojax.make_layout(layout.shapes, layout.mesh, stage=3), recipe)

    def torn(*given):
        back = restore(*given)
        kernel = back.params["blocks"]["up"]["kernel"]
        torn = kernel.at[1, 7, 7].set(jnp.nextafter(kernel[1, 7, 7], jnp.inf))
        back.params["blocks"]["up"]["kernel"] = torn
        return back

    monkeypatch.setattr(zerojax, part, {"audit": of_another_stage, "restore": torn}[part])
    assert main(["doctor"]) == 1
    err = capsys.readouterr().err
    said = {"audit": "remedy", "restore": "['blocks']['up']['kernel'] came back otherwise"}
    assert said[part] in err
