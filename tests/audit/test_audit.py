"""The audit catches: each kind of problem in a program that has it, and not in one that hasn't.

Programs are written by hand with jit, so that zerojax has no part in them but the layout.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit import audit_programs
from tests.audit.audit_programs import (
    BATCH,
    HIDDEN,
    WIDTH,
    compile_step,
    constrain,
    kinds,
    layer,
    mse,
    only,
    pair_loss,
    shapes_of,
)
from zerojax.audit import CHECKS, AuditError, Program, audit


@pytest.fixture(scope="module")
def whole(mesh8):
    return NamedSharding(mesh8, P())


@pytest.fixture(scope="module")
def good(make):
    """Give stages 1 and 3 by hand, without a mistake, as programs."""
    return {stage: Program.of(compile_step(pair_loss, make(stage))) for stage in (0, 1, 2)}


@pytest.fixture(scope="module")
def replicated(make, whole):
    """Give data parallelism under ZeRO's name."""
    return Program.of(compile_step(pair_loss, make(1), params=whole, opt=whole))


# ------------------------------------------------------------------ nothing wrong


def test_on_one_device_the_verdict_says_that_nothing_is_sharded():
    mesh = zerojax.make_mesh({"data": 1}, devices=jax.devices()[:1])
    layout = zerojax.make_layout({"w": jnp.ones((64, 64))}, mesh, stage=3)
    step = zerojax.make_train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(0.1), layout)
    verdict = step.audit(jnp.ones((8, 64))).verdict
    assert verdict.startswith("clean: ZeRO stage 3 over data (N = 1)")
    assert verdict.endswith("with N = 1 nothing is sharded")


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_by_hand_is_clean(good, make, stage):
    report = audit(good[stage], make(stage))
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(2 * 7 / 8, rel=0.01)
    report.raise_if_problems()


def test_on_a_cpu_an_all_reduce_and_its_slice_count_as_a_reduce_scatter(good, make):
    report = audit(good[2], make(2))
    assert report.volume == pytest.approx(3 * 7 / 8, rel=0.01)
    assert report.judged_volume == pytest.approx(2 * 7 / 8, rel=0.01)


def test_a_program_that_returns_no_state_is_not_asked_for_a_step(make, mesh8):
    layout = make(2)
    batch = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
    program = jax.jit(pair_loss, in_shardings=(layout.params, layout.batch))
    assert audit(program.lower(layout.shapes, batch).compile(), layout).problems == ()


# ------------------------------------------------------------------ states


def test_a_replicated_optimizer_is_caught(replicated, make):
    report = audit(replicated, make(1))
    problem = only(report, "placement")
    assert "optimizer" in str(problem)
    assert "mu/down" in problem.where
    assert "[128, 64]" in problem.seen
    assert "[16, 64]" in problem.expected
    assert "layout.opt_state(tx)" in problem.remedy
    sizes = 2 * 4 * 2 * HIDDEN * WIDTH  # two moments, fp32, both matrices
    assert f"{sizes:,} B" in problem.seen
    assert f"{sizes // 8:,} B" in problem.expected


def test_whole_parameters_under_stage_3_are_caught(good, make):
    problem = only(audit(good[1], make(3)), "placement")
    assert problem.where.startswith("parameter")
    assert "layout.params" in problem.remedy


def test_partitioned_parameters_under_stage_1_are_caught(make, good):
    compiled = compile_step(pair_loss, make(1), params=make(3).params)
    problem = only(audit(compiled, make(1)), "placement")
    assert problem.where.startswith("parameter")
    assert "keeps whole" in problem.seen
    assert "the stage that is meant (3)" in problem.remedy


