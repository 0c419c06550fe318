"""What a loss can ask for beside parameters and batch: a key, the step, the model's state."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

EXAMPLES, WIDTH = 32, 16
PARAMS = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) * 0.1}
X = jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))
STATS = {"mean": jnp.zeros(WIDTH), "count": jnp.zeros((), jnp.int32)}


def make(mesh, loss, stage=2, recipe=None, **options):
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, min_size=16)
    return zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe, **options)


def noisy(params, batch, key, step):
    mask = jax.random.bernoulli(key, 0.5, batch.shape)
    return jnp.mean((batch * mask) @ params["w"]), {"mask": mask, "steps": step * 1.0}


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_step_and_example_gets_noise_of_its_own(reduce, accumulate, mesh8):
    recipe = zerojax.Recipe(accumulate=accumulate, reduce=reduce)
    step = make(mesh8, noisy, 1, recipe, has_aux=True)
    state, masks = step.init(PARAMS, key=jax.random.key(3)), []
    for number in range(3):
        state, metrics = step(state, X)
        assert float(metrics["aux"]["steps"]) == number
        masks.append(np.asarray(metrics["aux"]["mask"]))
    assert len(np.unique(np.concatenate(masks), axis=0)) == 3 * EXAMPLES


def test_the_noise_follows_from_the_key_of_the_state(mesh8):
    step = make(mesh8, noisy, has_aux=True)
    masks = [
        np.asarray(step(step.init(PARAMS, key=jax.random.key(seed)), X)[1]["aux"]["mask"])
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(masks[0], masks[1])
    assert (masks[0] != masks[2]).any()


def normalised(params, batch, *, model_state):
    """Centre activations, and keep a running mean, as BatchNorm does."""
    hidden = batch @ params["w"]
    new = {
        "mean": 0.9 * model_state["mean"] + 0.1 * jax.lax.stop_gradient(hidden.mean(0)),
        "count": model_state["count"] + 1,
    }
    return jnp.mean((hidden - hidden.mean(0)) ** 2 + new["mean"] ** 2), new


def averaging(params, batch, *, model_state):
    """Keep an average of the weights, as a teacher or a target network is one."""
    new = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * jax.lax.stop_gradient(p), model_state, params)
    return jnp.mean((batch @ params["w"] - batch @ model_state["w"] - 1) ** 2), new


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("make_mesh", [lambda: zerojax.make_mesh({"data": 8}), None])
def test_an_average_stays_where_it_was_placed(make_mesh, stage):
    mesh = make_mesh() if make_mesh else jax.make_mesh((8,), ("data",))
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, min_size=16)
    average = jax.device_put(PARAMS, layout.masters)
    step = zerojax.make_train_step(averaging, optax.sgd(0.1), layout, model_state=average)
    state, want, kept = step.init(PARAMS), PARAMS, PARAMS
    for _ in range(2):
        grads, new = jax.grad(averaging, has_aux=True)(want, X, model_state=kept)
        want, kept = jax.tree.map(lambda p, g: p - 0.1 * g, want, grads), new
        state, _ = step(state, X)
    assert state.model_state["w"].sharding.is_equivalent_to(layout.masters["w"], 2)
    np.testing.assert_allclose(state.model_state["w"], kept["w"], atol=1e-6)
    assert step.num_compiled == 1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_state_of_a_model_goes_through_microbatches_and_steps(stage, accumulate, mesh8):
    recipe = zerojax.Recipe(accumulate=accumulate, reduce="each")
    step = make(mesh8, normalised, stage, recipe, model_state=STATS)
    state, stats, params = step.init(PARAMS), STATS, PARAMS
    for _ in range(2):
        grads = []
        for part in (X[number::accumulate] for number in range(accumulate)):
            gradient = jax.grad(normalised, has_aux=True)
            found, stats = gradient(params, part, model_state=stats)
            grads.append(found["w"])
        params = {"w": params["w"] - 0.1 * sum(grads) / accumulate}
        state, _ = step(state, X)
    np.testing.assert_allclose(state.model_state["mean"], stats["mean"], atol=1e-6)
    assert int(state.model_state["count"]) == 2 * accumulate
    got = zerojax.unpad(state.params, step.layout)
    np.testing.assert_allclose(got["w"], params["w"], atol=1e-6)
    assert not STATS["mean"].is_deleted(), "what the user holds is not donated"
    step.init(PARAMS)


def test_an_evaluation_reads_state_and_draws_no_noise_where_it_can(mesh8):
    def loss(params, batch, *, key=None, model_state):
        kept = 1.0 if key is None else jax.random.bernoulli(key, 0.5, batch.shape)
        return jnp.mean((batch * kept) @ params["w"]) + model_state, (key is None, model_state + 1)

    step = make(mesh8, loss, has_aux=True, model_state=jnp.float32(2))
    state = step.init(PARAMS, key=jax.random.key(0))
    want = float(jnp.mean(X @ PARAMS["w"])) + 2
    value, without_key = step.evaluate(state, X)
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert without_key
    state, metrics = step(state, X)
    assert not metrics["aux"]
    assert float(step.evaluate(state, X)[0]) > want + 0.5, "the state has moved on by one"


def test_an_evaluation_that_draws_noise_says_so(mesh8):
    def loss(params, batch, key):
        return jnp.mean((batch * jax.random.bernoulli(key, 0.5, batch.shape)) @ params["w"])

    step = make(mesh8, loss)
    with pytest.warns(UserWarning, match=r"draws noise here too; write key=None"):
        step.evaluate(step.init(PARAMS, key=jax.random.key(0)), X)


def test_key_and_model_state_are_saved_and_audited(mesh8, tmp_path):
    def loss(params, batch, key, model_state):
        loss, new = normalised(params, batch, model_state=model_state)
        return loss + 0 * jax.random.uniform(key), new

    step = make(mesh8, loss, 3, model_state=STATS)
    state, _ = step(step.init(PARAMS, key=jax.random.key(5)), X)
    zerojax.save(tmp_path / "one", state, step.layout)
    again = make(mesh8, loss, 1, model_state=STATS)
    restored = zerojax.restore(tmp_path / "one", again.layout, again.abstract_state())
    np.testing.assert_array_equal(restored.model_state["mean"], state.model_state["mean"])
    assert (jax.random.key_data(restored.key) == jax.random.key_data(state.key)).all()
    again(restored, X)
    step.audit(X).raise_if_problems()


@pytest.mark.parametrize("axes", ["Auto", "Explicit", "Explicit, placed by Auto"])
def test_a_state_of_the_model_that_is_cut_stays_so(axes, mesh8):
    mesh = mesh8 if axes == "Auto" else jax.make_mesh((8,), ("data",))
    layout = zerojax.make_layout(PARAMS, mesh, stage=2, min_size=16)
    cut = jax.NamedSharding(mesh8 if axes.endswith("Auto") else mesh, jax.P("data"))
    given = STATS | {"mean": jax.device_put(STATS["mean"], cut)}
    step = zerojax.make_train_step(normalised, optax.sgd(0.1), layout, model_state=given)
    state = step.init(PARAMS)
    assert state.model_state["mean"].addressable_shards[0].data.size == WIDTH // 8
    assert state.model_state["count"].sharding.is_fully_replicated


def test_an_overflow_leaves_the_state_of_the_model(mesh8):
    def loss(params, batch, model_state):
        return jnp.mean(batch @ params["w"]) * 1e30, model_state + 1

    recipe = zerojax.Recipe(precision="fp16")
    step = make(mesh8, loss, 1, recipe, model_state=jnp.float32(0))
    state, metrics = step(step.init(PARAMS), X)
    assert bool(metrics["skipped"])
    assert float(state.model_state) == 0


def test_a_name_that_is_bound_or_comes_first_asks_for_nothing(mesh8):
    def loss(params, key, step=None):
        assert step == "bound"
        return jnp.mean(key @ params["w"])

    step = make(mesh8, functools.partial(loss, step="bound"))
    state = step.init(PARAMS)
    assert state.key is None
    step(state, X)


def test_noise_that_a_step_never_draws_is_told(mesh8):
    """A loss that calls its key otherwise, with a default, would train without dropout."""

    def loss(params, x, rng=None):
        return jnp.mean(x @ params["w"])

    with pytest.warns(UserWarning, match="'rng', which a step never fills: .* call it `key`"):
        make(mesh8, loss)
    with pytest.warns(UserWarning, match="'dropout_rng', which a step never fills"):
        make(mesh8, lambda params, x, dropout_rng=None: jnp.mean(x @ params["w"]))
    make(mesh8, lambda params, x, keypoints=None: jnp.mean(x @ params["w"]))  # says nothing


REFUSED = {
    "no key": (noisy, {"has_aux": True}, {}, "asks for a key: write step.init"),
    "a key for nothing": (
        normalised,
        {"model_state": STATS},
        {"key": jax.random.key(0)},
        "does not ask for a key",
    ),
    "keys": (
        noisy,
        {"has_aux": True},
        {"key": jax.random.split(jax.random.key(0))},
        r"got key<fry>\[2\]",
    ),
    "a raw key": (noisy, {"has_aux": True}, {"key": jax.random.PRNGKey(0)}, "wrap_key_data"),
    "no state": (normalised, {}, {}, r"first value, or its shapes, to make_train_step"),
    "a state for nothing": (lambda p, b: 0.0, {"model_state": STATS}, {}, "does not ask for model"),
    "shapes": (normalised, {"model_state": jax.eval_shape(lambda: STATS)}, {}, "starts from arr"),
    "once": (
        normalised,
        {"model_state": STATS, "recipe": zerojax.Recipe(reduce="once")},
        {},
        r"Recipe\(reduce='each'\)",
    ),
    "one result": (
        lambda p, b, model_state: 0.0,
        {"model_state": STATS},
        {},
        r"\(loss, model_state\)",
    ),
    "aux left out": (
        lambda p, b, model_state: (0.0, 1.0),
        {"model_state": STATS, "has_aux": True},
        {},
        r"\(aux, model_state\)",
    ),
    "another structure": (
        lambda p, b, model_state: (p["w"].sum(), {"mean": STATS["mean"]}),
        {"model_state": STATS},
        {},
        r"missing \['count'\]",
    ),
    "another dtype": (
        lambda p, b, model_state: (p["w"].sum(), {**STATS, "count": jnp.float32(0)}),
        {"model_state": STATS},
        {},
        r"as it was given: count is float32\[\] where int32\[\]",
    ),
}


@pytest.mark.parametrize(("loss", "made", "begun", "match"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(loss, made, begun, match, mesh8):
    def use():
        step = make(mesh8, loss, **made)
        step(step.init(PARAMS, **begun), X)

    with pytest.raises(ValueError, match=match):
        use()


@pytest.mark.parametrize("stage", range(4))
def test_a_loss_that_reads_no_parameter_is_told(stage, mesh8):
    """It may compute with arrays that it closes over, such as those of an nnx model."""
    step = make(mesh8, lambda p, x: jnp.mean(jax.lax.stop_gradient(x @ PARAMS["w"]) ** 2), stage)
    with pytest.warns(UserWarning, match="reads no parameter, so that nothing is trained"):
        step.lower(step.abstract_state(), X)
