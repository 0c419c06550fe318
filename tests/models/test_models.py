"""Hold the models to what they promise: sizes, shapes, causality, precision, learning."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from zerojax import models
from zerojax.models import gpt

SMALL = gpt.Config(num_layers=2, width=32, num_heads=4, vocab_size=61, context=16)
KEY = jax.random.key(0)

# Compiled whole, as op by op each of these makes dozens of programs, and in haste: they run once.
QUICK: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 0}}
init = jax.jit(gpt.init, static_argnums=0, **QUICK)
apply = jax.jit(gpt.apply, static_argnums=0, **QUICK)
loss_of = jax.jit(gpt.loss, static_argnums=0, **QUICK)
loss_and_grads = jax.jit(jax.value_and_grad(gpt.loss, argnums=1), static_argnums=0, **QUICK)


def tokens_of(config, batch, length, seed=1):
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, config.vocab_size)


def size_of(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def test_models_import_nothing_from_zerojax():
    for path in Path(models.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not any(name.name.startswith("zerojax") for name in node.names), path
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("zerojax"), path
                assert node.level <= 1, f"{path} imports from above the models"


@pytest.mark.parametrize("options", [{}, {"scan": False}, {"model_axis": "model"}], ids=str)
def test_a_gpt_promotes_no_ranks(options):
    """It trains where JAX_NUMPY_RANK_PROMOTION=raise is set."""
    config = dataclasses.replace(SMALL, vocab_multiple=64, **options)
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    with jax.numpy_rank_promotion("raise"), jax.set_mesh(mesh):
        params = jax.eval_shape(functools.partial(gpt.init, config), KEY)
        loss = jax.value_and_grad(functools.partial(gpt.loss, config))
        assert jax.eval_shape(loss, params, tokens_of(config, 4, 9))[0].shape == ()


@pytest.mark.parametrize("size", [10**8, 1.5e9, 7.5e9, 10**12, 10**15])
def test_a_gpt_of_a_size_has_about_so_many_parameters(size):
    config = gpt.of_size(size)
    assert gpt.num_params(config) == pytest.approx(size, rel=0.005 if size > 1e9 else 0.02)
    assert 0.3 < config.width / (64 * config.num_layers) < 3


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_num_params_is_what_init_makes(name):
    config = gpt.preset(name)
    for scan in (True, False) if config.num_layers < 50 else (True,):
        params = jax.eval_shape(
            lambda k, s=scan: gpt.init(dataclasses.replace(config, scan=s), k), KEY
        )
        assert size_of(params) == gpt.num_params(config)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2-small", 124.4), ("gpt2-medium", 354.8), ("gpt2-large", 774.0), ("gpt2-xl", 1557.6)],
)
def test_gpt2_has_its_published_size(name, millions):
    assert gpt.num_params(gpt.preset(name)) / 1e6 == pytest.approx(millions, abs=0.05)


def test_zero_presets_have_the_size_that_they_are_named_for():
    names = [name for name in gpt.PRESETS if name.startswith("zero-")]
    assert len(names) == 9
    for name in names:
        config = gpt.preset(name)
        billions = float(name.removeprefix("zero-").removesuffix("b"))
        # The paper counts the matrices of the layers, 12*L*D^2, and rounds to whole billions.
        assert 12 * config.num_layers * config.width**2 / 1e9 == pytest.approx(billions, abs=1)
        # Norms, biases and the two embeddings add at most 5%, most in the narrowest.
        assert 1 < gpt.num_params(config) / (12 * config.num_layers * config.width**2) < 1.05


def test_an_unknown_preset_names_the_nearest_first():
    with pytest.raises(ValueError, match=r"'gpt2-medum'.*nearest first: gpt2-medium, ") as caught:
        gpt.preset("gpt2-medum")
    assert all(name in str(caught.value) for name in gpt.PRESETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"context": -1}, "context is -1"),
        ({"num_heads": 5}, "num_heads=5 does not divide width=32"),
    ],
)
def test_a_config_that_can_not_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_scanned_leaves_are_stacked_on_dim_0_and_kernels_are_wide():
    blocks = jax.eval_shape(lambda k: gpt.init(SMALL, k), KEY)["blocks"]
    kernels = {name: leaf["kernel"].shape for name, leaf in blocks.items() if "kernel" in leaf}
    assert kernels == {
        "qkv": (2, 32, 96),
        "proj": (2, 32, 32),
        "up": (2, 32, 128),
        "down": (2, 128, 32),
    }
    assert {leaf.shape[0] for leaf in jax.tree.leaves(blocks)} == {2}


def test_init_scales_residual_outputs_by_depth_and_draws_layers_apart():
    config = dataclasses.replace(SMALL, num_layers=8, width=96)
    blocks = init(config, KEY)["blocks"]
    # The deviation of n draws is known to 1/sqrt(2n), at most 0.3% here; 2% is six of that.
    for name, scale in (("qkv", 0.02), ("up", 0.02), ("proj", 0.005), ("down", 0.005)):
        assert float(blocks[name]["kernel"].std()) == pytest.approx(scale, rel=0.02), name
    assert not np.array_equal(blocks["qkv"]["kernel"][0], blocks["qkv"]["kernel"][1])


def test_scan_remat_and_a_list_of_layers_agree():
    tokens = tokens_of(SMALL, 4, 17)
    params = init(SMALL, KEY)
    want_loss, want = loss_and_grads(SMALL, params, tokens)
    layers = [jax.tree.map(lambda x, i=i: x[i], params["blocks"]) for i in range(SMALL.num_layers)]
    listed = init(dataclasses.replace(SMALL, scan=False), KEY)
    assert isinstance(listed["blocks"], list)
    jax.tree.map(np.testing.assert_array_equal, listed["blocks"], layers)
    for scan, remat in ((True, False), (False, True)):
        config = dataclasses.replace(SMALL, scan=scan, remat=remat)
        loss, grads = loss_and_grads(config, params if scan else listed, tokens)
        if not scan:
            grads["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *grads["blocks"])
        assert float(loss) == pytest.approx(float(want_loss), abs=1e-5)
        # fp32 sums in another order: 1e-7 relative a term, a few hundred terms.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want
        )


def test_remat_recomputes_each_layer_once():
    tokens = tokens_of(SMALL, 2, 17)

    def remats(**change):
        config = dataclasses.replace(SMALL, **change)
        params = jax.eval_shape(lambda k: gpt.init(config, k), KEY)
        return str(jax.make_jaxpr(lambda p: gpt.loss(config, p, tokens))(params)).count(
            "prevent_cse"
        )

    # A layer's jaxpr is shared and printed once, however many layers call it.
    assert remats() >= 1
    assert remats(scan=False) >= 1
    assert remats(remat=False) == remats(remat=False, scan=False) == 0


def test_loss_at_the_start_is_that_of_guessing():
    params = init(SMALL, KEY)
    loss = loss_of(SMALL, params, tokens_of(SMALL, 4, 17))
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(math.log(SMALL.vocab_size), abs=0.1)


def test_loss_is_the_cross_entropy_of_the_logits():
    tokens = tokens_of(SMALL, 4, 17)
    params = jax.tree.map(lambda x: 5 * x, init(SMALL, KEY))  # logits that differ
    logits = np.asarray(apply(SMALL, params, tokens[:, :-1]), np.float64)
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    want = -np.log(np.take_along_axis(odds, np.asarray(tokens)[:, 1:, None], -1)).mean()
    assert float(loss_of(SMALL, params, tokens)) == pytest.approx(want, rel=1e-5)


def test_no_token_sees_a_later_one():
    params = init(SMALL, KEY)
    tokens = tokens_of(SMALL, 4, 16)
    changed = tokens.at[:, 9].add(1)
    before, after = apply(SMALL, params, tokens), apply(SMALL, params, changed)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (np.abs(before - after)[:, 9:] > 0).any(-1).all()


def test_more_tokens_than_the_context_are_refused():
    params = init(SMALL, KEY)
    assert apply(SMALL, params, tokens_of(SMALL, 2, 5)).shape == (2, 5, 61)
    with pytest.raises(ValueError, match="17 tokens do not fit a context of 16"):
        loss_of(SMALL, params, tokens_of(SMALL, 2, 18))


def test_compute_follows_the_parameters_unless_told():
    tokens = tokens_of(SMALL, 4, 17)
    full = init(SMALL, KEY)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), full)
    asked = dataclasses.replace(SMALL, dtype=jnp.bfloat16)

    def products(config, params):
        text = str(jax.make_jaxpr(lambda p: gpt.apply(config, p, tokens[:, :-1]))(params))
        return text.count(":bf16[4,16,96]"), text.count(":f32[4,16,96]")

    assert products(SMALL, full)[0] == 0
    assert products(SMALL, half)[1] == 0
    assert products(asked, full)[1] == 0
    for config, params in ((SMALL, half), (asked, full)):
        logits = jax.eval_shape(lambda p, c=config: gpt.apply(c, p, tokens[:, :-1]), params)
        loss, grads = jax.eval_shape(
            lambda p, c=config: jax.value_and_grad(gpt.loss, argnums=1)(c, p, tokens), params
        )
        assert logits.dtype == loss.dtype == jnp.float32
        assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, params)
    want = float(loss_of(SMALL, full, tokens))
    # bf16 keeps 8 bits: 2^-8 of a loss of 4 is 0.016.
    assert float(loss_of(SMALL, half, tokens)) == pytest.approx(want, abs=2**-8 * want)


def test_gpt_learns_a_rule():
    config = gpt.Config(
        num_layers=2, width=32, num_heads=2, vocab_size=8, context=8, init_scale=0.1
    )
    starts = jnp.arange(16) % 8
    tokens = (starts[:, None] + 3 * jnp.arange(9)) % 8  # each token is the last plus 3
    tx = optax.adam(1e-2)

    @functools.partial(jax.jit, **QUICK)
    def fit(params):
        def step(carry, _):
            params, state = carry
            loss, grads = jax.value_and_grad(lambda p: gpt.loss(config, p, tokens))(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, tx.init(params)), length=60)[1]

    losses = fit(init(config, KEY))
    assert losses[-1] < 0.1 < losses[0]
