"""Hardware: figures that hang together, found by name, refused where no hardware has them."""

from __future__ import annotations

import dataclasses
import math

import pytest

import zerojax
from zerojax.aot._topology import GPU_CHIPS
from zerojax.hardware import HARDWARE, Hardware, find_hardware

GIB = 2**30

#: What the makers print of one device: bf16 FLOP/s, bytes, bytes/s of memory and of one fast link.
PRINTED = {
    "v4": (275e12, 32 * GIB, 1.2e12, 9e10),
    "v5e": (197e12, 16 * GIB, 8.1e11, 9e10),
    "v5p": (459e12, 95 * GIB, 2.765e12, 1.8e11),
    "v6e": (918e12, 32 * GIB, 1.638e12, 1.8e11),
    "v7": (2307e12 / 2, 96 * GIB, 7.38e12 / 2, 1.8e11 / 2),
    "v100": (125e12, 32e9, 9e11, 1.5e11),
    "a100": (312e12, 80e9, 2.0e12, 3e11),
    "h100": (990e12, 80e9, 3.35e12, 4.5e11),
    "h200": (990e12, 141e9, 4.8e12, 4.5e11),
    "b200": (2300e12, 180e9, 8e12, 9e11),
}

#: A virtual mesh on a CPU, with figures such as one measures.
CPU = Hardware(
    name="cpu",
    platform="cpu",
    flops=5e10,
    flops_fp32=5e10,
    memory=2 * GIB,
    hbm_bandwidth=1e10,
    link_bandwidth=2e9,
    domain=8,
    slow_bandwidth=2e9,
    host_bandwidth=1e10,
    host_memory=2 * GIB,
)


@pytest.mark.parametrize("name", HARDWARE)
def test_figures_are_those_that_the_makers_print(name):
    one = HARDWARE[name]
    flops, memory, bandwidth, link = PRINTED[name]
    assert (one.flops, one.hbm_bandwidth, one.link_bandwidth) == (flops, bandwidth, link)
    # libtpu keeps a part; what CUDA reports is between the decimal and the binary reading.
    assert 0.95 * memory < one.memory < 1.01 * memory * (1 if memory % GIB == 0 else GIB / 1e9)
    assert one.name == name
    assert len(one.source) > 20


@pytest.mark.parametrize("name", HARDWARE)
def test_what_is_nearer_is_faster(name):
    one = HARDWARE[name]
    within = one.link_bandwidth * max(one.torus, 1)
    assert one.hbm_bandwidth > within > one.slow_bandwidth
    assert one.hbm_bandwidth > one.host_bandwidth
    assert one.flops >= one.flops_fp32
    assert one.domain > 1


@pytest.mark.parametrize("name", HARDWARE)
def test_slices_fit_the_torus_and_the_domain(name):
    one = HARDWARE[name]
    chips = [math.prod(map(int, shape.split("x"))) for shape in one.slices]
    assert (one.platform == "tpu") == bool(one.torus) == bool(chips)
    assert all(count * one.devices_per_chip <= one.domain for count in chips)
    assert one.devices_per_chip == 1 or one.chip_bandwidth > one.link_bandwidth * one.torus


@pytest.mark.parametrize("name", HARDWARE)
def test_a_tpu_has_a_clock_in_which_its_peak_is_a_power_of_two(name):
    one = HARDWARE[name]
    assert bool(one.clock) == (one.platform == "tpu")
    assert not one.clock or math.log2(one.flops / one.clock) == pytest.approx(
        round(math.log2(one.flops / one.clock)), abs=1e-2
    )


def test_a_slice_of_google_gives_its_own_network():
    # 25.6 and 6.4 Tb/s a pod of 256 chips; 8 x 200 and 8 x 400 Gb/s a node of 8.
    for name, node, devices in (("v6e", 25.6e12, 256), ("v5e", 6.4e12, 256), ("a100", 1.6e12, 8)):
        assert HARDWARE[name].slow_bandwidth * devices * 8 == pytest.approx(node)
    for name in ("h100", "h200", "b200"):
        assert HARDWARE[name].slow_bandwidth * 8 * 8 == pytest.approx(3.2e12)
    assert HARDWARE["v100"].slow_bandwidth * 16 * 8 == pytest.approx(800e9)  # the paper's


