"""A step knows its layout, recipe and optimizer: nothing is said to it twice, or otherwise."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize("is_placed", [False, True])
def test_an_audit_compiles_nothing_that_was_run(mesh8, caplog, is_placed):
    step = make(mesh8, 2)
    x = jax.device_put(batch(), step.layout.batch) if is_placed else batch()
    step(step.init(init, jax.random.key(0)), x)
    with jax.log_compiles(True):
        assert step.audit(x).problems == ()
    assert not [record for record in caplog.messages if "XLA compilation of jit(_step)" in record]


def test_evaluate_returns_aux_and_leaves_microbatches_out(mesh8):
    def with_aux(params, x):
        return loss_fn(params, x), {"mean": x.mean()}

    step = make(mesh8, 2, zerojax.Recipe(accumulate=4), loss=with_aux, has_aux=True)
    state = step.init(init, jax.random.key(0))
    want = float(loss_fn(init(jax.random.key(0)), batch(examples=8)))
    # Eight examples are too few for four microbatches on eight devices.
    loss, aux = step.evaluate(state, batch(examples=8))
    assert float(loss) == pytest.approx(want, rel=1e-6)
    assert float(aux["mean"]) == pytest.approx(float(batch(examples=8).mean()), rel=1e-5)


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
    with pytest.raises(ValueError, match=r"up is bfloat16\[.*\] where float32\[.*precision="):
        step.init({**params, "up": params["up"].astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match="takes params alone, or init_fn before its arguments"):
        step.init(params, jax.random.key(0))


def test_padded_parameters_are_not_taken_for_logical_ones(mesh8):
    """Seven rows of padding would join a softmax over 1,009 classes without a word."""
    step = make(mesh8, 3)
    state = step.init(init, jax.random.key(0))
    remedy = r"zerojax\.unpad\(state\.params, layout\)"
    params: Any = state.params
    for use in (
        lambda: jax.jit(loss_fn)(params, batch()),
        lambda: params["odd"],
        lambda: params.odd,
        lambda: params(batch()),
        lambda: list(params),
    ):
        with pytest.raises((TypeError, AttributeError), match=remedy):
            use()
    logical = zerojax.unpad(params, step.layout)
    assert float(loss_fn(logical, batch())) == pytest.approx(float(step.evaluate(state, batch())))
    assert jax.tree.map(jnp.shape, logical) == jax.tree.map(jnp.shape, init(jax.random.key(0)))
    even = make(mesh8, 2).init(init, jax.random.key(0))
    assert even.params["odd"].shape == (ROWS, 3), "whole leaves are logical"


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
    assert zerojax.audit(compiled, step.layout, step.recipe) == report


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


@pytest.mark.parametrize("stage", STAGES)
def test_an_explicit_mesh_that_is_set_changes_nothing(stage):
    mesh = jax.make_mesh((8,), ("data",))
    step = make(mesh, stage, zerojax.Recipe(accumulate=2))
    state = step.init(init, jax.random.key(0))
    x = jax.device_put(batch(), step.layout.batch)
    want = step.evaluate(state, x)
    with jax.set_mesh(mesh):
        fresh = make(mesh, stage, zerojax.Recipe(accumulate=2))
        assert float(fresh.evaluate(state, x)) == float(want)
        fresh.audit(x).raise_if_problems()
        _, metrics = fresh(fresh.init(init, jax.random.key(0)), x)
    assert float(metrics["loss"]) == pytest.approx(float(want), rel=1e-6)


def four(stage):
    return zerojax.make_mesh({"data": 4}, devices=jax.devices()[:4]), stage


def test_a_state_of_another_layout_is_refused_with_a_leaf(mesh8):
    step = make(mesh8, 3)
    for mesh, stage in ((mesh8, 2), four(3), four(0)):
        other = make(mesh, stage).init(init, jax.random.key(0))
        for use in (step, step.evaluate):
            told = "state is not .*params/odd is .* is expected|lies on {'data': 4}, .*others"
            with pytest.raises(ValueError, match=told):
                use(other, batch())
    even = {"up": jnp.zeros((64, 64))}
    layouts = [zerojax.make_layout(even, mesh8, stage=stage) for stage in (1, 3)]
    one, three = (
        zerojax.make_train_step(lambda p, x: jnp.mean((x @ p["up"]) ** 2), TX, layout)
        for layout in layouts
    )
    with pytest.raises(ValueError, match=r"params/up is placed as .* is expected"):
        three(one.init(even), batch())


def test_a_batch_that_lies_otherwise_is_refused_with_the_remedy(mesh8):
    step = make(mesh8, 2)
    state = step.init(init, jax.random.key(0))
    everywhere = jax.device_put(batch(), step.layout.sharding(jax.sharding.PartitionSpec()))
    with pytest.raises(ValueError, match=r"write jax\.device_put\(batch, layout\.batch\)"):
        step(state, everywhere)
    with pytest.raises(ValueError, match="has 0 examples"):
        step(state, batch()[:0])
    step(state, batch())
    with pytest.raises(ValueError, match="donated to an earlier step, 'step' at least: use the"):
        step(state, batch())


def test_a_callable_with_leaves_is_parameters(mesh8):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_array)
    layout = zerojax.make_layout(params, mesh8, stage=3)
    step = zerojax.make_train_step(lambda p, x: 0.0 * x.sum(), TX, layout)
    for given in (params, model):  # a whole model's functions are left out
        assert jax.tree.structure(step.init(given).params) == layout.structure


@pytest.mark.parametrize(
    ("loss", "has_aux", "match"),
    [
        (lambda p, x: x.sum(1), False, r"scalar, got shape \(32,\)"),
        (lambda p, x: (x.sum(), 1), False, "got tuple; .*has_aux=True"),
        (lambda p, x: None, False, "got NoneType"),
        (lambda p, x: x.sum(), True, r"must return \(loss, aux\)"),
    ],
)
def test_what_is_no_loss_is_refused_by_step_and_evaluation(loss, has_aux, match, mesh8):
    step = make(mesh8, 2, loss=loss, has_aux=has_aux)
    state = step.init(init, jax.random.key(0))
    for use in (step, step.evaluate):
        with pytest.raises(ValueError, match=match):
            use(state, batch())


def test_arguments_in_the_wrong_place_are_named(mesh8):
    layout = zerojax.make_layout(jax.eval_shape(init, jax.random.key(0)), mesh8, stage=2)
    make: Any = zerojax.make_train_step
    with pytest.raises(TypeError, match="a Layout is expected, got Mesh"):
        make(loss_fn, TX, mesh8)
    with pytest.raises(TypeError, match="loss_fn must be a function, got NoneType"):
        make(None, TX, layout)
    with pytest.raises(TypeError, match="a Recipe is expected, got str"):
        make(loss_fn, TX, layout, "bf16")


def test_an_error_in_the_loss_tells_what_it_was_traced_with(mesh8):
    step = make(mesh8, 2, loss=lambda params, batch: loss_fn(params, batch["x"]))
    state = step.init(init, jax.random.key(0))
    with pytest.raises(TypeError, match="contracting") as failed:
        step(state, {"x": jnp.ones((32, 48))})
    assert "the batch {'x': 'float32[32,48" in failed.value.__notes__[0]
    with pytest.raises(KeyError) as failed:
        step(state, {"y": batch()})
    assert "the batch {'y': 'float32[32,64" in failed.value.__notes__[0]
    step(state, {"x": batch()})  # nothing is lost


def test_a_step_tells_when_it_is_compiled_for_many_shapes(mesh8, monkeypatch):
    monkeypatch.setattr("zerojax.train._step.MANY", 3)
    step = make(mesh8, 2)
    state = step.init(init, jax.random.key(0))
    for examples in (8, 16, 8):
        state, _ = step(state, batch(examples=examples))
    with pytest.warns(UserWarning, match=r"3 programs .* \(24, 64\) now: pad") as told:
        state, _ = step(state, batch(examples=24))
    assert told[0].filename == __file__
    step(state, batch(examples=32))
