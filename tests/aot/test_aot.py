"""Meshes of hardware that you don't have: names, sizes, order, and what is missing."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import AxisType

from zerojax._quiet import quiet_stderr
from zerojax.aot import MissingCompiler, known_topologies, parse_topology, topology_mesh
from zerojax.aot import _plugin as plugin
from zerojax.aot._topology import GPU_CHIPS, TPU_CHIPS, gpu_target_config
from zerojax.hardware import find_hardware

ROOT = Path(__file__).resolve().parents[2]


def coordinates(mesh) -> np.ndarray:
    return np.array([tuple(d.coords) for d in mesh.devices.ravel()])


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("name", "dims", "slices", "devices"),
    [
        ("v6e:2x4", (2, 4), 1, 8),
        ("v5p:8x8x16", (8, 8, 16), 1, 1024),
        ("V5E:4x4x2slices", (4, 4), 2, 32),
        ("tpu7x:2x2x2", (2, 2, 2), 1, 16),  # two devices a chip
        ("v4:2x2x2x3slices", (2, 2, 2), 3, 24),
        ("h100:4x8", (4, 8), 1, 32),
    ],
)
def test_a_name_says_chip_arrangement_and_count(name, dims, slices, devices):
    topology = parse_topology(name)
    assert (topology.dims, topology.num_slices, topology.num_devices) == (dims, slices, devices)


def test_every_known_name_is_one():
    assert {parse_topology(name).chip for name in known_topologies()} == {*TPU_CHIPS, *GPU_CHIPS}


@pytest.mark.parametrize(
    ("name", "why", "nearest"),
    [
        ("h10:1x8", "is not a topology", "h100:1x8"),
        ("v6:2x4", "is not a topology", "v6e:2x4"),
        ("h100", "is not a topology", "h100:"),
        ("h100:8", "needs 2 dims for h100 (nodes x GPUs per node)", "h100:"),
        ("v5p:2x4", "needs 3 dims for v5p (chips along each torus dim)", "v5p:2x"),
        ("v6e:0x4", "has a 0; each of its numbers is at least 1", "v6e:"),
        ("h100:2x8x2slices", "has slices, which only TPUs have", "h100:2x8"),
    ],
)
def test_an_unknown_topology_lists_those_known_nearest_first(name, why, nearest):
    with pytest.raises(ValueError, match="Known, nearest first") as caught:
        topology_mesh(name, {"data": 8})
    message = str(caught.value)
    assert why in message
    listed = message.split("nearest first: ")[1].split(", ")
    assert listed[0].startswith(nearest)
    assert len(listed) == 8
    assert {*listed} <= {*known_topologies()}


@pytest.mark.parametrize(("name", "devices"), [("v6e:2x4", 8), ("h100:2x8", 16)])
def test_a_product_that_differs_says_both_numbers(name, devices):
    with pytest.raises(ValueError, match=rf"multiply to 6, and topology '{name}' has {devices}"):
        topology_mesh(name, {"data": 3, "model": 2})


def test_axes_that_are_no_mapping_are_refused_as_make_mesh_does():
    with pytest.raises(TypeError, match=r"topology_mesh takes axis names, .* got \['data'\]"):
        topology_mesh("h100:1x8", ["data"])
    with pytest.raises(ValueError, match="mesh axis 'a' needs a positive whole number, got -2"):
        topology_mesh("h100:1x8", {"a": -2, "b": -4})


# ------------------------------------------------------------------ chips


@pytest.mark.parametrize("chip", GPU_CHIPS)
def test_a_chip_is_written_as_xla_has_it(chip):
    text = gpu_target_config(chip)
    capability = re.search(r"major: (\d+) minor: (\d+) feature_extension: (\w)", text)
    fields = dict(re.findall(r"(\w+): ([^\s}]+)", text))
    assert int(fields["device_memory_size"]) == find_hardware(chip).memory
    assert int(fields["core_count"]) == GPU_CHIPS[chip]["cores"]
    assert capability is not None
    written = f"{capability[1]}.{capability[2]}" + ("a" if capability[3] == "A" else "")
    assert written == GPU_CHIPS[chip]["compute_capability"]
    assert text.count("{") == text.count("}")
    assert "openxla/xla" in GPU_CHIPS[chip]["source"]


def test_chip_figures_are_plausible():
    gib = 2**30
    sizes = {"a100": 80, "h100": 80, "h200": 141, "b200": 180}  # what the makers print
    for name, chip in GPU_CHIPS.items():
        assert 0.97 * sizes[name] * 1e9 < find_hardware(name).memory < 1.03 * sizes[name] * gib
        assert chip["shared_memory_per_block"] <= chip["shared_memory_per_core"]


# ------------------------------------------------------------------ what is missing


def test_a_missing_libtpu_names_the_pip_command(monkeypatch):
    monkeypatch.setattr(plugin, "version_of", lambda package: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(
        MissingCompiler, match=r'"\.\[aot\]", else pip install "jax\[tpu\]==[\d.]+"'
    ):
        topology_mesh("v6e:2x4", {"data": 8})


def test_another_libtpu_than_jax_pins_is_refused(monkeypatch):
    monkeypatch.setattr(plugin, "version_of", lambda package: "0.0.1")
    with pytest.raises(MissingCompiler, match=r"libtpu 0\.0\.1 is installed.*pip install"):
        topology_mesh("v6e:2x4", {"data": 8})


@pytest.mark.parametrize(
    ("absent", "named"), [("jax_plugins", "the CUDA plugin"), ("nvidia", "ptxas")]
)
def test_a_missing_cuda_compiler_names_the_pip_command(monkeypatch, absent, named):
    monkeypatch.setattr(plugin, "_has_module", lambda package, name: package != absent)
    monkeypatch.setattr(plugin.shutil, "which", lambda program: None)
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    with pytest.raises(MissingCompiler, match=rf"needs {named}.*pip install .*nvidia-cuda-nvcc"):
        topology_mesh("h100:1x8", {"data": 8})


def test_another_cuda_plugin_than_jaxlib_is_refused(monkeypatch):
    versions = {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.0"}
    monkeypatch.setattr(plugin, "_has_module", lambda package, name: True)
    monkeypatch.setattr(plugin, "version_of", versions.get)
    with pytest.raises(MissingCompiler, match=r"needs jax-cuda13-plugin 0\.10\.2, and 0\.9\.0 is"):
        topology_mesh("h100:1x8", {"data": 8})


def test_the_pin_is_read_from_jax_itself():
    assert re.fullmatch(r"==\d+(\.\d+)*(\.\*)?", plugin._pinned("libtpu"))
    assert plugin._pinned("no-such-package") == ""


def test_known_noise_is_dropped_and_the_rest_passes(capfd):
    with quiet_stderr():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\nsomething real\n")
    assert capfd.readouterr().err == "something real\n"


# ------------------------------------------------------------------ meshes


@pytest.mark.aot("libtpu")
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("v6e:2x4", {"data": 8}),
        ("v6e:1x1", {"data": 1}),
        ("v5e:4x4", {"data": 2, "model": 8}),
        ("v4:2x2x2", {"data": 8}),
        ("tpu7x:2x2x1", {"data": 8}),
        ("v5p:4x4x4", {"a": 2, "b": 2, "c": 16}),
    ],
)
def test_a_tpu_mesh_has_every_device_once_and_auto_axes(name, axes):
    mesh = topology_mesh(name, axes)
    assert dict(mesh.shape) == axes
    assert len({d.id for d in mesh.devices.ravel()}) == math.prod(axes.values())
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.aot("libtpu")
def test_axes_of_the_torus_sizes_lie_along_the_torus():
    mesh = topology_mesh("v5p:4x4x8", {"x": 4, "y": 4, "z": 8})
    found = coordinates(mesh).reshape(4, 4, 8, 3)
    for axis in range(3):
        along = np.diff(found, axis=axis)
        moves = [int(np.count_nonzero(along[..., coordinate])) for coordinate in range(3)]
        assert sum(move > 0 for move in moves) == 1, "one step along an axis is one torus dim"


@pytest.mark.aot("libtpu")
def test_the_first_axis_crosses_the_slices_and_the_others_stay_within():
    mesh = topology_mesh("v5e:4x4x2slices", {"data": 4, "model": 8})
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert np.array_equal(slices, np.repeat([0, 1], [16, 16]).reshape(4, 8))
    odd = topology_mesh("v5e:2x2x3slices", {"data": 4, "model": 3})  # only model is divisible
    assert [d.slice_index for d in odd.devices[0]] == [0, 1, 2]


@pytest.mark.aot("libtpu")
def test_a_shape_that_libtpu_refuses_lists_those_known():
    with pytest.raises(ValueError, match=r"refused by libtpu.*Known, nearest first: v6e:"):
        topology_mesh("v6e:3x4", {"data": 12})


@pytest.mark.aot("cuda")
@pytest.mark.parametrize("chip", GPU_CHIPS)
def test_the_last_axis_of_a_gpu_mesh_stays_within_a_node(chip):
    mesh = topology_mesh(f"{chip}:2x8", {"data": 2, "model": 8})
    assert {d.device_kind for d in mesh.devices.ravel()} <= {*find_hardware(chip).device_kinds}
    assert [d.process_index for d in mesh.devices.ravel()] == [0] * 8 + [1] * 8


COMPILE = """
import sys
{before}
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
print("started", file=sys.stderr)
from zerojax.aot import topology_mesh
for name in {names}:
    mesh = topology_mesh(name, {{"data": 8}})
    x = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(lambda x: jnp.tanh(x) * 2, out_shardings=whole).lower(x).compile()
    assert "all-gather" in compiled.as_text(), compiled.as_text()
    assert compiled.memory_analysis().peak_memory_in_bytes > 0
print(jax.default_backend())
"""


@pytest.mark.aot("libtpu", "cuda")
@pytest.mark.parametrize(
    "before", ["", "import jax; jax.random.key(0)"], ids=["at once", "after jax has started"]
)
def test_a_program_compiles_without_a_device_a_variable_or_a_word(before):
    keep = {k: v for k, v in os.environ.items() if not re.match("JAX_|XLA_|TPU_|TF_CPP", k)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE.format(before=before, names=["v6e:2x4", "h100:1x8"])],
        env=dict(keep, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "cpu\n"
    assert done.stderr.split("started\n")[1] == ""


def test_the_extra_installs_what_the_errors_ask_for():
    extra = (ROOT / "pyproject.toml").read_text().split("\naot = [")[1].split("\n]")[0]
    assert re.search(r"jax\[tpu,cuda12-local\]", extra)
    assert "nvidia-cuda-nvcc-cu12" in extra
