"""Activation formulas give the papers' figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planner import paper
from zerojax.planner import _activations as activations
from zerojax.planner._activations import checkpoint_bytes, layer_activation_bytes

SMALL = {"batch": 2, "num_tokens": 16, "width": 32}
GPT_100B = {"batch": 32, "num_tokens": 1024, "width": 8192, "num_layers": 125}
COUNT = st.integers(1, 4096)


def test_gpt2_keeps_60_gb_without_checkpoints():
    elements = activations.activation_elements(batch=32, num_tokens=1024, width=1600, num_layers=48)
    assert round(2 * elements / 1e9) == paper.GPT2_ACTIVATIONS_GB


def test_checkpoints_of_100b_as_each_section_counts_them():
    assert checkpoint_bytes(**GPT_100B) / 1e9 == pytest.approx(67.1, abs=0.01)
    assert checkpoint_bytes(**GPT_100B) / 1e9 > paper.CHECKPOINTS_GB_SECTION_3
    one_byte = checkpoint_bytes(**GPT_100B, bytes_per_element=1) / 1e9
    assert int(one_byte) == paper.CHECKPOINTS_GB_SECTION_6
    cut = checkpoint_bytes(**GPT_100B, bytes_per_element=1, model_axis=16) / 1e9
    assert round(cut) == paper.PARTITIONED_GB_SECTION_6


@pytest.mark.parametrize("row", paper.INFINITY, ids=lambda row: f"{row[0]}x{row[1]}")
def test_infinity_checkpoints_and_working_memory(row):
    layers, width, heads, _, checkpoints, _, working = row
    sizes = {"num_tokens": 1024, "width": width}
    kept = checkpoint_bytes(batch=32, num_layers=layers, **sizes)
    assert kept / 2**40 == pytest.approx(checkpoints, abs=0.0051)
    between = activations.working_activation_bytes(batch=4, num_heads=heads, **sizes)
    assert between / 2**30 == pytest.approx(working, abs=0.0051)


def test_fewer_checkpoints_take_less_and_leave_more_between_them():
    every, fourth = (checkpoint_bytes(**GPT_100B, interval=n) for n in (1, 4))
    assert fourth == every / 4
    sizes = {**SMALL, "num_heads": 4}
    one, four = (activations.working_activation_bytes(**sizes, interval=n) for n in (1, 4))
    assert four == 4 * one


def test_section_8_partitioned_checkpoints_move_less_than_a_tenth_more():
    bsh = 2 * 16 * 32
    moved = activations.model_parallel_elements(**SMALL)
    added = activations.checkpoint_gather_elements(**SMALL)
    assert (moved, added) == (12 * bsh, bsh)
    assert added / moved < 0.1


def test_section_8_offloading_moves_each_part_there_and_back():
    whole = activations.checkpoint_gather_elements(**SMALL)
    assert activations.checkpoint_host_elements(**SMALL) == 2 * whole
    assert activations.checkpoint_host_elements(**SMALL, model_axis=16) == 2 * whole / 16


@pytest.mark.parametrize(
    ("choices", "per_element"),
    [
        ({}, lambda t, scores: 34 + scores),
        ({"model_axis": 8}, lambda t, scores: 10 + 24 / t + scores / t),
        ({"model_axis": 8, "sequence_parallel": True}, lambda t, scores: (34 + scores) / t),
        ({"model_axis": 8, "recompute": "attention"}, lambda t, scores: 10 + 24 / t),
        (
            {"model_axis": 8, "sequence_parallel": True, "recompute": "attention"},
            lambda t, scores: 34 / t,
        ),
        ({"model_axis": 8, "recompute": "full"}, lambda t, scores: 2),
    ],
    ids=["plain", "tensor", "tensor+sequence", "selective", "selective+sequence", "full"],
)
def test_megatrons_bytes_per_layer(choices, per_element):
    b, s, h, a = 3, 2048, 12288, 96
    got = layer_activation_bytes(batch=b, num_tokens=s, width=h, num_heads=a, **choices)
    wanted = s * b * h * per_element(choices.get("model_axis", 1), 5 * a * s / h)
    assert got == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("heads", "width", "scores", "saved"),
    [(96, 12288, 80, 0.70), (128, 20480, 64, 0.65)],
    ids=["GPT-3", "MT-NLG"],
)
def test_selective_recomputation_saves_what_the_paper_says(heads, width, scores, saved):
    sizes = {"batch": 1, "num_tokens": 2048, "width": width, "num_heads": heads}
    every = layer_activation_bytes(**sizes)
    assert every / (2048 * width) == pytest.approx(34 + scores)
    selective = layer_activation_bytes(**sizes, recompute="attention")
    assert round(1 - selective / every, 2) == saved


@given(COUNT, COUNT, COUNT, COUNT, st.sampled_from([1, 2, 8, 64]))
def test_recomputing_more_keeps_less(batch, num_tokens, width, num_heads, model_axis):
    sizes = {"batch": batch, "num_tokens": num_tokens, "width": width, "num_heads": num_heads}
    none, attention, full = (
        layer_activation_bytes(**sizes, recompute=what, model_axis=model_axis)
        for what in ("none", "attention", "full")
    )
    assert none > attention > full


@pytest.mark.parametrize("name", ["batch", "num_tokens", "width"])
def test_bad_counts_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number"):
        activations.block_elements(**SMALL | {name: 0})


def test_an_unknown_recomputation_is_refused():
    with pytest.raises(ValueError, match=r"recompute must be one of .*'full'.*, got 'some'"):
        layer_activation_bytes(**SMALL, num_heads=1, recompute="some")
