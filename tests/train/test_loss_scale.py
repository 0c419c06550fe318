"""The loss scale: no gradient lost, no overflow taken, nothing else changed."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.train._update import first_loss_scale, next_loss_scale

WIDTH, BATCH = 16, 16
SCALE = zerojax.DynamicLossScale(initial=2.0**10, growth_interval=2)
FP32 = zerojax.Precision(loss_scale=SCALE)
FP16 = zerojax.Precision(params=jnp.float16, master=jnp.float32, loss_scale=SCALE)
TX = optax.adamw(1e-2)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "bias": jnp.zeros(WIDTH),
        "head": jax.random.normal(keys[0], (WIDTH, 4)) / 4,
        "prime": jax.random.normal(keys[1], (13, 7)),  # no dim divides by 8: stored padded
        "stack": jax.random.normal(keys[2], (3, WIDTH, WIDTH)) / 8,
    }


def loss_fn(params, x):
    x = x.astype(params["head"].dtype)
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["stack"])
    out = (x + params["bias"]) @ params["head"] * params["prime"][:4, 0]
    return jnp.mean(out.astype(jnp.float32) ** 2)


def batch_of(number, last=0.5):
    x = jax.random.normal(jax.random.key(number), (BATCH, WIDTH))
    return x.at[-1, -1].set(last)  # one example, on one device


def make(mesh, stage, precision, *, loss=loss_fn, tx=TX, **options):
    key = jax.random.key(0)
    rules = [zerojax.Rule(path="stack", stacked=1)]
    layout = zerojax.make_layout(
        jax.eval_shape(init, key), mesh, stage=stage, min_size=48, rules=rules
    )
    held = {"precision": precision, "offload": options.get("offload", False)}
    has_aux = options.pop("has_aux", False)
    recipe = zerojax.Recipe(**{**held, **options})
    step = zerojax.make_train_step(loss, tx, layout, recipe, has_aux=has_aux)
    return layout, step.init(init, key), step


def numpy_of(tree):
    return jax.tree.map(np.array, tree)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def models(state):
    return state.params, state.masters, state.opt_state


# ------------------------------------------------------------------ nothing else changes


OPTIONS = {
    "clipped, with aux": {"clip_norm": 0.1, "has_aux": True},
    "each": {"accumulate": 2, "reduce": "each"},
    "once": {"accumulate": 2, "reduce": "once", "has_aux": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_a_scale_equals_one_without_to_the_bit(stage, options, mesh8):
    """Compilers round otherwise what they fold or fuse otherwise: these steps leave no choice."""
    if stage == 3 and options.get("reduce") == "once":
        return

    def loss(params, x):
        loss = loss_fn(params, x)
        return (loss, {"double": 2 * loss}) if "has_aux" in options else loss

    tx = optax.sgd(0.5, momentum=None if "clip_norm" in options else 0.5)
    found = []
    for precision in (zerojax.Precision(), FP32):
        _, state, step = make(mesh8, stage, precision, loss=loss, tx=tx, **options)
        history = []
        metrics: Any = None
        for number in range(3):
            state, metrics = step(state, batch_of(number))
            history.append(numpy_of(metrics))
        assert step.num_compiled == 1
        found.append((models(state), history))
    scales = [(m.pop("loss_scale"), m.pop("skipped")) for m in found[1][1]]
    assert scales == [(2.0**10, False), (2.0**10, False), (2.0**11, False)]
    assert_same_bits(found[1], found[0])


def test_no_scale_rounds_anything(mesh8):
    found = []
    for initial in (1.0, 2.0**20):
        precision = zerojax.Precision(loss_scale=zerojax.DynamicLossScale(initial=initial))
        _, state, step = make(mesh8, 2, precision, clip_norm=0.1)
        metrics: Any = None
        for number in range(3):
            state, metrics = step(state, batch_of(number))
        assert metrics["loss_scale"] == initial
        found.append((models(state), metrics["loss"], metrics["grad_norm"]))
    assert_same_bits(found[1], found[0])


# ------------------------------------------------------------------ overflow


SKIPPED = {
    "0": (0, FP32, {}),
    "1 fp16 once": (1, FP16, {"accumulate": 2, "reduce": "once"}),
    "2 fp16 each": (2, FP16, {"accumulate": 2, "reduce": "each", "clip_norm": 1.0}),
    "3": (3, FP32, {}),
    "3 fp16, remat": (3, FP16, {"remat": "full"}),
    "offloaded": (2, FP16, {"offload": True, "clip_norm": 1.0}),
    "offloaded, without masters": (3, FP32, {"offload": True}),
}  # fmt: skip


@pytest.mark.parametrize(("stage", "precision", "options"), SKIPPED.values(), ids=SKIPPED)
def test_a_step_that_overflows_changes_nothing_but_the_scale(stage, precision, options, mesh8):
    _, state, step = make(mesh8, stage, precision, **options)
    state, metrics = step(state, batch_of(0))
    assert not metrics["skipped"]
    before = numpy_of(models(state))
    state, metrics = step(state, batch_of(1, last=jnp.inf))
    assert_same_bits(models(state), before)
    assert not math.isfinite(metrics["grad_norm"])
    assert (metrics["loss_scale"], metrics["skipped"]) == (2.0**10, True)
    assert tuple(map(float, state.loss_scale)) == (2.0**9, 0)
    assert int(state.step) == 2, "every step counts"
    state, metrics = step(state, batch_of(2))
    assert (metrics["loss_scale"], metrics["skipped"]) == (2.0**9, False)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(numpy_of(models(state))))
    changed = [
        (a != b).any()
        for a, b in zip(
            jax.tree.leaves(numpy_of(models(state))), jax.tree.leaves(before), strict=True
        )
    ]
    assert all(changed), "training goes on"
    assert step.num_compiled == 1


def test_an_offloaded_step_learns_as_one_on_the_device(mesh8):
    found = []
    for offload in (False, True):
        _, state, step = make(mesh8, 2, FP16, offload=offload, clip_norm=0.1)
        metrics: Any = None
        for number in range(3):
            state, metrics = step(state, batch_of(number))
        found.append(numpy_of((models(state), metrics)))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(found[0]), strict=True):
        # The same operations in fp32, fused otherwise: a few roundings of 2**-24 in each step.
        np.testing.assert_allclose(a, b, rtol=2**-10 if a.dtype == np.float16 else 1e-4, atol=1e-6)


# ------------------------------------------------------------------ the scale


def test_the_scale_grows_after_the_interval_up_to_the_largest(mesh8):
    policy = zerojax.DynamicLossScale(initial=2.0, growth_interval=2)
    _, state, step = make(mesh8, 1, zerojax.Precision(loss_scale=policy))
    seen = []
    for number in range(7):
        last = jnp.inf if number in (1, 2) else 0.5
        state, _ = step(state, batch_of(number, last))
        seen.append(tuple(map(float, state.loss_scale)))
    # one good; two that overflow, of which the second finds the floor; then up
    assert seen == [(2, 1), (1, 0), (1, 0), (1, 1), (2, 0), (2, 1), (4, 0)]
    top = zerojax.DynamicLossScale(initial=2.0**24, growth_interval=1)
    first = first_loss_scale(top)
    assert first is not None
    assert tuple(map(float, next_loss_scale(top, first, jnp.array(True)))) == (2**24, 0)


def test_gradients_that_fp16_would_lose_arrive(mesh8):
    """A gradient of 2**-27 is zero in fp16, whose smallest number is 2**-24."""
    policy = zerojax.DynamicLossScale(initial=2.0**12)
    tx = optax.sgd(2.0**27)

    def loss(params, x):
        return jnp.sum(params["bias"].astype(jnp.float32)) * 2.0**-27 * jnp.mean(x)

    for stage, loss_scale, moved in ((2, None, 0), (1, policy, -1), (3, policy, -1)):
        precision = dataclasses.replace(FP16, loss_scale=loss_scale)
        _, state, step = make(mesh8, stage, precision, loss=loss, tx=tx)
        state, _ = step(state, jnp.ones((BATCH, WIDTH)))
        np.testing.assert_array_equal(state.masters["bias"], moved)


def test_a_loss_in_fp16_is_told_as_it_is_and_finds_the_scale_that_fits(mesh8):
    """A scale of 2**17 is no number in fp16, in which this loss's gradients start."""
    precision = dataclasses.replace(FP16, loss_scale=zerojax.DynamicLossScale(initial=2.0**17))

    def loss(params, x):
        return 32 + params["bias"].mean() * x.mean().astype(jnp.float16)

    _, state, step = make(mesh8, 2, precision, loss=loss)
    seen = []
    with pytest.warns(UserWarning, match="the loss is float16, which has few digits"):
        state, metrics = step(state, jnp.ones((BATCH, WIDTH)))
    for _ in range(3):
        told = (metrics["loss"], metrics["loss_scale"], metrics["skipped"])
        seen.append(tuple(x.item() for x in told))
        if len(seen) < 3:
            state, metrics = step(state, jnp.ones((BATCH, WIDTH)))
    assert seen == [(32, 2.0**17, True), (32, 2.0**16, True), (32, 2.0**15, False)]
    np.testing.assert_allclose(metrics["grad_norm"], 1 / math.sqrt(WIDTH), rtol=2**-10)