def test_a_partition_along_another_dim_of_the_same_size_is_no_problem(good, make, mesh8):
    program = good[1]
    inputs = tuple(
        dataclasses.replace(leaf, shard_shape=(HIDDEN, WIDTH // 8))
        if leaf.path.endswith("mu/down")
        else leaf
        for leaf in program.inputs
    )
    report = audit(dataclasses.replace(program, inputs=inputs), make(1))
    assert "placement" not in kinds(report)


def test_states_that_are_not_donated_are_caught(make):
    report = audit(compile_step(pair_loss, make(1), donate=()), make(1))
    assert kinds(report) == {"donation"}
    parameter, optimizer = report.problems
    assert "donate_argnums=0" in parameter.remedy
    assert "donate_argnums=1" in optimizer.remedy
    assert f"{4 * 2 * HIDDEN * WIDTH:,} B" in parameter.seen


def test_a_donation_that_jax_turns_off_is_told(make):
    with jax.debug_nans(True):
        report = audit(compile_step(pair_loss, make(1)), make(1))
    assert "audit without jax_debug_nans" in report.problems[0].remedy


def test_a_donation_that_found_no_place_is_caught(good, make):
    program = good[1]
    text = program.text.replace("{1}: (1, {}, may-alias), ", "")
    assert text != program.text
    report = audit(dataclasses.replace(program, text=text), make(1))
    problem = only(report, "donation")
    assert problem.where.startswith("parameter: 0/up")
    assert "found no result" in problem.seen


@pytest.mark.parametrize("what", ["sharding", "dtype", "weak type"])
def test_a_state_that_comes_back_otherwise_is_caught(good, make, what):
    program, change = good[1], {
        "sharding": {"placement": 99, "spec": "P('data')"},
        "dtype": {"dtype": "bfloat16"},
        "weak type": {"weak_type": True},
    }[what]  # fmt: skip
    outputs = tuple(
        dataclasses.replace(leaf, **change) if leaf.path.endswith("nu/up") else leaf
        for leaf in program.outputs
    )
    problem = only(audit(dataclasses.replace(program, outputs=outputs), make(1)), "recompile")
    assert problem.where.startswith("optimizer: 1/0/nu/up")
    assert what in problem.seen


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_results_that_are_placed_nowhere_are_caught(make):
    """Without out_shardings the partitioner leaves the new parameters partitioned."""
    compiled = compile_step(pair_loss, make(1), out=None)
    problem = only(audit(compiled, make(1)), "recompile")
    assert problem.where.startswith("parameter")
    assert "out_shardings" in problem.remedy


def test_parameters_in_another_dtype_are_caught(make):
    def widen(params, opt_state):
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), opt_state

    compiled = compile_step(pair_loss, make(1), finish=widen, donate=(1,))
    problem = only(audit(compiled, make(1)), "recompile")
    assert "bfloat16" in problem.seen


def test_a_program_without_the_parameters_is_caught(good, make, mesh8):
    other = zerojax.make_layout(shapes_of({"other": (WIDTH, HIDDEN)}), mesh8, stage=1)
    problem = only(audit(good[1], other), "unmatched")
    assert "'other' [64, 128]" in problem.expected


# ------------------------------------------------------------------ what moves


def test_a_stage_without_its_reduce_scatter_is_caught(replicated, make):
    problem = only(audit(replicated, make(1)), "reduce-scatter")
    assert "all-reduce f32" in problem.where
    assert f"{2 * HIDDEN * WIDTH:,} elements" in problem.expected
    assert "layout.grads of stage 2" in problem.remedy


def test_an_accelerator_may_not_slice_an_all_reduce(good, make):
    report = audit(dataclasses.replace(good[1], platform="tpu"), make(1))
    assert kinds(report) == {"reduce-scatter", "volume"}
    assert "one mesh axis per torus dim" in only(report, "reduce-scatter").remedy
    volume = only(report, "volume")
    assert "1.50 times the formula" in volume.seen
    assert "all-reduce + slice" in volume.where


def test_volume_above_theory_is_caught(good, make, mesh8):
    """Stage 1's program does twice what is said where a second gather of all weights stands."""
    layout = make(2)

    def twice(params, opt_state):
        old = jax.lax.optimization_barrier(params)
        shard = constrain(jax.tree.map(jnp.sin, old), mesh8, "data")
        extra = constrain(jax.lax.optimization_barrier(shard), mesh8)
        return jax.tree.map(lambda p, e: p + 1e-6 * e, params, extra), opt_state

    problem = only(audit(compile_step(pair_loss, layout, finish=twice), layout), "volume")
    assert "all-gather f32" in problem.where
    assert "probably" in problem.where
    assert "1.50 times the formula" in problem.seen


def narrow_loss(mesh, early):
    def loss(params, x):
        def whole(p):
            if not early:
                return constrain(p, mesh).astype(jnp.bfloat16)
            return constrain(jax.lax.optimization_barrier(p.astype(jnp.bfloat16)), mesh)

        w = jax.tree.map(whole, params)
        return mse(layer(w, x.astype(jnp.bfloat16)), x)

    return loss


@pytest.mark.parametrize("early", [True, False])
def test_a_gather_in_fp32_of_what_is_used_in_bf16_is_caught(make, mesh8, early):
    report = audit(compile_step(narrow_loss(mesh8, early), make(3)), make(3))
    if early:
        assert report.problems == ()
        return
    problem = only(report, "dtype")
    assert "f32 moved where 16 bits would do" in problem.seen
    assert "before the gather" in problem.remedy


@pytest.mark.parametrize("rows", [BATCH, WIDTH])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_gathered_activation_is_caught(rows, stage, make, mesh8, monkeypatch):
    """With as many rows as `up` has, an activation has its shape, [64, 128]."""
    monkeypatch.setattr(audit_programs, "BATCH", rows)

    def loss(params, x):
        hidden = constrain(jnp.tanh(x @ params["up"]), mesh8)
        return mse(x + constrain(hidden, mesh8, "data") @ params["down"], x)

    problem = only(audit(compile_step(loss, make(stage)), make(stage)), "activation")
    assert f"all-gather f32[{rows}, {HIDDEN}]" in problem.where
    assert "gathered" in problem.seen


def test_an_all_to_all_is_caught(make, mesh8):
    def loss(params, x):
        turned = constrain(jnp.tanh(x @ params["up"]), mesh8, None, "data")
        return mse(x + constrain(turned * 2, mesh8, "data") @ params["down"], x)

    problem = only(audit(compile_step(loss, make(1)), make(1)), "shuffle")
    assert "all-to-all" in problem.seen


def test_chunks_of_several_examples_are_told(make):
    def loss(params, x):
        chunks = jnp.tanh(x @ params["up"]).reshape(8, -1, HIDDEN)  # of [BATCH, 4, HIDDEN]
        return jax.lax.map(lambda one: jnp.mean((one @ params["down"]) ** 2), chunks).mean()

    step = zerojax.make_train_step(loss, optax.sgd(0.1), make(1))
    report = step.audit(jax.ShapeDtypeStruct((BATCH, 4, WIDTH), jnp.float32))
    assert "cut the tokens of each example" in only(report, "shuffle").remedy


def test_what_cannot_be_read_is_never_clean(good, make):
    text = good[1].text.replace("replica_groups=", "lattice=")
    report = audit(dataclasses.replace(good[1], text=text), make(1))
    assert {"unread"} <= kinds(report)


def test_a_loop_of_unknown_length_is_never_clean(make, mesh8):
    layout = make(1)

    def finish(params, opt_state):
        def turn(state):
            p = constrain(constrain(jnp.sin(state[1]), mesh8, "data"), mesh8)
            return state[0] + jnp.sum(p).astype(jnp.int32) + 1, p

        _, up = jax.lax.while_loop(lambda s: s[0] < 9, turn, (opt_state[0].count, params["up"]))
        return {**params, "up": up}, opt_state

    problem = only(audit(compile_step(pair_loss, layout, finish=finish), layout), "unread")
    assert "unknown number of times" in problem.seen


# ------------------------------------------------------------------ the list is whole


def test_every_kind_of_problem_is_proved_here():
    assert set(CHECKS) == {
        "unmatched", "placement", "donation", "unread", "reduce-scatter", "volume", "dtype",
        "slow links",
        "activation", "shuffle", "hoisted gather", "kept gather", "host traffic",
        "recompile", "peak",
        "precision", "offload", "batch", "accumulator", "exposed", "reduction",
        "replicas", "constant",
    }  # fmt: skip


def test_problems_are_raised_and_say_all(replicated, make):
    report = audit(replicated, make(1))
    with pytest.raises(AuditError) as caught:
        report.raise_if_problems()
    assert caught.value.report is report
    for problem in report.problems:
        assert str(problem) in str(caught.value)
        for part in (problem.where, problem.expected, problem.seen, problem.remedy):
            assert part in problem
    assert max(map(len, str(caught.value).splitlines())) <= 98, "a terminal shows 100 columns"
