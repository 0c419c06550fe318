"""Losses that join examples of several devices: what moves for that is the loss's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import shapes_of
from zerojax.audit import audit

TX = optax.adam(1e-3)
WIDTH, HIDDEN, BATCH = 48, 160, 64
SIDES = ("image", "text")
SHAPES = {
    side: {
        "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
        "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
    }
    for side in SIDES
}
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def contrastive(params, batch):
    """Compare each image with each text, as CLIP does."""
    image, text = (
        jax.nn.gelu(batch[side] @ params[side]["up"]) @ params[side]["down"] for side in SIDES
    )
    logits, own = image @ text.T, jnp.arange(len(image))
    both = (optax.softmax_cross_entropy_with_integer_labels(x, own) for x in (logits, logits.T))
    return sum(x.mean() for x in both)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_contrastive_loss_is_clean_where_the_audit_is_told(mesh8, stage):
    layout = zerojax.make_layout(SHAPES, mesh8, stage=stage)
    step = zerojax.make_train_step(contrastive, TX, layout)
    batch = dict.fromkeys(SIDES, X)
    untold = step.audit(batch)
    assert "activation" in {problem.kind for problem in untold.problems}
    assert any("audit with joins_examples=True" in problem.remedy for problem in untold.problems)
    report = step.audit(batch, joins_examples=True)
    assert report.problems == ()
    (note,) = report.notes
    assert note.endswith("move because the loss joins examples, and are not judged")
    assert report.volume == untold.volume
    assert report.judged_volume < untold.judged_volume


def test_whole_weights_are_judged_all_the_same(mesh8):
    layout = zerojax.make_layout(SHAPES, mesh8, stage=3)
    below = zerojax.make_layout(SHAPES, mesh8, stage=1)
    step = zerojax.make_train_step(contrastive, TX, below)
    compiled = step.lower(step.abstract_state(), dict.fromkeys(SIDES, X)).compile()
    report = zerojax.audit(compiled, layout, joins_examples=True)
    assert "placement" in {problem.kind for problem in report.problems}


def test_what_layers_gather_is_judged_all_the_same(mesh8):
    layout = zerojax.make_layout(
        {"layers": jax.ShapeDtypeStruct((4, HIDDEN, HIDDEN), jnp.float32)}, mesh8, stage=2
    )

    def loss(params, x):
        def layer(h, w):
            return jax.lax.with_sharding_constraint(jnp.tanh(h @ w), layout.sharding(P())), None

        h, _ = jax.lax.scan(layer, x, params["layers"])
        return jnp.mean(h**2)

    step = zerojax.make_train_step(loss, TX, layout)
    report = step.audit(jax.ShapeDtypeStruct((48, HIDDEN), jnp.float32), joins_examples=True)
    assert "activation" in {problem.kind for problem in report.problems}


def views(join):
    """Compare two views of each example by one network, which runs as `join` says."""

    def loss(params, batch):
        def embed(x):
            return jax.nn.gelu(x @ params["image"]["up"]) @ params["image"]["down"]

        one, two = join(embed, batch["image"], batch["text"])
        return optax.softmax_cross_entropy(one @ two.T, jnp.eye(len(one))).mean()

    return loss


def twice(embed, one, two):
    return embed(one), embed(two)


def behind(embed, one, two):
    return jnp.split(embed(jnp.concatenate([one, two])), 2)


def stacked(embed, one, two):
    out = embed(jnp.stack([one, two], axis=1).reshape(-1, WIDTH))
    return out.reshape(-1, 2, WIDTH).swapaxes(0, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_runs_of_a_network_are_told_to_be_one_that_is_clean(mesh8, stage):
    layout = zerojax.make_layout({"image": SHAPES["image"]}, mesh8, stage=stage)

    def audit(join):
        step = zerojax.make_train_step(views(join), TX, layout)
        x = jax.ShapeDtypeStruct((8 * BATCH, WIDTH), jnp.float32)
        return step.audit(dict.fromkeys(SIDES, x), joins_examples=join is not behind)

    (volume,) = audit(twice).problems
    assert volume.kind == "volume"
    remedy = "once, on jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:])"
    assert remedy in volume.remedy
    assert "reduce='once'" not in volume.remedy  # the loss joins examples
    remedies = {problem.remedy for problem in audit(behind).problems}
    assert any("changes its device: jnp.stack([a, b], axis=1)" in remedy for remedy in remedies)
    assert audit(stacked).problems == ()


@pytest.mark.parametrize("order", ["none", "sorted", "permuted before", "sorted and placed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_examples_in_another_order_may_be_computed_by_every_device(mesh8, stage, order):
    """XLA brings them to all, and each computes the layers of all: no gradient is summed."""
    shapes = shapes_of({"embed": (4096, 64), "up": (2, 64, 256), "down": (2, 256, 64)})
    layout = zerojax.make_layout(shapes, mesh8, stage=stage, min_size=0)
    tx = zerojax.sharded(TX, layout)

    def loss(params, batch):
        x = params["embed"][batch["tokens"]]
        if order.startswith("sorted"):
            x = x[jnp.argsort(batch["length"])]
        if order == "sorted and placed":
            x = jax.lax.with_sharding_constraint(x, layout.batch)

        def layer(x, w):
            return x + jax.nn.relu(x @ w["up"]) @ w["down"], None

        layers = {name: params[name] for name in ("up", "down")}
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2)

    def step(params, opt_state, batch):
        if order == "permuted before":
            batch = jax.tree.map(lambda x: x[jnp.argsort(batch["length"])], batch)
        grads = jax.grad(zerojax.gather_where_used(loss, layout))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    kept = (layout.params, layout.opt_state(TX))
    shapes = {"tokens": (16, 16), "length": (16,)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}
    places = {"in_shardings": (*kept, layout.batch), "out_shardings": kept}
    jitted = jax.jit(step, donate_argnums=(0, 1), **places)
    given = (layout.shapes, jax.eval_shape(TX.init, layout.shapes), batch)
    report = audit(jitted.lower(*given).compile(), layout, joins_examples=True)
    found = [problem for problem in report.problems if problem.kind == "reduction"]
    if order in ("none", "sorted and placed"):
        assert report.problems == ()
    else:
        (problem,) = found
        assert "its gradient is summed nowhere" in problem.seen
        assert "down" in problem.where
        assert "constrain what was put in another order to layout.batch" in problem.remedy
