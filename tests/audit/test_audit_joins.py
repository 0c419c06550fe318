"""Losses that join examples of several devices: what moves for that is the loss's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax

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
