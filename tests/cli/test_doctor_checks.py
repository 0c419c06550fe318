"""Each thing that `zerojax doctor` looks at can be wrong, and then is told with a remedy."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.aot import MissingCompiler
from zerojax.cli.doctor import _machine as machine
from zerojax.cli.doctor import _packages as packages
from zerojax.cli.doctor import _proof as proof
from zerojax.cli.doctor._findings import Bench, Finding
from zerojax.models import mlp


@pytest.fixture
def bench():
    return Bench(devices=jax.devices())


# ------------------------------------------------------------------ packages


def versions(monkeypatch, **changes):
    """Let packages have other versions; None is not installed."""
    real = metadata.version

    def version(name):
        given = changes.get(name.replace("-", "_"), real)
        if given is None:
            raise metadata.PackageNotFoundError(name)
        return real(name) if given is real else given

    monkeypatch.setattr(metadata, "version", version)


def test_packages_that_are_missing_or_old_are_told_with_the_command_for_them(monkeypatch, bench):
    versions(monkeypatch, optax="0.1.0", orbax_checkpoint=None)
    found = packages.check_packages(bench)
    assert found.status == "failed"
    assert "optax is 0.1.0, and >=0.2.5 is needed" in found.found
    assert "orbax-checkpoint is not installed" in found.found
    assert re.fullmatch(r'pip install -U "optax>=[\d.]+" "orbax-checkpoint>=[\d.]+"', found.remedy)


def test_requirements_are_those_of_the_package_and_its_command(monkeypatch):
    lines = [
        *("optax>=1", "a>=1; (sys_platform == 'nowhere') and extra == 'cli'", "b; extra == 'aot'"),
        *(
            "d>=1; extra == 'checkpoint'",
            "zerojax[checkpoint]; extra == 'cli'",
            "c; extra == 'cli'",
        ),
    ]
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(requires=lines))
    assert [one.name for one in packages.requirements()] == ["optax", "d", "c"]


def test_packages_of_a_folder_that_nobody_installed_are_not_known(monkeypatch, bench):
    missing = metadata.PackageNotFoundError("zerojax")
    monkeypatch.setattr(metadata, "distribution", Mock(side_effect=missing))
    found = packages.check_packages(bench)
    assert found.status == "warning"
    assert "pip install -e" in found.remedy


# ------------------------------------------------------------------ devices


def test_no_devices_are_told(monkeypatch, bench):
    monkeypatch.setenv("JAX_PLATFORMS", "rocm")
    for error, said in [
        (ValueError("jax finds no devices: no ROCm\nat all"), "jax finds no devices: no ROCm"),
    ]:
        monkeypatch.setattr(machine, "find_devices", Mock(side_effect=error))
        found = machine.check_devices(bench)
        assert (found.status, found.found) == ("failed", said)
        assert "unset JAX_PLATFORMS, which asks for rocm" in found.remedy


def test_a_single_device_is_a_warning(monkeypatch, bench):
    monkeypatch.setattr(machine, "find_devices", lambda asked: jax.devices()[:1])
    found = machine.check_devices(bench)
    assert found.status == "warning"
    assert "1 virtual device on the CPU" in found.found
    assert "JAX_NUM_CPU_DEVICES=8" in found.remedy
    assert bench.devices == jax.devices()[:1]


def test_an_accelerator_that_jax_does_not_use_is_a_warning(monkeypatch, bench):
    monkeypatch.setattr(machine, "has_accelerators", lambda: True)
    found = machine.check_devices(bench)
    assert found.status == "warning"
    assert "does not use the accelerator" in found.found
    assert "unset JAX_PLATFORMS" in found.remedy


def test_real_accelerators_are_named_with_their_memory(monkeypatch, bench):
    one = SimpleNamespace(
        platform="gpu", device_kind="H100", memory_stats=lambda: {"bytes_limit": 80 * 10**9}
    )
    monkeypatch.setattr(machine, "find_devices", lambda asked: [one] * 4)
    found = machine.check_devices(bench)
    assert (found.status, found.found) == ("ok", "4 x H100 (gpu), 80.0 GB of memory each")


def test_a_compiler_for_absent_tpus_is_not_loaded():
    program = """
