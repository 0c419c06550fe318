"""The formulas give every figure that the papers print, and hold beyond them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import paper
from zerojax.layout import STAGES
from zerojax.planner import model_state_bytes, offload_traffic_bytes, step_volume

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
    assert model_state_bytes(1.5e9, stage=0, num_shards=1) == 24e9
    alone = {"grad_bytes": 0, "optimizer_bytes_per_param": 0}
    assert model_state_bytes(1.5e9, stage=0, num_shards=1, **alone) == 3e9


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
    assert fewer <= more < paper.SECTION_7[stage] * params


@given(PARAMS, STAGE, SHARDS)
def test_only_the_stages_kinds_are_cut(params, stage, num_shards):
    nothing = {"param_bytes": 1e-300, "grad_bytes": 0, "optimizer_bytes_per_param": 0}
    kinds = {"gradient": "grad_bytes", "optimizer": "optimizer_bytes_per_param"}
    for kind, width in (kinds | {"parameter": "param_bytes"}).items():
        part = num_shards if kind in STAGES[stage] else 1
        held = model_state_bytes(params, stage=stage, num_shards=num_shards, **nothing | {width: 2})
        assert held == pytest.approx(2 * params / part)


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
    assert offload_traffic_bytes(10e9) == 4 * 10e9
    assert offload_traffic_bytes(10e9, num_shards=16) == 4 * 10e9 / 16


@pytest.mark.parametrize("row", paper.INFINITY, ids=lambda row: f"{row[0]}x{row[1]}")
def test_states_of_infinity(row):
    """20 bytes a parameter: fp32 gradients are kept beside the fp16 ones."""
    layers, width, _, states, _ = row
    held = model_state_bytes(12 * layers * width**2, stage=0, num_shards=1, grad_bytes=2 + 4)
    assert held == 240 * layers * width**2
    assert held / 2**40 == pytest.approx(states, abs=0.0051)
