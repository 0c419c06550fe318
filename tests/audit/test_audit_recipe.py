"""The audit compares the states of a program with the recipe that they should follow."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.audit.audit_programs import compile_step, kinds, only, pair_loss, shapes_of
from zerojax.audit import Program, audit

TX = optax.adam(1e-3)
SHAPES = {"up": (64, 128), "down": (128, 64)}
MADE = {
    "fp32": zerojax.Recipe(),
    "bf16": zerojax.Recipe(precision="bf16"),
    "fp16": zerojax.Recipe(precision="fp16"),
    "pure": zerojax.Recipe(precision=zerojax.Precision(params=jnp.bfloat16)),
    "hosted": zerojax.Recipe(precision="bf16", offload=True),
}
WIDE = zerojax.Precision(params=jnp.float32)


@pytest.fixture(scope="module")
def layout(mesh8):
    return zerojax.make_layout(shapes_of(SHAPES), mesh8, stage=2)


@pytest.fixture(scope="module")
def programs(layout):
    """Compile a step of each recipe."""
    batch = jax.ShapeDtypeStruct((96, 64), jnp.float32)
    steps = {
        name: zerojax.make_train_step(pair_loss, TX, layout, recipe)
        for name, recipe in MADE.items()
    }
    return {
        name: Program.of(step.lower(step.abstract_state(), batch).compile())
        for name, step in steps.items()
    }


@pytest.mark.parametrize("name", MADE)
def test_its_own_recipe_is_clean_and_none_judges_no_states(name, programs, layout):
    assert audit(programs[name], layout, MADE[name]).problems == ()
    assert kinds(audit(programs[name], layout)).isdisjoint({"precision", "offload"})


@pytest.mark.parametrize(
    ("name", "precision", "words"),
    [
        ("fp32", "bf16", ["parameters in bfloat16", "float32"]),
        ("fp32", zerojax.Precision(params=jnp.bfloat16), ["parameters in bfloat16", "float32"]),
        ("bf16", "fp16", ["parameters in float16", "bfloat16"]),
        ("bf16", WIDE, ["parameters in float32", "bfloat16"]),
        ("bf16", zerojax.Precision(params=jnp.bfloat16), ["no masters", "masters beside"]),
        ("pure", "bf16", ["masters in float32", "no masters"]),
    ],
)
def test_another_precision_is_caught(name, precision, words, programs, layout):
    report = audit(programs[name], layout, zerojax.Recipe(precision=precision))
    found = [problem for problem in report.problems if problem.kind == "precision"]
    for word in words:
        assert any(word in str(problem) for problem in found), report
    assert all("with the recipe that the step was made with" in one.remedy for one in found)


def test_states_that_the_recipe_has_elsewhere_are_caught(programs, layout):
    problem = only(audit(programs["hosted"], layout, MADE["bf16"]), "offload")
    assert problem.seen == "in the host's memory"
    report = audit(programs["bf16"], layout, MADE["hosted"])
    found = [problem for problem in report.problems if problem.kind == "offload"]
    assert [one.where.split(":")[0] for one in found] == ["optimizer", "master"]


def test_a_loop_of_ones_own_is_judged_by_a_recipe_alone(make):
    program = Program.of(compile_step(pair_loss, make(2)))
    assert audit(program, make(2)).problems == ()
    assert audit(program, make(2), zerojax.Recipe()).problems == ()
    assert "precision" in kinds(audit(program, make(2), zerojax.Recipe(precision="bf16")))