# ------------------------------------------------------------------ the state


def test_a_restored_state_goes_on_to_the_bit(mesh8, tmp_path):
    layout, state, step = make(mesh8, 3, FP16)
    for number in range(3):
        state, _ = step(state, batch_of(number, last=jnp.inf if number == 1 else 0.5))
    assert tuple(map(float, state.loss_scale)) == (2.0**9, 1)
    zerojax.save(tmp_path / "here", state, layout)
    like = step.abstract_state()
    back = zerojax.restore(tmp_path / "here", layout, like)
    assert_same_bits(back, state)
    for number in (3, 4):
        state, want = step(state, batch_of(number))
        back, got = step(back, batch_of(number))
    assert_same_bits((back, got), (state, want))
    assert float(back.loss_scale.scale) == 2.0**10
    assert step.num_compiled == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_audit_finds_nothing(stage, mesh8):
    layout, state, step = make(mesh8, stage, FP16, clip_norm=1.0)
    compiled = step.lower(state, batch_of(0)).compile()
    report = zerojax.audit(compiled, layout, zerojax.Recipe(precision=FP16))
    report.raise_if_problems()
    assert "unread" not in {problem.kind for problem in report.problems}


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
        pytest.param("v5e:2x4", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_a_scale_takes_no_memory_on_an_accelerator(target):
    """Were old and new moments held at once, that would be 2 * 4 * Psi / N bytes more."""
    mesh = zerojax.topology_mesh(target, {"data": 8})
    config = gpt.preset("tiny")
    model = functools.partial(gpt.init, config)
    layout = zerojax.make_layout(jax.eval_shape(model, jax.random.key(0)), mesh, stage=2)
    temporaries = []
    for loss_scale in (None, SCALE):
        recipe = zerojax.Recipe(
            precision=dataclasses.replace(FP16, loss_scale=loss_scale), clip_norm=1.0
        )
        step = zerojax.make_train_step(functools.partial(gpt.loss, config), TX, layout, recipe)
        batch = jax.ShapeDtypeStruct((8, config.context + 1), jnp.int32)
        compiled: Any = step.lower(step.abstract_state(), batch).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] - temporaries[0] < 4 * layout.num_params / 8


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"initial": 1000.0}, r"initial needs a power of two.*1000\.0.*2\.0\*\*n"),
        ({"initial": True}, "initial needs a power of two"),
        ({"growth_interval": 0}, "growth_interval must be a whole number"),
        ({"growth_interval": 2.5}, "growth_interval must be a whole number"),
        ({"initial": 2.0**25}, "initial needs a power of two from 1 to"),
        ({"initial": 0.5}, "initial needs a power of two from 1 to"),
    ],
)
def test_a_policy_that_can_not_be_meant_is_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        zerojax.DynamicLossScale(**fields)


def test_what_is_no_policy_or_not_the_states_is_refused(mesh8):
    number: Any = 1024.0
    with pytest.raises(ValueError, match=r"needs a DynamicLossScale or None, got 1024\.0"):
        make(mesh8, 0, zerojax.Precision(loss_scale=number))
    _, state, step = make(mesh8, 0, zerojax.Precision())
    _, other, scaled = make(mesh8, 0, FP32)
    with pytest.raises(
        ValueError, match=r"missing \['loss_scale/good_steps', 'loss_scale/scale'\]"
    ):
        scaled(state, batch_of(0))
    with pytest.raises(ValueError, match=r"unexpected \['loss_scale/good_steps'"):
        step(other, batch_of(0))
