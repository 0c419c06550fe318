"""The formulas give every figure that the papers print, and hold beyond them."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from tests.planner import paper
from zerojax.layout import STAGES, make_layout
from zerojax.planner import BytesPerParam, model_state_bytes, theory_of
from zerojax.recipe import Recipe

PARAMS = st.integers(1, 10**14)
SHARDS = st.integers(1, 10**5)
STAGE = st.sampled_from(sorted(STAGES))
WIDTHS = st.builds(
    BytesPerParam,
    parameter=st.floats(0.5, 4),
    gradient=st.floats(0, 6),
    optimizer=st.floats(0, 16),
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
    params = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    layout = make_layout(params, AbstractMesh((num_shards,), ("data",)), stage=stage)
    theory = theory_of(layout, Recipe())
    assert theory.elements == theory.paper == paper_volume * params.size * (1 - 1 / num_shards)


def test_one_and_a_half_billion_parameters_take_24_gb():
    """Section 3.1: 3 GB of fp16 parameters, 24 GB of states."""
    assert model_state_bytes(1.5e9, stage=0, num_shards=1) == 24e9
    alone = BytesPerParam(gradient=0, optimizer=0)
    assert model_state_bytes(1.5e9, stage=0, num_shards=1, bytes_per_param=alone) == 3e9


def test_reductions_of_section_5():
    """4 and 8 times less for stages 1 and 2 as N grows, N times less for stage 3."""
    many = 10**9
    assert 16 / model_state_bytes(1, stage=1, num_shards=many) == pytest.approx(4)
    assert 16 / model_state_bytes(1, stage=2, num_shards=many) == pytest.approx(8)
    assert 16 / model_state_bytes(1, stage=3, num_shards=many) == pytest.approx(many)


@given(PARAMS, STAGE, WIDTHS)
def test_one_shard_holds_everything_at_every_stage(params, stage, widths):
    assert model_state_bytes(params, stage=stage, num_shards=1) == 16 * params
    whole = (widths.parameter + widths.gradient + widths.optimizer) * params
    held = model_state_bytes(params, stage=stage, num_shards=1, bytes_per_param=widths)
    assert held == pytest.approx(whole)


@given(PARAMS, SHARDS, WIDTHS)
def test_a_higher_stage_never_takes_more(params, num_shards, widths):
    taken = [
        model_state_bytes(params, stage=stage, num_shards=num_shards, bytes_per_param=widths)
        for stage in STAGES
    ]
    assert all(more >= less * (1 - 1e-12) for more, less in itertools.pairwise(taken))


@given(PARAMS, STAGE, SHARDS, WIDTHS)
def test_more_shards_never_take_more(params, stage, num_shards, widths):
    fewer, more = (
        model_state_bytes(params, stage=stage, num_shards=n, bytes_per_param=widths)
        for n in (num_shards, num_shards + 1)
    )
    assert more <= fewer * (1 + 1e-12)


@given(PARAMS, STAGE, SHARDS)
def test_only_the_stages_kinds_are_cut(params, stage, num_shards):
    nothing = BytesPerParam(parameter=1e-300, gradient=0, optimizer=0)
    for kind in ("parameter", "gradient", "optimizer"):
        part = num_shards if kind in STAGES[stage] else 1
        widths = dataclasses.replace(nothing, **{kind: 2})
        held = model_state_bytes(params, stage=stage, num_shards=num_shards, bytes_per_param=widths)
        assert held == pytest.approx(2 * params / part)


def test_a_master_is_cut_wherever_the_optimizer_is():
    """Its bytes are in K: that is right only while no stage parts the two."""
    for kinds in STAGES.values():
        assert ("master" in kinds) == ("optimizer" in kinds)


def test_other_optimizers_and_precisions():
    sgd = BytesPerParam(optimizer=0)
    assert model_state_bytes(1e9, stage=1, num_shards=8, bytes_per_param=sgd) == 4e9
    fp32_adam = BytesPerParam(parameter=4, gradient=4, optimizer=8)
    assert model_state_bytes(1e9, stage=3, num_shards=8, bytes_per_param=fp32_adam) == 2e9


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_params": -3}, "num_params must be a whole number of at least 1, got -3"),
        ({"num_params": 1.5}, "num_params must be a whole number"),
        ({"num_shards": 0}, "num_shards must be a whole number of at least 1, got 0"),
        ({"num_shards": 2.5}, "num_shards must be a whole number"),
        ({"stage": 4}, "stage must be one of"),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, message):
    arguments = {"num_params": 7.5e9, "stage": 2, "num_shards": 64} | changed
    with pytest.raises(ValueError, match=message) as caught:
        model_state_bytes(arguments.pop("num_params"), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parameter": 0}, "parameter must be a number above 0"),
        ({"gradient": -2}, "gradient must be a number of at least 0"),
        ({"optimizer": float("nan")}, "optimizer must be a number of at least 0, got nan"),
    ],
)
def test_bytes_that_no_parameter_takes_are_refused(changed, message):
    with pytest.raises(ValueError, match=f"^BytesPerParam: {message}"):
        BytesPerParam(**changed)


@pytest.mark.parametrize("row", paper.INFINITY, ids=lambda row: f"{row[0]}x{row[1]}")
def test_states_of_infinity(row):
    """20 bytes a parameter: fp32 gradients are kept beside the fp16 ones."""
    layers, width, _, states, _ = row
    both = BytesPerParam(gradient=2 + 4)
    params = 12 * layers * width**2
    held = model_state_bytes(params, stage=0, num_shards=1, bytes_per_param=both)
    assert held == 240 * layers * width**2
    assert held / 2**40 == pytest.approx(states, abs=0.0051)
