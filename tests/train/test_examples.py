"""Examples, tables, noise and aux: what devices and microbatches get, and give back in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax

EXAMPLES, WIDTH = 32, 16
PARAMS = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) * 0.1}
X = jax.random.normal(jax.random.key(1), (EXAMPLES, WIDTH))
LABELS = np.arange(EXAMPLES, dtype=np.int32) % WIDTH
#: Every stage, with and without microbatches, reduced each time or once where that is possible.
WAYS = [
    (stage, accumulate, reduce)
    for stage in range(4)
    for accumulate in (1, 2, 4)
    for reduce in (None, "once", "each")
    if (stage < 3 or reduce != "once") and not (accumulate == 1 and reduce == "each")
]


def make(mesh, loss, way=(2, 1, None), has_aux=False, **options):
    stage, accumulate, reduce = way
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, min_size=16)
    recipe = zerojax.Recipe(accumulate=accumulate, reduce=reduce)
    return zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe, has_aux=has_aux, **options)


def metrics(mesh, loss, batch, way=(2, 1, None), has_aux=False):
    step = make(mesh, loss, way, has_aux)
    return step(step.init(PARAMS), batch)[1]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_example_draws_its_own_noise(way, mesh8):
    def loss(params, batch):
        mask = jax.random.bernoulli(batch["key"], 0.5, batch["x"].shape)
        return jnp.mean((batch["x"] * mask) @ params["w"]), mask

    batch = {"x": X, "key": jax.random.key(7)}
    aux = np.asarray(metrics(mesh8, loss, batch, way, has_aux=True)["aux"])
    assert aux.shape == X.shape
    assert len(np.unique(aux, axis=0)) == EXAMPLES, "16 coins each: no two should be alike"


def describe(params, batch):
    """Return a loss, and one of everything that aux can be."""
    rows = batch["x"] @ params["w"]
    return jnp.mean((rows - batch["x"]) ** 2), {
        "logits": rows,
        "predictions": jnp.argmax(rows, -1),
        "mean": rows.mean(),
        "examples": jnp.int32(len(rows)),
        "means": rows.mean(0),
        "counts": jnp.zeros(WIDTH, jnp.int32).at[batch["labels"]].add(1),
        "infinite": jnp.any(jnp.isinf(rows)),
    }


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_aux_is_that_of_the_whole_batch_in_its_order(way, mesh8):
    batch = {"x": X, "labels": LABELS}
    loss, want = describe(PARAMS, batch)
    found = metrics(mesh8, describe, batch, way, has_aux=True)
    assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-5)
    for name in want:
        got = found["aux"][name]
        assert (got.shape, got.dtype) == (want[name].shape, want[name].dtype), name
        np.testing.assert_allclose(got, want[name], atol=1e-5, err_msg=name)


def test_a_statistic_as_long_as_a_microbatch_is_no_row(mesh8):
    def loss(params, batch):
        return jnp.mean(batch @ params["w"]), batch.mean(0)

    # WIDTH is the size of each of two microbatches.
    found = metrics(mesh8, loss, X, (2, 2, None), has_aux=True)
    np.testing.assert_allclose(found["aux"], X.mean(0), atol=1e-6)


def test_aux_whose_examples_are_not_its_rows_is_refused(mesh8):
    def loss(params, batch):
        return jnp.mean(batch @ params["w"]), {"turned": batch.T}

    with pytest.raises(ValueError, match=r"'turned' is \[16, 16\] for 16 .* \[examples, \.\.\.\]"):
        metrics(mesh8, loss, X, (2, 2, None), has_aux=True)


def test_aux_that_loses_the_dim_of_a_single_example_is_refused(mesh8):
    def loss(params, batch):
        rows = batch @ params["w"]
        return jnp.mean(rows), {"rows": rows, "means": rows.mean(-1).squeeze()}

    with pytest.raises(ValueError, match=r"'means' is \[\] for 1 .* \[2\] for 2: return it with"):
        metrics(mesh8, loss, X, (2, 4, "once"), has_aux=True)


def weighted(params, batch):
    errors = jnp.mean((batch["x"] @ params["w"] - batch["x"]) ** 2, -1)
    return jnp.mean(batch["table"]["weights"][batch["labels"]] * errors)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_table_that_is_marked_goes_whole_to_every_device_and_microbatch(way, mesh8):
    batch = {"x": X, "labels": LABELS, "table": {"weights": np.arange(1.0, WIDTH + 1)}}
    batch["table"]["weights"] = batch["table"]["weights"].astype(np.float32)
    want = float(weighted(PARAMS, batch))
    batch["table"] = zerojax.Whole(batch["table"])
    found = metrics(mesh8, weighted, batch, way)
    assert float(found["loss"]) == pytest.approx(want, rel=1e-5)


def test_a_table_that_is_not_marked_is_refused_with_sizes_and_remedy(mesh8):
    table = np.ones(WIDTH, np.float32)
    mask = np.ones((1, 1, 9, 9), np.float32)
    for name, extra, size in (("table", table, WIDTH), ("mask", mask, 1)):
        step = make(mesh8, lambda params, batch: jnp.mean(batch["x"] @ params["w"]))
        state, batch = step.init(PARAMS), {"x": X, name: extra}
        for use in (step, step.evaluate, step.lower):
            match = rf"'{name}' has {size}, 'x' has {EXAMPLES}; .*zerojax\.Whole\("
            with pytest.raises(ValueError, match=match):
                use(state, batch)


def test_a_raw_key_is_refused_with_the_remedy(mesh8):
    step = make(mesh8, lambda params, batch: jnp.mean(batch["x"] @ params["w"]))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"'rng' is uint32\[2\].*jax\.random\.wrap_key_data"):
        step(state, {"x": X, "rng": jax.random.PRNGKey(0)})
    with pytest.raises(ValueError, match=r"'a' is uint32\[2\].*jax\.random\.wrap_key_data"):
        step(state, {"x": X, "a": jax.random.PRNGKey(0)})


def test_a_plan_and_an_audit_take_a_marked_table(mesh8):
    batch = {"x": X, "labels": LABELS, "table": zerojax.Whole({"weights": np.ones(16, np.float32)})}
    make(mesh8, weighted).audit(batch).raise_if_problems()
    workload = zerojax.Workload(loss_fn=weighted, batch=batch)
    kwargs = {"stage": 2, "num_devices": 8, "hardware": "h100"}
    planned = zerojax.plan(PARAMS, optax.sgd(0.1), workload=workload, **kwargs)
    assert "activations" in str(planned)