def test_torus_phases_are_known_for_every_kind_of_torus():
    for one in HARDWARE.values():
        assert bool(one.torus) == bool(one.span), one.name
    kinds = [kind for one in HARDWARE.values() for kind in one.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_compilers_for_absent_hardware_are_told_the_same():
    for name, chip in GPU_CHIPS.items():  # XLA has it from the clock, the planner as printed
        assert chip["bandwidth"] == pytest.approx(HARDWARE[name].hbm_bandwidth, rel=0.05)


# ------------------------------------------------------------------ finding


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100", "h100"),
        (" H100 ", "h100"),
        ("tpu7x", "v7"),
        ("TPU7x", "v7"),
        ("TPU v5 lite", "v5e"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ],
)
def test_hardware_is_found_by_its_name_and_by_what_jax_calls_it(name, key):
    assert find_hardware(name) is HARDWARE[key]


def test_hardware_of_ones_own_is_taken_as_it_is():
    assert find_hardware(CPU) is CPU
    pod = dataclasses.replace(HARDWARE["v5p"], domain=64)
    assert find_hardware(pod).domain == 64


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"devices_per_chip": 2}, "v5p': chip_bandwidth must be a finite number above 0, got 0.0"),
        ({"clock": -1.0}, "clock must be a finite number of at least 0, got -1.0"),
        (
            {"launch_seconds": float("nan")},
            "launch_seconds must be a finite number of at least 0, got nan",
        ),
        (
            {"vector_memory": "96 MiB"},
            "vector_memory must be a finite number of at least 0, got '96 MiB'",
        ),
    ],
)
def test_figures_that_no_hardware_has_are_refused(figures, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(HARDWARE["v5p"], **figures)


@pytest.mark.parametrize(
    ("name", "first"),
    [("h101", "h100"), ("v5", "v5"), ("b20", "b200"), ("tpu7", "v7"), ("nvidia a100", "a100")],
)
def test_unknown_hardware_lists_those_known_nearest_first(name, first):
    with pytest.raises(ValueError, match=f"{name!r} is no hardware that is known") as caught:
        find_hardware(name)
    listed = str(caught.value).split("nearest first: ")[1].split(";")[0].split(", ")
    assert sorted(listed) == sorted(HARDWARE)
    assert listed[0].startswith(first), listed
    assert "\n" not in str(caught.value)
    remedy = str(caught.value).partition("zerojax.plan(hardware=")[2].removesuffix(")")
    own = eval(remedy.replace("...", "24e9"), {"dataclasses": dataclasses, "zerojax": zerojax})
    assert (own.name, own.memory) == (listed[0], 24e9)


@pytest.mark.parametrize("name", [None, 7, "", ("h100",)])
def test_what_is_no_name_is_refused_the_same_way(name):
    with pytest.raises(ValueError, match="is no hardware that is known"):
        find_hardware(name)


# ------------------------------------------------------------------ figures that nothing has


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "fast", True, None])
def test_a_figure_that_no_hardware_has_is_refused(value):
    with pytest.raises(ValueError, match=r"^Hardware 'cpu': flops must be .* got "):
        dataclasses.replace(CPU, flops=value)


@pytest.mark.parametrize(
    "field",
    [
        "flops_fp32",
        "hbm_bandwidth",
        "link_bandwidth",
        "slow_bandwidth",
        "host_bandwidth",
        "memory",
        "host_memory",
        "domain",
        "wrap",
        "devices_per_chip",
    ],
)
def test_every_figure_is_checked(field):
    with pytest.raises(ValueError, match=f"^Hardware 'cpu': {field} must be .* got "):
        dataclasses.replace(CPU, **{field: -1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": 1.5}, "memory must be a whole number"),
        ({"platform": "cuda"}, "platform must be one of gpu, tpu, cpu, got 'cuda'"),
        ({"torus": 4}, "torus must be 0"),
        ({"torus": -1}, "torus must be 0"),
        ({"hbm_share": 0}, "hbm_share must be a finite number above 0, got 0"),
    ],
)
def test_figures_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CPU, **changes)
