"""A plan, compiled for the hardware that it is planned for."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.aot import compile_plan
from zerojax.models import gpt

# Few positions: XLA sums their gradient whole, also over slow links.
CONFIG = gpt.Config(num_layers=4, width=256, num_heads=4, vocab_size=1024, context=32)
SHAPES = jax.eval_shape(functools.partial(gpt.init, CONFIG), jax.random.key(0))
WORKLOAD = zerojax.Workload(
    loss_fn=functools.partial(gpt.loss, CONFIG), batch=jax.ShapeDtypeStruct((32, 33), jnp.int32)
)
TX = optax.adamw(1e-3)


def planned(stage=2, num_devices=8, **placement):
    recipe, placement = zerojax.Recipe(precision="bf16"), zerojax.Placement(**placement)
    options = {"recipe": recipe, "workload": WORKLOAD, "placement": placement}
    return zerojax.plan(
        SHAPES, TX, stage=stage, num_devices=num_devices, hardware="h100", **options
    )


@pytest.mark.aot("cuda")
@pytest.mark.parametrize(
    ("topology", "stage", "placement"),
    [
        ("h100:1x8", 3, {}),
        ("h100:2x8", 2, {"num_shards": 8}),
        ("h100:2x8", 3, {"num_shards": 8, "wide_optimizer": True}),
    ],
)
def test_a_plan_is_compiled_as_it_was_planned(topology, stage, placement):
    plan = planned(stage, 16 if "2x8" in topology else 8, **placement)
    report = compile_plan(plan, SHAPES, TX, WORKLOAD, topology=topology)
    report.raise_if_problems()
    assert report.judged_volume == pytest.approx(plan.volume, rel=0.05)
    held = report.memory
    assert held.parameters == plan.bytes.parameters
    assert held.optimizer + held.masters == pytest.approx(plan.bytes.optimizer, rel=0.01)


@pytest.mark.parametrize(
    ("plan", "workload", "topology", "words"),
    [
        ({}, WORKLOAD, "v5e:2x4", "'v5e:2x4' has 8 x v5e, and the plan is of 8 x h100"),
        ({}, WORKLOAD, "h100:2x8", "'h100:2x8' has 16 x h100, and the plan is of 8 x h100"),
        ({"model_axis": 2}, WORKLOAD, "h100:1x8", r"model_axis=2.*model_axes=\(1,\)"),
        ({}, zerojax.Workload(), "h100:1x8", r"give Workload\(loss_fn=..., batch=...\)"),
    ],
)
def test_what_can_not_be_compiled_is_refused_before_a_compiler_is_asked_for(
    plan, workload, topology, words
):
    with pytest.raises(ValueError, match=words):
        compile_plan(planned(**plan), SHAPES, TX, workload, topology=topology)


def test_what_is_no_plan_is_named():
    with pytest.raises(TypeError, match="a Plan is expected, got int"):
        compile_plan(3, SHAPES, TX, WORKLOAD, topology="h100:1x8")
