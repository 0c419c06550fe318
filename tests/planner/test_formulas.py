"""The formulas give every figure that the papers print, and hold beyond them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from tests.planner import paper
from zerojax.layout import STAGES, make_layout
from zerojax.planner import model_state_bytes, theory_of
from zerojax.recipe import Recipe

PARAMS = st.integers(1, 10**14)
SHARDS = st.integers(1, 10**5)
STAGE = st.sampled_from(sorted(STAGES))
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
    assert theory.elements == paper_volume * params.size * (1 - 1 / num_shards)


def test_one_and_a_half_billion_parameters_take_24_gb():
    """Section 3.1: 3 GB of fp16 parameters, 24 GB of states."""
    assert model_state_bytes(1.5e9, stage=0, num_shards=1) == 24e9


def test_reductions_of_section_5():
    """4 and 8 times less for stages 1 and 2 as N grows, N times less for stage 3."""
    many = 10**9
    assert 16 / model_state_bytes(1, stage=1, num_shards=many) == pytest.approx(4)
    assert 16 / model_state_bytes(1, stage=2, num_shards=many) == pytest.approx(8)
    assert 16 / model_state_bytes(1, stage=3, num_shards=many) == pytest.approx(many)


@given(PARAMS, STAGE)
def test_one_shard_holds_everything_at_every_stage(params, stage):
    assert model_state_bytes(params, stage=stage, num_shards=1) == 16 * params


@given(PARAMS, SHARDS)
def test_a_higher_stage_never_takes_more(params, num_shards):
    taken = [model_state_bytes(params, stage=stage, num_shards=num_shards) for stage in STAGES]
    assert all(more >= less * (1 - 1e-12) for more, less in itertools.pairwise(taken))


@given(PARAMS, STAGE, SHARDS)
def test_more_shards_never_take_more(params, stage, num_shards):
    fewer, more = (
        model_state_bytes(params, stage=stage, num_shards=n) for n in (num_shards, num_shards + 1)
    )
    assert more <= fewer * (1 + 1e-12)


@given(PARAMS, STAGE, SHARDS)
def test_only_the_stages_kinds_are_cut(params, stage, num_shards):
    widths = {"parameter": 2, "gradient": 2, "optimizer": 12}
    cut = sum(width for kind, width in widths.items() if kind in STAGES[stage])
    held = model_state_bytes(params, stage=stage, num_shards=num_shards)
    assert held == pytest.approx(params * (16 - cut + cut / num_shards))


def test_a_master_is_cut_wherever_the_optimizer_is():
    """Its bytes are in K: that is right only while no stage parts the two."""
    for kinds in STAGES.values():
        assert ("master" in kinds) == ("optimizer" in kinds)


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
