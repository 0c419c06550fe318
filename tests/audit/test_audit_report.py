"""The report: a program kept and audited again, bytes by kind, tables and JSON."""

from __future__ import annotations

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.audit import Problem, Program, audit

SHAPES = {
    "bias": jax.ShapeDtypeStruct((64,), jnp.float32),
    "down": jax.ShapeDtypeStruct((128, 64), jnp.float32),
    "up": jax.ShapeDtypeStruct((64, 128), jnp.float32),
}
PSI = 64 + 2 * 128 * 64
MIXED = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
BATCH = 32
TX = optax.adam(1e-3)


def loss_fn(params, x):
    y = jnp.tanh(x.astype(params["up"].dtype) @ params["up"]) @ params["down"] + params["bias"]
    return jnp.mean((y - x).astype(jnp.float32) ** 2)


def init():
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), SHAPES)


@pytest.fixture(scope="module")
def layouts(mesh8):
    return {stage: zerojax.make_layout(SHAPES, mesh8, stage=stage) for stage in (1, 3)}


@pytest.fixture(scope="module")
def lowered(layouts):
    def lower(stage):
        step = zerojax.make_train_step(loss_fn, TX, layouts[stage], zerojax.Recipe(precision=MIXED))
        return step.lower(step.abstract_state(), jax.ShapeDtypeStruct((BATCH, 64), jnp.float32))

    return {stage: lower(stage) for stage in layouts}


@pytest.fixture(scope="module")
def programs(lowered):
    return {stage: Program.of(one.compile()) for stage, one in lowered.items()}


@pytest.fixture(scope="module")
def reports(programs, layouts):
    return {stage: audit(programs[stage], layouts[stage]) for stage in layouts}


@pytest.fixture
def broken(programs, layouts):
    """Give the audit of a program whose donations were struck out."""
    text = programs[1].text.split("\n", 1)
    header = text[0].replace("input_output_alias=", "forgotten=")
    program = dataclasses.replace(programs[1], text=f"{header}\n{text[1]}")
    return audit(program, layouts[1])


# ------------------------------------------------------------------ programs


def test_a_program_is_kept_as_json_and_audited_again(programs, layouts, reports):
    kept = Program.from_json(programs[1].to_json())
    assert kept == programs[1]
    assert audit(kept, layouts[1]) == reports[1]


def test_what_is_not_compiled_is_refused(lowered, layouts):
    with pytest.raises(TypeError, match=r"got a Lowered; hand over step.lower\(state, batch\)"):
        audit(lowered[1], layouts[1])


def test_what_is_no_recipe_is_refused(programs, layouts):
    with pytest.raises(TypeError, match="a Recipe is expected, got int"):
        audit(programs[1], layouts[1], 4)  # type: ignore[arg-type]


# ------------------------------------------------------------------ bytes


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_are_those_that_the_layout_counts(reports, layouts, stage):
    memory = reports[stage].memory
    counted = layouts[stage].bytes_per_device(TX, zerojax.Recipe(precision=MIXED))
    assert memory.parameters == counted["parameters"]
    assert memory.masters == counted["masters"]
    assert memory.optimizer == counted["optimizer"]
    assert memory.batch == BATCH * 64 * 4 // 8
    assert memory.gradients == memory.host == 0


@pytest.mark.parametrize("stage", [1, 3])
def test_theory_is_the_stages_formula(reports, stage):
    theory = reports[stage].memory.theory
    low = 2 * PSI / (8 if stage == 3 else 1)
    assert theory["parameters"] == theory["gradients"] == low
    assert theory["masters"] == 4 * PSI / 8
    assert theory["optimizer"] == pytest.approx(8 * PSI / 8, abs=4)  # and a counter
    assert theory["total"] == sum(theory.values()) - theory["total"]


def test_the_peak_is_the_sum_of_its_parts(reports, programs):
    memory, stats = reports[1].memory, programs[1].statistics
    parts = stats["argument_size_in_bytes"] + memory.outputs + memory.temporaries
    assert memory.peak == parts
    sizes = [one.bytes for one in memory.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 0


def test_states_on_the_host_are_counted_apart(programs, layouts, reports):
    inputs = tuple(
        dataclasses.replace(leaf, memory_kind="pinned_host") if leaf.role == "optimizer" else leaf
        for leaf in programs[1].inputs
    )
    memory = audit(dataclasses.replace(programs[1], inputs=inputs), layouts[1]).memory
    assert (memory.optimizer, memory.host) == (0, reports[1].memory.optimizer)


def test_a_peak_is_no_more_than_all_that_is_there(programs):
    """Of a small program libtpu tells the peak of vector memory."""
    program = dataclasses.replace(programs[1], platform="tpu")
    for told, peak in ((2**30, programs[1].peak), (1000, 1000)):
        stats = program.statistics | {"peak_memory_in_bytes": told}
        assert dataclasses.replace(program, statistics=stats).peak == peak


def test_a_backend_without_statistics_is_audited_too(programs, layouts):
    report = audit(dataclasses.replace(programs[1], statistics={}), layouts[1])
    assert report.problems == ()
    assert report.memory.peak == sum(leaf.shard_bytes for leaf in programs[1].inputs)


# ------------------------------------------------------------------ output


def test_a_report_prints_its_verdict_first(reports, broken):
    assert str(reports[1]).startswith("clean: ZeRO stage 1 over data (N = 8) on cpu")
    assert str(broken).startswith("3 problems (donation): ZeRO stage 1")
    text = str(broken)
    for word in ("volume", "collectives", "memory", "all-gather", "masters", "peak", "remedy:"):
        assert word in text


def test_a_problem_is_a_text_with_parts():
    parts = {"kind": "a", "where": "b", "expected": "c", "seen": "d", "remedy": "e"}
    problem = Problem(**parts)
    assert str(problem) == "a: b\n  seen: d\n  expected: c\n  remedy: e"
    assert dataclasses.asdict(problem) == parts
    assert pickle.loads(pickle.dumps(problem)) == problem
