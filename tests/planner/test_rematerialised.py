"""Other rematerialisation of a loss that nobody edits: the same numbers, other things kept."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import mlp
from tests.planner import live_programs
from tests.planner.live_programs import shape, trace_of
from zerojax import rematerialised
from zerojax.models import gpt
from zerojax.planner.traced import lifetimes_of
from zerojax.recipe import as_remat

REMATS = ("none", "dots", "full")
SIZES = {"num_layers": 2, "width": 16, "num_heads": 2, "vocab_size": 32, "context": 8}


def gpt_problem(**options):
    config = gpt.Config(**SIZES, init_scale=0.3, **options)
    tokens = jax.random.randint(jax.random.key(1), (4, config.context + 1), 0, config.vocab_size)
    return functools.partial(gpt.loss, config), gpt.init(config, jax.random.key(0)), tokens


def mlp_problem():
    """All but the last layer of an mlp in one `jax.checkpoint`, in a jit of its own."""
    config = mlp.Config(num_layers=3, width=16, input_size=8, output_size=16)
    params = {"body": mlp.init(config, jax.random.key(0)), "head": jnp.full((16, 4), 0.1)}

    @jax.jit
    def loss(params, x):
        hidden = jax.checkpoint(functools.partial(mlp.apply, config))(params["body"], x)
        return jnp.mean((jnp.tanh(hidden) @ params["head"]) ** 2)

    return loss, params, jax.random.normal(jax.random.key(1), (12, 8))


def flax_problem():
    """Blocks of a flax model, scanned and rematerialised by flax itself."""
    nn = pytest.importorskip("flax.linen")

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(
                nn.remat(Block, prevent_cse=False),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = layers()(nn.Dense(16)(x), None)
            return nn.Dense(1)(x)

    x = jax.random.normal(jax.random.key(1), (12, 8))
    return (
        lambda params, x: jnp.mean(Model().apply(params, x) ** 2),
        Model().init(jax.random.key(0), x),
        x,
    )


PROBLEMS = {
    "gpt": gpt_problem,
    "gpt without remat": functools.partial(gpt_problem, remat=False),
    "gpt as a list": functools.partial(gpt_problem, scan=False),
    "mlp in one checkpoint": mlp_problem,
    "flax": flax_problem,
}


@functools.cache
def problem(name):
    return PROBLEMS[name]()


def kept_bytes(loss, params, batch):
    """Count what the backward pass keeps, parameters included: the residuals of jax's own vjp."""
    kept = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, batch), p)[1], params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))


def stacked_bytes(loss, params, batch, remat):
    """Count what scans stack for the backward pass, as a plan does, for the batch as it is."""
    trace = trace_of(loss, params, batch, remat=as_remat(remat))
    lifetimes = lifetimes_of(trace.operations, len(jax.tree.leaves(params)), "gpu")
    return live_programs.stacked_bytes(lifetimes, trace.num_examples)


@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients_are_the_same(name):
    loss, params, batch = problem(name)
    losses = {"as it is": loss} | {remat: rematerialised(loss, remat) for remat in REMATS}
    everything = jax.jit(lambda p, b: {n: jax.value_and_grad(f)(p, b) for n, f in losses.items()})
    found = everything(params, batch)
    value, grads = found.pop("as it is")
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
    for remat, (its_value, its_grads) in found.items():
        np.testing.assert_allclose(its_value, value, rtol=1e-6, err_msg=remat)
        for a, b in zip(jax.tree.leaves(its_grads), jax.tree.leaves(grads), strict=True):
            # Products are summed in another order where fusions differ.
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale, err_msg=remat)


@pytest.mark.parametrize("name", PROBLEMS)
def test_none_keeps_more_than_dots_and_dots_more_than_full(name):
    loss, params, batch = problem(name)
    none, dots, full = (kept_bytes(rematerialised(loss, r), params, batch) for r in REMATS)
    assert none > dots > full


def test_the_model_s_own_remat_does_not_matter():
    """With every layer rematerialised or none, each of the three is the same program."""
    found = {}
    for own in (True, False):
        loss, params, tokens = problem("gpt" if own else "gpt without remat")
        found[own] = [kept_bytes(rematerialised(loss, r), params, tokens) for r in ("none", "full")]
    assert found[True] == found[False]


def test_full_keeps_the_inputs_of_layers_alone():
    loss, params, tokens = problem("gpt without remat")
    layers, examples, width = SIZES["num_layers"], len(tokens), SIZES["width"]
    inputs = 4 * layers * examples * SIZES["context"] * width
    assert stacked_bytes(loss, params, tokens, "full") == inputs
    dots = stacked_bytes(loss, params, tokens, "dots")
    # q, k, v and the 4h; attention's output and the second's input, for the last product's gradient
    # nothing: its result is only added.
    assert dots >= inputs + 4 * layers * examples * SIZES["context"] * (3 + 4) * width
    assert stacked_bytes(loss, params, tokens, "none") > dots


def mixed_loss(params, x):
    """A scanned layer half of which is rematerialised by itself."""

    def layer(x, weights):
        x = x + jnp.tanh(jnp.sin(x) @ weights["outside"])
        return jax.checkpoint(lambda x, w: x + jnp.tanh(jnp.sin(x) @ w))(x, weights["inside"]), None

    return jax.lax.scan(layer, x, params)[0].sum()


def test_a_scanned_body_with_products_outside_of_checkpoints_is_a_layer_itself():
    params = {"outside": shape(5, 8, 8), "inside": shape(5, 8, 8)}
    assert stacked_bytes(mixed_loss, params, shape(3, 8), "full") == 4 * 5 * 3 * 8


def test_checkpoints_of_a_scanned_body_that_hold_all_of_its_products_are_the_layers():
    @jax.checkpoint
    def half(x, w):
        return x + jnp.tanh(jnp.sin(x) @ w)

    def loss(params, x):
        def layer(x, weights):
            return jax.jit(half)(half(x, weights["a"]) * 2.0, weights["b"]), None

        return jax.lax.scan(layer, x, params)[0].sum()

    params = {"a": shape(5, 8, 8), "b": shape(5, 8, 8)}
    stacked = stacked_bytes(loss, params, shape(3, 8), "full")
    assert stacked == 2 * 4 * 5 * 3 * 8, "the input of each half"


def test_none_undoes_checkpoints_within_layers_too():
    params = {"outside": shape(5, 8, 8), "inside": shape(5, 8, 8)}
    none = stacked_bytes(mixed_loss, params, shape(3, 8), "none")
    assert none > stacked_bytes(mixed_loss, params, shape(3, 8), None)


def test_auxiliary_results_and_several_arguments_stay():
    def loss(params, x, y):
        out, ys = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, params)
        return ((out - y) ** 2).sum(), {"sums": ys, "count": 3}

    args = jnp.ones((4, 3, 3)), jnp.ones((2, 3)), jnp.zeros((2, 3))
    (value, aux), (again, its_aux) = loss(*args), rematerialised(loss, "full")(*args)
    np.testing.assert_allclose(value, again)
    assert jax.tree.structure(aux) == jax.tree.structure(its_aux)
    np.testing.assert_allclose(aux["sums"], its_aux["sums"])


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_a_loss_without_layers_can_only_keep_everything(remat):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    with pytest.raises(ValueError, match="needs to know what a layer is"):
        trace_of(loss, shape(4, 4), shape(2, 4), remat=as_remat(remat))
    assert trace_of(loss, shape(4, 4), shape(2, 4), remat=as_remat("none")).operations.ops
