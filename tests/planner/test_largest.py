"""The largest model: table 2 of the paper, and its configurations."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import paper
from zerojax.planner import (
    CONFIGURATIONS,
    BytesPerParam,
    find_hardware,
    max_params,
    model_state_bytes,
)

#: What the paper's own runs reached of the memory that its formulas fill: the mean of table 2.
PAPER_USABLE = 0.82
TABLE_2 = {"memory": paper.TABLE_2_MEMORY, "num_shards": paper.TABLE_2_SHARDS}


@pytest.mark.parametrize("stage", paper.TABLE_2_THEORY)
def test_table_2_theory(stage):
    rows = paper.TABLE_2_THEORY[stage]
    one = max_params(**TABLE_2, stage=stage) / 1e9
    digits = 0 if rows[0] >= 100 else 1
    assert round(one, digits) == rows[0]
    for model_axis, printed in zip(paper.TABLE_2_AXES, rows, strict=True):
        assert max_params(**TABLE_2, stage=stage, model_axis=model_axis) / 1e9 == pytest.approx(
            one * model_axis
        )
        exact = rows[0] * model_axis
        # 512, 1024 and 2048 are printed as half a trillion, one and two.
        assert printed == pytest.approx(exact, rel=0.025 if exact > 500 else 1e-9)


@pytest.mark.parametrize(("stage", "least", "most"), [(0, 0.62, 0.65), (1, 0.81, 0.83)])
def test_table_2_measured_is_a_constant_share_of_the_theory(stage, least, most):
    columns = zip(paper.TABLE_2_MEASURED[stage], paper.TABLE_2_THEORY[stage], strict=True)
    shares = [measured / theory for measured, theory in columns]
    assert least <= min(shares) <= max(shares) <= most
    if stage == 1:
        assert round(sum(shares) / len(shares), 2) == PAPER_USABLE


def test_configurations_are_those_of_table_3():
    for name, (stage, partitioned, offloaded) in paper.TABLE_3.items():
        found = CONFIGURATIONS[name]
        assert found.stage == stage
        assert found.partitioned_checkpoints is partitioned
        assert found.offloaded_checkpoints is offloaded
        assert found.reported_params == paper.FIGURE_6[name] * 1e9
    assert list(CONFIGURATIONS) == list(paper.TABLE_3)


def test_memory_may_be_bytes_a_name_or_hardware():
    h100 = find_hardware("h100")
    twice = dataclasses.replace(h100, name="mine", memory=2 * h100.memory)
    named, given, counted, doubled = (
        max_params(memory, stage=2, num_shards=8) for memory in ("h100", h100, h100.memory, twice)
    )
    assert named == given == counted
    assert doubled == pytest.approx(2 * named)


@given(
    st.floats(100, 1e12),
    st.integers(0, 3),
    st.integers(1, 4096),
    st.sampled_from([1, 2, 16]),
    st.floats(0, 16),
)
def test_the_largest_fits_and_one_more_does_not(memory, stage, num_shards, model_axis, width):
    widths = {
        "stage": stage, "num_shards": num_shards, "bytes_per_param": BytesPerParam(optimizer=width)
    }  # fmt: skip
    most = max_params(memory, model_axis=model_axis, **widths)
    assert model_state_bytes(most, **widths) / model_axis <= memory * (1 + 1e-9)
    assert model_state_bytes(most + 1, **widths) / model_axis > memory * (1 - 1e-9)


def test_the_answer_to_an_impossible_limit_is_the_smallest_that_would_do():
    with pytest.raises(ValueError, match=r"hold no parameter; one takes 16$"):
        max_params(3, stage=0, num_shards=8)


@pytest.mark.parametrize(
    ("memory", "changed", "message"),
    [
        (-1, {}, "memory must be a number above 0, got -1"),
        (float("inf"), {}, "memory must be a number above 0"),
        ("h10", {}, "h100"),
        (32e9, {"num_shards": 0}, "num_shards must be a whole number"),
        (32e9, {"model_axis": 1.5}, "model_axis must be a whole number"),
    ],
)
def test_bad_input_is_refused_in_one_line(memory, changed, message):
    asked = {"num_shards": 8} | changed
    with pytest.raises(ValueError, match=message) as caught:
        max_params(memory, stage=2, **asked)
    assert "\n" not in str(caught.value)
