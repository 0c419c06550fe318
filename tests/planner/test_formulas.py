"""The formulas give every figure that the papers print, and hold beyond them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import paper
from zerojax.layout import STAGES
from zerojax.planner import _formulas as formulas
from zerojax.planner._formulas import model_state_bytes, model_state_bytes_by_kind, step_volume

PARAMS = st.integers(1, 10**14)
SHARDS = st.integers(1, 10**5)
STAGE = st.sampled_from(sorted(STAGES))
WIDTHS = st.fixed_dictionaries(
    {
        "optimizer_bytes_per_param": st.floats(0, 16),
        "param_bytes": st.floats(0.5, 4),
        "grad_bytes": st.floats(0, 6),
    }
)
TABLE_1 = [
    (params, num_shards, stage, printed)
    for params, rows in paper.TABLE_1.items()
    for num_shards, row in zip(paper.TABLE_1_SHARDS, rows, strict=True)
    for stage, printed in zip((1, 2, 3), row, strict=True)
]


@pytest.mark.parametrize(("stage", "printed"), paper.FIGURE_1.items())
def test_figure_1(stage, printed):
    gb = model_state_bytes(7.5e9, stage=stage, num_shards=64) / 1e9
    assert round(gb, 1) == printed


@pytest.mark.parametrize(("params", "num_shards", "stage", "printed"), TABLE_1)
def test_table_1(params, num_shards, stage, printed):
    gb = model_state_bytes(params, stage=stage, num_shards=num_shards) / 1e9
    if printed >= 100:
        assert int(gb) == printed, "large cells are truncated"
    else:
        digits = 2 if printed < 2 else 1
        assert abs(gb - printed) <= 0.5 * 10**-digits + 1e-9, "small cells are rounded"


@pytest.mark.parametrize(("stage", "paper_volume"), paper.SECTION_7.items())
@pytest.mark.parametrize("num_shards", [1, 2, 8, 1024])
def test_section_7_volumes(stage, paper_volume, num_shards):
    moved = step_volume(7.5e9, stage=stage, num_shards=num_shards)
    assert moved == pytest.approx(paper_volume * 7.5e9 * (num_shards - 1) / num_shards)


def test_one_and_a_half_billion_parameters_take_24_gb():
    """Section 3.1: 3 GB of fp16 parameters, 24 GB of states."""
    kinds = model_state_bytes_by_kind(1.5e9, stage=0, num_shards=1)
    assert kinds == {"parameter": 3e9, "gradient": 3e9, "optimizer": 18e9}


def test_reductions_of_section_5():
    """4 and 8 times less for stages 1 and 2 as N grows, N times less for stage 3."""
    many = 10**9
    assert 16 / model_state_bytes(1, stage=1, num_shards=many) == pytest.approx(4)
    assert 16 / model_state_bytes(1, stage=2, num_shards=many) == pytest.approx(8)
    assert 16 / model_state_bytes(1, stage=3, num_shards=many) == pytest.approx(many)


@given(PARAMS, STAGE, WIDTHS)
def test_one_shard_holds_everything_at_every_stage(params, stage, widths):
    assert model_state_bytes(params, stage=stage, num_shards=1) == 16 * params
    whole = sum(widths.values()) * params
    assert model_state_bytes(params, stage=stage, num_shards=1, **widths) == pytest.approx(whole)


@given(PARAMS, SHARDS, WIDTHS)
def test_a_higher_stage_never_takes_more(params, num_shards, widths):
    taken = [
        model_state_bytes(params, stage=stage, num_shards=num_shards, **widths) for stage in STAGES
    ]
    assert all(more >= less * (1 - 1e-12) for more, less in itertools.pairwise(taken))


@given(PARAMS, STAGE, SHARDS, WIDTHS)
def test_more_shards_never_take_more_and_move_no_less(params, stage, num_shards, widths):
    fewer, more = (
        model_state_bytes(params, stage=stage, num_shards=n, **widths)
        for n in (num_shards, num_shards + 1)
    )
    assert more <= fewer * (1 + 1e-12)
    fewer, more = (
        step_volume(params, stage=stage, num_shards=n) for n in (num_shards, num_shards + 1)
    )
    assert fewer <= more < formulas.VOLUMES[stage] * params


@given(PARAMS, STAGE, SHARDS)
def test_kinds_add_up_and_only_the_stages_kinds_are_cut(params, stage, num_shards):
    kinds = model_state_bytes_by_kind(params, stage=stage, num_shards=num_shards)
    assert sum(kinds.values()) == model_state_bytes(params, stage=stage, num_shards=num_shards)
    for kind, width in (("parameter", 2), ("gradient", 2), ("optimizer", 12)):
        part = num_shards if kind in STAGES[stage] else 1
        assert kinds[kind] == pytest.approx(width * params / part)


def test_a_master_is_cut_wherever_the_optimizer_is():
    """Its bytes are in K: that is right only while no stage parts the two."""
    for kinds in STAGES.values():
        assert ("master" in kinds) == ("optimizer" in kinds)


def test_other_optimizers_and_precisions():
    sgd = model_state_bytes(1e9, stage=1, num_shards=8, optimizer_bytes_per_param=0)
    assert sgd == 4e9
    fp32_adam = {"optimizer_bytes_per_param": 8, "param_bytes": 4, "grad_bytes": 4}
    assert model_state_bytes(1e9, stage=3, num_shards=8, **fp32_adam) == 2e9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_params": -3}, "num_params must be a whole number of at least 1, got -3"),
        ({"num_params": 1.5}, "num_params must be a whole number"),
        ({"num_shards": 0}, "num_shards must be a whole number of at least 1, got 0"),
        ({"num_shards": 2.5}, "num_shards must be a whole number"),
        ({"stage": 4}, "stage must be one of"),
        ({"param_bytes": 0}, "param_bytes must be a number above 0"),
        ({"grad_bytes": -2}, "grad_bytes must be a number of at least 0"),
        ({"optimizer_bytes_per_param": float("nan")}, "optimizer_bytes_per_param must be"),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, message):
    arguments = {"num_params": 7.5e9, "stage": 2, "num_shards": 64} | changed
    with pytest.raises(ValueError, match=message) as caught:
        model_state_bytes(arguments.pop("num_params"), **arguments)
    assert "\n" not in str(caught.value)


def test_offload_moves_four_bytes_a_parameter():
    """ZeRO-Offload: 2 Psi of gradients down and 2 Psi of parameters up; a part of it per device."""
    assert formulas.offload_traffic_bytes(10e9) == 4 * 10e9
    assert formulas.offload_traffic_bytes(10e9, num_shards=16) == 4 * 10e9 / 16


@pytest.mark.parametrize("row", paper.INFINITY, ids=lambda row: f"{row[0]}x{row[1]}")
def test_infinity_states_and_largest_linear(row):
    layers, width, _, states, _, linear, _ = row
    psi = 12 * layers * width**2
    assert formulas.infinity_state_bytes(psi) == 240 * layers * width**2
    assert formulas.infinity_state_bytes(psi) / 2**40 == pytest.approx(states, abs=0.0051)
    if linear is not None:
        assert formulas.largest_linear_bytes(width) / 2**30 == pytest.approx(linear, abs=0.0051)


@pytest.mark.parametrize(
    ("intensity", "bandwidth", "least"),
    [
        (1024 * 1, 70e9, 0.5),  # parameters and gradients, batch 1: 70 GB/s keep half of the peak
        (1024 * 2 / 4, 1.5e12, 0.9),  # optimizer states, batch 2: 1.5 TB/s keep 90%
        (24 * 2048, 2e9, 0.5),  # checkpoints at width 2048: 2 GB/s keep half
        (24 * 8192, 1e9, 0.5),  # at width 8192 1 GB/s does
    ],
)
def test_infinity_bandwidths(intensity, bandwidth, least):
    """ZeRO-Infinity, section 4: 70 TFLOP/s a device, 1024 tokens, nothing overlapped."""
    got = formulas.transfer_efficiency(intensity=intensity, bandwidth=bandwidth, flops=70e12)
    assert least < got < 1
    fed = formulas.transfer_efficiency(intensity=intensity, bandwidth=1e20, flops=70e12)
    assert fed == pytest.approx(1, abs=1e-3)


def test_zero_plus_plus_moves_a_quarter():
    plain = formulas.cross_node_volume()
    assert (plain.forward_gather, plain.backward_gather, plain.reduction) == (1, 1, 1)
    assert plain.total == formulas.VOLUMES[3]
    best = formulas.cross_node_volume(weight_bits=8, gradient_bits=4, node_copy=True)
    assert (best.forward_gather, best.backward_gather, best.reduction) == (0.5, 0, 0.25)
    assert best.total == 0.75 == plain.total / 4


def test_a_node_copy_costs_a_share_of_the_parameters():
    """1024 devices, 16 a node: 9 times what stage 3 takes, and 114 times less than stage 0."""
    stage_3 = model_state_bytes(1e9, stage=3, num_shards=1024)
    copied = stage_3 + formulas.node_copy_bytes(1e9, devices_per_node=16)
    assert copied / stage_3 == pytest.approx(9)
    assert round(16e9 / copied) == 114
