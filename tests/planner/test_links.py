"""Links: seconds of collectives against those worked out by hand, and the phases of a torus."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import mesh_utils
from jax.sharding import Mesh
from scipy.optimize import linprog

from tests.planner.chips import Chip
from zerojax.hardware import HARDWARE, find_hardware
from zerojax.layout import in_order
from zerojax.layout._torus import find_phases, read_sub_axes
from zerojax.planner._links import Network, Seconds, gather_time

S = 2e9  # bytes of the tensor that is gathered
L = 1.8e11  # v5p, v6e: bytes/s along one dim


def network_of(hardware, axes):
    return Network(find_hardware(hardware), axes)


def about(value) -> Any:  # stands for a number in a dataclass
    return pytest.approx(value)


def seconds(hardware, axes, over=None, collective: Any = "all-gather"):
    """Give the seconds along one axis, by default along all."""
    over = tuple(axes) if over is None else (over,)
    return network_of(hardware, axes).seconds(over, S, collective)


@pytest.mark.parametrize("name", ["h100", "v5p"])
@pytest.mark.parametrize("collective", ["all-gather", "reduce-scatter", "all-reduce"])
def test_a_single_device_moves_nothing(name, collective):
    assert seconds(name, {"data": 1}, collective=collective) == Seconds(0.0, 0.0)
    assert seconds(name, {"data": 1, "model": 2}, "data", collective) == Seconds(0.0, 0.0)


@pytest.mark.parametrize("name", [name for name, one in HARDWARE.items() if not one.torus])
def test_an_all_reduce_through_a_switch_is_a_scatter_and_a_gather(name):
    for axes in ({"data": 8}, {"data": 64}):
        gather, scatter = seconds(name, axes), seconds(name, axes, collective="reduce-scatter")
        assert scatter == gather
        assert seconds(name, axes, collective="all-reduce") == gather * 2


# ------------------------------------------------------------------ switches


def test_a_node_runs_at_the_bus_bandwidth():
    # nccl-tests: bus bandwidth = S (n - 1) / n / t for a gather, 2 S (n - 1) / n / t for a reduce.
    found = seconds("h100", {"data": 8})
    assert found.slow == 0
    assert S * 7 / 8 / found.fast == pytest.approx(450e9)
    found = seconds("a100", {"data": 4}, collective="all-reduce")
    assert 2 * S * 3 / 4 / found.fast == pytest.approx(300e9)


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_nodes_run_at_the_bus_bandwidth_of_their_cards(nodes):
    found = seconds("h100", {"data": 8 * nodes})
    n = 8 * nodes
    assert S * (n - 1) / n / found.slow == pytest.approx(8 * 50e9)  # 8 cards of 400 Gb/s
    assert S * (n - 1) / n / found.fast == pytest.approx(450e9)


def test_an_axis_across_nodes_beside_one_within():
    axes = {"data": 4, "model": 8}
    within, across = seconds("h100", axes, "model"), seconds("h100", axes, "data")
    assert within == Seconds(about(S * 7 / 8 / 450e9), 0.0)
    assert across == Seconds(0.0, about(S * 3 / 4 / 50e9))  # its own card, no other's
    both = seconds("h100", axes)
    assert both == seconds("h100", {"data": 32})


def test_an_axis_that_crosses_nodes_uses_as_many_cards_as_it_has_members_in_one():
    found = seconds("h100", {"data": 16, "model": 4}, "data")  # 2 of a node's 8, 8 nodes
    assert found.slow == pytest.approx(S * 15 / 16 / (2 * 50e9))
    assert found.fast == pytest.approx(S * 15 / 16 / 450e9)


@pytest.mark.parametrize(
    ("hardware", "axes", "within"),
    [
        ("h100", {"data": 8}, (8,)),
        ("h100", {"data": 9}, (3,)),
        ("h100", {"data": 11}, (1,)),
        ("h100", {"data": 12}, (6,)),
        ("h100", {"data": 16}, (8,)),
        ("v100", {"data": 16}, (16,)),
        ("h100", {"data": 8, "model": 2}, (4, 2)),
        ("h100", {"data": 8, "model": 3}, (2, 3)),
        ("h100", {"data": 2, "fsdp": 2, "model": 4}, (1, 2, 4)),
        ("h100", {"data": 8, "model": 9}, (1, 3)),
        ("v5e", {"data": 256}, (256,)),
        ("v5e", {"data": 512}, (256,)),
        ("v5e", {"data": 64, "model": 8}, (32, 8)),
        ("v7", {"data": 18432}, (18432,)),
    ],
)
def test_minor_axes_lie_within_a_domain_and_major_ones_cross(hardware, axes, within):
    network = network_of(hardware, axes)
    assert tuple(network.within.values()) == within
    assert list(network.within) == list(axes)
    assert math.prod(network.within.values()) <= network.hardware.domain
    found = network.seconds(tuple(axes), S)
    assert (found.slow > 0) == (axes != dict(zip(axes, within, strict=True)))


# ------------------------------------------------------------------ tori


def test_a_ring_gathers_in_the_same_time_however_long():
    # A ring brings from both sides, L in all; without its last hop it is a line of half of that.
    assert seconds("v6e", {"data": 16, "model": 16}, "data").fast == pytest.approx(S * 15 / 16 / L)
    assert seconds("v5p", {"data": 16, "model": 4}, "model").fast == pytest.approx(S * 3 / 4 / L)
    line = seconds("v6e", {"data": 4, "model": 4}, "data").fast
    assert line == pytest.approx(S * 3 / 4 / (L / 2))


def test_two_dims_of_a_torus_have_the_bandwidth_of_both():
    axes = {"data": 16, "model": 4}  # v5p:4x4x4
    assert network_of("v5p", axes).torus == (4, 4, 4)
    assert seconds("v5p", axes, "data").fast == pytest.approx(S * 15 / 16 / (2 * L))


def test_the_phases_of_a_cube_take_three_quarters_of_its_all_reduce():
    network, rate = network_of("v4", {"data": 1024}), find_hardware("v4").link_bandwidth
    assert network.torus == (8, 8, 16)
    scatter = network.seconds(("data",), S, "reduce-scatter").fast
    assert scatter == pytest.approx(S * (63 / 64 / (2 * rate) + 15 / 16 / 64 / rate))
    whole = network.seconds(("data",), S, "all-reduce").fast
    assert whole == pytest.approx(2 * S * 1023 / 1024 / (3 * rate))
    assert scatter / whole == pytest.approx(3 / 4, rel=0.02)
    bytes_moved = [63 / 64, 15 / 16 / 64]
    assert sum(bytes_moved) == pytest.approx(1023 / 1024)  # phases move what one gather would


def test_the_phases_of_a_flat_torus_gain_nothing_over_its_all_reduce():
    network = network_of("v5e", {"data": 256})  # one of two dims at a time, both at once
    both = 2 * network.hardware.link_bandwidth
    scatter, whole = (network.seconds(("data",), S, c) for c in ("reduce-scatter", "all-reduce"))
    assert scatter.fast == pytest.approx(whole.fast) == 2 * S * 255 / 256 / both


def test_sparse_cores_move_over_all_dims_at_once():
    axes = {"data": 1024}
    network = network_of("v5p", axes)
    for collective in ("all-gather", "reduce-scatter"):
        found = network.seconds(("data",), S, collective)
        assert found.fast == pytest.approx(S * 1023 / 1024 / (3 * L))
    flat = network_of("v5e", {"data": 16})
    assert len(flat.phases(("data",), "reduce-scatter")) == 2
    assert len(flat.phases(("data",), "all-gather")) == 1


def test_groups_between_each_others_members_share_the_links():
    axes = {"data": 32, "model": 2}  # v5p:4x4x4: the model axis takes neighbours along x
    network = network_of("v5p", axes)
    assert network.phases(("model",), "reduce-scatter") == ((2, about(1 / 2 / (L / 2))),)
    # Of the ring of 4, a group has every other chip; the two groups share its links.
    assert network.phases(("data",), "reduce-scatter") == ((32, about(31 / 32 / (L / 2 + L + L))),)
    everything = network.seconds(("data", "model"), S, "all-reduce")  # has the whole ring again
    assert everything.fast == pytest.approx(2 * S * 63 / 64 / (3 * L))


def test_devices_of_a_chip_are_a_phase_of_their_own():
    bare = dataclasses.replace(HARDWARE["v7"], sparse_cores=False)
    network = network_of(bare, {"data": 128})
    assert network.torus == (4, 4, 4)
    cube, chip = network.phases(("data",), "reduce-scatter")
    assert cube == (64, about(63 / 64 / (3 * 9e10)))
    assert chip == (2, about(1 / 2 / (6 * 9e10)))
    whole = network.seconds(("data",), S, "all-reduce").fast
    # With a scatter on the chip first, half of the tensor is left to the cube's links.
    assert whole == pytest.approx(2 * S / 2 * 63 / 64 / 2.7e11)
    assert network_of("tpu7x", {"data": 1}).torus == (1, 1, 1)
    pair = network_of("tpu7x", {"data": 4, "model": 2})
    assert pair.phases(("model",), "reduce-scatter") == ((2, about(1 / 2 / 5.4e11)),)
    assert network_of("tpu7x", {"data": 3}).torus == (1, 1, 3)


def test_slices_are_joined_by_the_data_centre_network():
    found = seconds("v5e", {"data": 512})  # two slices of 16 x 16, a 256th of the tensor a chip
    assert found.slow == pytest.approx(S / 256 / 2 / 3.125e9)
    assert found.fast == seconds("v5e", {"data": 256}).fast
    small = dataclasses.replace(HARDWARE["v5p"], domain=8)  # slices of 2 x 2 x 2
    network = network_of(small, {"data": 16})
    assert (network.torus, network.across) == ((2, 2, 2), {"data": 2})
    across = network_of(small, {"data": 2, "model": 8})
    assert across.seconds(("data",), S) == Seconds(0.0, about(S / 2 / 6.25e9))


def test_a_torus_that_nobody_compiled_for_is_spanned_at_once():
    unknown = dataclasses.replace(HARDWARE["v5p"], span=0, sparse_cores=False)
    assert len(network_of(unknown, {"data": 64}).phases(("data",), "reduce-scatter")) == 1


@settings(deadline=None)  # the solver's first call takes long on a busy machine
@given(
    sizes=st.lists(st.integers(2, 6), min_size=2, max_size=3),
    widths=st.lists(st.integers(1, 20), min_size=3, max_size=3),
)
def test_dims_at_once_take_as_long_as_the_best_mixture_of_orders(sizes, widths):
    # By hand: along the first dim of an order (p - 1) / n, along the next as much for each of p.
    widths, n = widths[: len(sizes)], math.prod(sizes)
    loads = []
    for order in itertools.permutations(range(len(sizes))):
        load, gathered = [0.0] * len(sizes), 1
        for dim in order:
            load[dim] = gathered * (sizes[dim] - 1) / n
            gathered *= sizes[dim]
        loads.append(load)
    # Minimise t: mixture @ loads <= t * widths, mixture >= 0, sum(mixture) = 1.
    found = linprog(
        [*[0] * len(loads), 1],
        A_ub=np.column_stack([np.array(loads).T, -np.array(widths)]),
        b_ub=np.zeros(len(sizes)),
        A_eq=[[*[1] * len(loads), 0]],
        b_eq=[1],
    )
    assert gather_time(sizes, widths) == pytest.approx(found.fun, rel=1e-6)


def mesh_of(network):
    """Place absent devices as `zerojax.make_mesh` places them."""
    dims = (*network.torus, *(1,) * (3 - len(network.torus)), network.hardware.devices_per_chip)
    places = sorted(np.ndindex(*dims), key=lambda place: (*place[2::-1], place[3]))
    kind = network.hardware.device_kinds[0]
    chips = [Chip(kind, place[:3], place[3], number) for number, place in enumerate(places)]
    mesh = mesh_utils.create_device_mesh(
        tuple(network.axes.values()), devices=chips, allow_split_physical_axes=True
    )
    return in_order(Mesh(mesh, tuple(network.axes)))


@pytest.mark.parametrize("model", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        *itertools.product(("v4", "v5p"), (8, 32, 64, 128, 1024)),
        *itertools.product(("v7",), (8, 32, 128, 1024)),
        *itertools.product(("v5e", "v6e"), (4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_phases_are_those_in_which_zerojax_reduces(name, num_devices, model):
    axes = {"data": num_devices // model, "model": model}
    bare = dataclasses.replace(HARDWARE[name], sparse_cores=False)  # they need no phases
    network = network_of(bare, {axis: size for axis, size in axes.items() if size > 1})
    mesh = mesh_of(network)
    for over in (*((axis,) for axis in network.axes), tuple(network.axes)):
        found = find_phases(mesh, over)
        if len(over) > 1 and any(read_sub_axes(mesh, axis) is None for axis in over):
            continue  # each axis by itself is one collective in whatever order; both are not
        sizes = [math.prod(found.mesh.shape[part] for part in phase) for phase in found.axes]
        assert [count for count, _ in network.phases(over, "reduce-scatter")] == sizes


@settings(deadline=None)  # a mesh of 4096 devices takes long on a busy machine
@given(num_devices=st.integers(1, 4096), name=st.sampled_from(sorted(HARDWARE)))
def test_no_gather_is_faster_than_all_links_of_a_device(num_devices, name):
    network = network_of(name, {"data": num_devices})
    found = network.seconds(("data",), S)
    one, within = network.hardware, network.within["data"]
    widest = one.link_bandwidth * max(one.torus, 1) + one.chip_bandwidth
    assert found.fast >= S * (1 - 1 / within) / widest * (1 - 1e-9)
    across = network.across["data"]
    assert found.slow >= S / within * (1 - 1 / across) / one.slow_bandwidth * (1 - 1e-9)
    assert network.seconds(("data",), S, "all-reduce").slow == pytest.approx(2 * found.slow)


# ------------------------------------------------------------------ words and refusals


def test_seconds_add_up():
    total = Seconds(1.0, 2.0) + Seconds(0.5, 0.0) * 4
    assert total == Seconds(3.0, 2.0)
    network = network_of("h100", {"data": 16})
    assert network.seconds(("data",), 0) == Seconds(0.0, 0.0)
    once, thrice = network.seconds(("data",), S) * 3, network.seconds(("data",), 3 * S)
    assert dataclasses.astuple(once) == pytest.approx(dataclasses.astuple(thrice))
