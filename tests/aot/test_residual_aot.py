"""Activation checkpoints as compilers lay them out: Pa, Pa+cpu, and what the model axis moves."""

import argparse
import functools
import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "residual"
SIZES = {"layers": 5, "width": 256, "tokens": 128, "batch": 4, "model": 4}
TARGETS = [
    pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
    pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu")),
]
#: Bytes of one layer's input: 16-bit numbers.
LAYER = SIZES["batch"] * SIZES["tokens"] * SIZES["width"] * 2


@functools.cache
def measured(target, way):
    loader = importlib.machinery.SourceFileLoader("residual", str(SCRIPT))
    spec = importlib.util.spec_from_loader("residual", loader)
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    return script.measure(target, way, argparse.Namespace(**SIZES))


@pytest.mark.parametrize("target", TARGETS)
def test_partitioned_checkpoints_take_a_model_axis_of_the_bytes(target):
    whole, cut = measured(target, "whole"), measured(target, "Pa")
    assert whole["device"] == SIZES["layers"] * LAYER
    assert cut["device"] == pytest.approx(whole["device"] / SIZES["model"], rel=0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_partitioned_checkpoints_cost_one_gather_a_layer(target):
    """Layers move 10 messages each and the ends 4, of which a tenth is more than one a layer."""
    whole, cut = measured(target, "whole"), measured(target, "Pa")
    assert cut["messages"] - whole["messages"] == pytest.approx(SIZES["layers"], rel=0.05)
    assert cut["messages"] <= 1.1 * whole["messages"]


@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_checkpoints_lie_on_the_host(target):
    found = measured(target, "Pa+cpu")
    assert found["host"] == SIZES["layers"] * LAYER // SIZES["model"]
    assert found["device"] <= 2 * LAYER