import sys, jax
from zerojax.cli.doctor import _machine as machine
from zerojax.cli.doctor import _packages as packages
machine.has_accelerators = lambda: False
machine.version_of = lambda name: "0.1"
assert machine.check_devices(machine.Bench()).status == "ok"
packages.check_tpu_compiler(None), packages.check_gpu_compiler(None)
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
    one = SimpleNamespace(platform="tpu", addressable_memories=lambda: memories)
    found = machine.check_host_memory(Bench(devices=[one]))
    assert found.status == "warning"
    assert "(only device)" in found.found
    assert "without --offload" in found.remedy


@pytest.mark.parametrize(
    ("check", "require", "package"),
    [
        (packages.check_tpu_compiler, "require_libtpu", "libtpu"),
        (packages.check_gpu_compiler, "require_cuda", "jax-cuda12-plugin"),
    ],
)
def test_compilers_are_there_or_a_warning(monkeypatch, bench, check, require, package):
    error = MissingCompiler('Compiling needs it 3 (no TPU): pip install "jax[tpu]==1" other')
    monkeypatch.setattr(packages, require, Mock(side_effect=error))
    assert check(bench) == Finding(
        "warning", "Compiling needs it 3 (no TPU)", 'pip install "jax[tpu]==1" other'
    )
    monkeypatch.setattr(packages, require, lambda: None)
    monkeypatch.setattr(packages, "version_of", {package: "0.7"}.get)
    assert check(bench) == Finding("ok", f"{package} 0.7")


# ------------------------------------------------------------------ folders


@pytest.mark.parametrize(
    ("folder", "status", "found"),
    [
        (None, "warning", "every run compiles anew"),
        ("gs://bucket/cache", "ok", "gs://bucket/cache"),
    ],
)
def test_the_compilation_cache(monkeypatch, bench, folder, status, found):
    monkeypatch.setattr(machine.jax, "config", SimpleNamespace(jax_compilation_cache_dir=folder))
    told = machine.check_cache(bench)
    assert (told.status, found in told.found) == (status, True)
    assert bool(told.remedy) == (status == "warning")


# ------------------------------------------------------------------ the proof


def test_a_loss_that_is_not_finite_is_told(monkeypatch, bench):
    loss = mlp.loss
    monkeypatch.setattr(mlp, "loss", lambda *given: loss(*given) * jnp.nan)
    found = proof.check_step(bench)
    assert (found.status, found.found) == ("failed", "the loss is nan")
    assert bench.state is None


def test_a_step_that_does_not_partition_fails_the_audit(monkeypatch, bench):
    monkeypatch.setattr(proof, "STAGE", 0)
    assert proof.check_step(bench).status == "ok"
    monkeypatch.setattr(proof, "STAGE", 2)
    config = mlp.Config(num_layers=3, width=256, input_size=256, output_size=256)
    bench.step = proof.make_step(bench.devices, functools.partial(mlp.init, config), mlp.loss)
    found = proof.check_audit(bench)
    assert found.status == "failed"
    assert "more" in found.found
    assert found.remedy


def test_a_bit_that_is_lost_on_disk_is_told(monkeypatch, bench):
    assert proof.check_step(bench).status == "ok"
    assert proof.check_checkpoint(bench).status == "ok"
    restore = zerojax.restore

    def torn(*given):
        back = restore(*given)
        layers = back.params["layers"]
        kernel = layers[1]["kernel"]
        layers[1]["kernel"] = kernel.at[7, 7].set(jnp.nextafter(kernel[7, 7], jnp.inf))
        return back

    monkeypatch.setattr(zerojax, "restore", torn)
    found = proof.check_checkpoint(bench)
    assert found.status == "failed"
    assert "['layers'][1]['kernel'] came back otherwise" in found.found
    assert "TMPDIR" in found.remedy
