"""Each thing that `zerojax doctor` looks at can be wrong, and then is told with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.aot import MissingCompiler
from zerojax.cli import _doctor as checks
from zerojax.cli._doctor import Bench, Finding
from zerojax.models import gpt


@pytest.fixture
def bench():
    return Bench(devices=jax.devices())


# ------------------------------------------------------------------ packages


def test_packages_are_named_with_their_versions_and_what_is_missing(monkeypatch, bench):
    versions = {"jax": "1.2", "optax": "0.3"}
    monkeypatch.setattr(checks, "version_of", versions.get)
    found = checks.check_packages(bench)
    assert found.status == "ok"
    assert "jax 1.2, jaxlib is missing, optax 0.3" in found.found


# ------------------------------------------------------------------ devices


def test_no_devices_are_told(monkeypatch, bench):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    for error, said in [
        (ValueError("jax finds no devices: no ROCm\nat all"), "jax finds no devices: no ROCm"),
    ]:
        monkeypatch.setattr(checks, "find_devices", Mock(side_effect=error))
        found = checks.check_devices(bench)
        assert (found.status, found.found) == ("failed", said)
        assert "unset JAX_PLATFORMS, which asks for rocm" in found.remedy


def test_a_single_device_is_a_warning(monkeypatch, bench):
    monkeypatch.setattr(checks, "find_devices", lambda asked: jax.devices()[:1])
    found = checks.check_devices(bench)
    assert found.status == "warning"
    assert "1 virtual device on the CPU" in found.found
    assert "JAX_NUM_CPU_DEVICES=8" in found.remedy
    assert bench.devices == jax.devices()[:1]


def test_an_accelerator_that_jax_does_not_use_is_a_warning(monkeypatch, bench):
    monkeypatch.setattr(checks, "has_accelerators", lambda: True)
    found = checks.check_devices(bench)
    assert found.status == "warning"
    assert "does not use the accelerator" in found.found
    assert "unset JAX_PLATFORMS" in found.remedy


def test_real_accelerators_are_named_with_their_memory(monkeypatch, bench):
    one = SimpleNamespace(
        process_index=0,
        platform="gpu",
        device_kind="H100",
        memory_stats=lambda: {"bytes_limit": 80 * 10**9},
    )
    monkeypatch.setattr(checks, "find_devices", lambda asked: [one] * 4)
    found = checks.check_devices(bench)
    assert (found.status, found.found) == ("ok", "4 x H100 (gpu), 80.0 GB of memory each")


def test_a_compiler_for_absent_tpus_is_not_loaded():
    program = """
import sys, jax
from zerojax.cli import _doctor as checks
checks.has_accelerators = lambda: False
checks.version_of = lambda name: "0.1"
assert checks.check_devices(checks.Bench()).status == "ok"
for check in checks.CHECKS[-2:]:
    check.run(None)
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


def test_devices_without_host_memory_are_a_warning(monkeypatch):
    memories = [SimpleNamespace(kind="device")]
    one = SimpleNamespace(process_index=0, platform="tpu", addressable_memories=lambda: memories)
    found = checks.check_host_memory(Bench(devices=[one]))
    assert found.status == "warning"
    assert "(only device)" in found.found
    assert "without --offload" in found.remedy


def test_compilers_are_there_or_a_warning(monkeypatch, bench):
    error = MissingCompiler('Compiling needs it 3 (no TPU): pip install "jax[tpu]==1" other')
    assert checks.check_compiler(Mock(side_effect=error), ("libtpu",), bench) == Finding(
        "warning", "Compiling needs it 3 (no TPU)", 'pip install "jax[tpu]==1" other'
    )
    monkeypatch.setattr(checks, "version_of", {"libtpu": "0.7"}.get)
    for packages, found in ((("libtpu", "other"), "libtpu 0.7"), (("other",), "is here")):
        assert checks.check_compiler(lambda: None, packages, bench) == Finding("ok", found)


# ------------------------------------------------------------------ the proof


def test_a_loss_that_is_not_finite_is_told(monkeypatch, bench):
    loss = gpt.loss
    monkeypatch.setattr(gpt, "loss", lambda *given: loss(*given) * jnp.nan)
    found = checks.check_step(bench)
    assert (found.status, found.found) == ("failed", "the loss is nan")
    assert bench.state is None


def test_a_step_that_does_not_partition_fails_the_audit(monkeypatch, bench):
    monkeypatch.setattr(checks, "STAGE", 0)
    assert checks.check_step(bench).status == "ok"
    monkeypatch.setattr(checks, "STAGE", 2)
    partitioned = Bench(devices=bench.devices)
    assert checks.check_step(partitioned).status == "ok"
    bench.step = partitioned.step
    found = checks.check_audit(bench)
    assert found.status == "failed"
    assert "more" in found.found
    assert found.remedy


def test_a_bit_that_is_lost_on_disk_is_told(monkeypatch, bench):
    assert checks.check_step(bench).status == "ok"
    assert checks.check_checkpoint(bench).status == "ok"
    restore = zerojax.restore

    def torn(*given):
        back = restore(*given)
        kernel = back.params["blocks"]["up"]["kernel"]
        torn = kernel.at[1, 7, 7].set(jnp.nextafter(kernel[1, 7, 7], jnp.inf))
        back.params["blocks"]["up"]["kernel"] = torn
        return back

    monkeypatch.setattr(zerojax, "restore", torn)
    found = checks.check_checkpoint(bench)
    assert found.status == "failed"
    assert "['blocks']['up']['kernel'] came back otherwise" in found.found
    assert "TMPDIR" in found.remedy
