"""A step knows its layout, recipe and optimizer: nothing is said to it twice, or otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.layout import STAGES

TX = optax.adamw(1e-2)
ROWS = 1009  # no dim of `odd` divides by 8: it is padded
BF16 = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)


def init(key):
    """Draw parameters that bf16 holds exactly, so that no program rounds them otherwise."""
    shapes = {"odd": (ROWS, 3), "up": (64, 64)}
    return {
        name: jax.random.randint(jax.random.fold_in(key, n), shape, -64, 64) / 256
        for n, (name, shape) in enumerate(shapes.items())
    }


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.mean(hidden**2) + jnp.mean(params["odd"] ** 2).astype(hidden.dtype)


def batch(number=0, examples=32):
    return jax.random.normal(jax.random.key(number), (examples, 64))


def make(mesh, stage, recipe=None, tx=TX, loss=loss_fn, **options):
    layout = zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh, stage=stage)
    return zerojax.make_train_step(loss, tx, layout, recipe, **options)


@pytest.mark.parametrize("stage", STAGES)
def test_evaluate_is_the_loss_of_logical_parameters(stage, mesh8):
    step = make(mesh8, stage)
    state = step.init(init, jax.random.key(0))
    want = loss_fn(init(jax.random.key(0)), batch())
    assert float(step.evaluate(state, batch())) == pytest.approx(float(want), rel=1e-6)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)), "a step may still use it"
    state, metrics = step(state, batch())
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-6)
    assert step.num_compiled == 1, "an evaluation is no step"


def test_evaluate_leaves_aux_and_microbatches_out(mesh8):
    def with_aux(params, x):
        return loss_fn(params, x), {"mean": x.mean()}

    step = make(mesh8, 2, zerojax.Recipe(accumulate=4), loss=with_aux, has_aux=True)
    state = step.init(init, jax.random.key(0))
    want = float(loss_fn(init(jax.random.key(0)), batch(examples=8)))
    # Eight examples are too few for four microbatches on eight devices.
    assert float(step.evaluate(state, batch(examples=8))) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("recipe", [None, zerojax.Recipe(precision="bf16")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_begins_with_parameters_as_with_the_function_of_them(stage, recipe, mesh8):
    step = make(mesh8, stage, recipe)
    key = jax.random.key(0)
    want = step.init(init, key)
    params = jax.jit(init)(key)
    for given in (params, jax.tree.map(np.asarray, params)):
        got = step.init(given)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b, like in zip(
            *map(jax.tree.leaves, (got, want, step.abstract_state())), strict=True
        ):
            assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert a.sharding == b.sharding == like.sharding
            assert (a.shape, a.dtype) == (like.shape, like.dtype)


def test_what_can_not_begin_a_state_is_refused(mesh8):
    step = make(mesh8, 2)
    params = init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"missing \['odd'\]"):
        step.init({"up": params["up"]})
    with pytest.raises(ValueError, match=r"'up' has shape \(64, 32\) where the layout has"):
        step.init({**params, "up": params["up"][:, :32]})
    with pytest.raises(ValueError, match="leaf 'up' is bfloat16 where the layout has float32"):
        step.init({**params, "up": params["up"].astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match="arguments are for an init_fn"):
        step.init(params, jax.random.key(0))


PRECISIONS = {
    "fp32, then bf16": (zerojax.Precision(), zerojax.Precision(params=jnp.bfloat16)),
    "bf16, then fp16": (BF16, zerojax.Precision(params=jnp.float16, master=jnp.float32)),
    "masters of another dtype": (
        BF16,
        zerojax.Precision(params=jnp.bfloat16, master=jnp.float16),
    ),
    "masters, then none": (BF16, zerojax.Precision(params=jnp.bfloat16)),
}


@pytest.mark.parametrize(("had", "asked"), PRECISIONS.values(), ids=PRECISIONS)
def test_a_state_of_another_precision_is_refused_and_kept(had, asked, mesh8):
    state = make(mesh8, 2, zerojax.Recipe(precision=had)).init(init, jax.random.key(0))
    step = make(mesh8, 2, zerojax.Recipe(precision=asked))
    for use in (step, step.evaluate, step.lower):
        with pytest.raises(ValueError, match=r"the state .*(recipe|precision)"):
            use(state, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)), "nothing is lost"


def test_a_state_of_another_optimizer_is_refused_with_paths(mesh8):
    state = make(mesh8, 2, tx=optax.sgd(0.1)).init(init, jax.random.key(0))
    with pytest.raises(ValueError, match=r"missing .*opt_state/0/mu"):
        make(mesh8, 2)(state, batch())


@pytest.mark.parametrize("stage", STAGES)
def test_its_audit_is_told_nothing(stage, mesh8):
    """An audit that was not told of microbatches accused a right step."""
    recipe = zerojax.Recipe(precision=BF16, accumulate=4, clip_norm=1.0)
    step = make(mesh8, stage, recipe)
    shapes = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = step.audit(shapes)
    report.raise_if_problems()
    compiled = step.lower(step.abstract_state(), shapes).compile()
    assert zerojax.audit(compiled, step.layout, step.recipe).to_dict() == report.to_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_a_wrapped_optimizer_is_the_bare_one(stage, mesh8):
    rules = [zerojax.Rule(path="up", dim=1)] if stage else []
    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh8, stage=stage, rules=rules)
    wrapped = zerojax.sharded(TX, layout)
    assert str(layout.describe(wrapped)) == str(layout.describe(TX))
    assert layout.bytes_per_device(wrapped) == layout.bytes_per_device(TX)
    assert layout.opt_state(wrapped) == layout.opt_state(TX)
    state, metrics = zerojax.make_train_step(loss_fn, wrapped, layout)(
        zerojax.make_train_step(loss_fn, TX, layout).init(init, jax.random.key(0)), batch()
    )
    assert int(state.step) == 1
    assert np.isfinite(float(metrics["loss"]))
    again = zerojax.sharded(wrapped, layout).init(init(jax.random.key(0)))
    once = wrapped.init(init(jax.random.key(0)))
    assert jax.tree.structure(again) == jax.tree.structure(once)


def test_layouts_and_recipes_are_equal_by_value(mesh8):
    first, again = (make(mesh8, 3, zerojax.Recipe(precision="bf16")) for _ in range(2))
    assert (first.layout, first.recipe) == (again.layout, again.recipe)
    assert hash(first.layout) == hash(again.layout)
    first.layout.describe(TX)
    first.layout.opt_state(optax.lion(1e-3))
    assert first.layout == again.layout, "what it was asked leaves no trace"
    assert first.layout != make(mesh8, 2).layout
