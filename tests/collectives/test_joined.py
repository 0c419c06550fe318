"""Weights that are gathered together between processes on CPUs: the same bits in fewer messages.

Virtual devices stand in for processes: they are said to use gloo.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.collectives.test_gather import stored_params
from tests.collectives.test_prefetch import LISTS, ODD, gradient_of
from tests.collectives.uses import LISTS as USES
from tests.collectives.uses import LOOPS, NARROW, NUM_LAYERS, WIDE, layout_of, loss_of, params_of
from zerojax.collectives import gather_where_used
from zerojax.collectives.passes import prefetched
from zerojax.models import gpt

LOOPED = [*LOOPS, *ODD, *LISTS]


@pytest.fixture
def gloo(monkeypatch):
    """Return what calls a function as between processes on CPUs."""

    def call(function, *args):
        with monkeypatch.context() as patched:
            for module in ("forms._forms", "passes._prefetch"):
                patched.setattr(f"zerojax.collectives.{module}.uses_gloo", lambda layout: True)
            return function(*args)

    return call


def messages(report):
    """Count the gathers of a step, and the elements that they give."""
    found = [x for x in report.collectives if x.op == "all-gather"]
    return sum(x.runs for x in found), sum(x.runs * x.elements for x in found)


def gradients(gradient, layout, args, bound=None):
    """Return gradients, and what the program's gathers are."""
    # Of a function of its own, or jax would take the trace that was made without gloo.
    function = prefetched(functools.partial(gradient), 0, layout, bucket_bytes=bound)
    program = jax.jit(function, out_shardings=layout.grads).lower(*args).compile()
    return program(*args), messages(zerojax.audit(program, layout))


def assert_same(got, want, tolerance=0.0):
    """Compare to the bit, or to a part of the largest element where XLA chooses other kernels."""
    want = jax.tree.leaves(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), want, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        atol = tolerance * np.abs(b).max()
        np.testing.assert_allclose(a, b, 0, atol, err_msg=jax.tree_util.keystr(path))


def assert_joined(gloo, *given, tolerance=0.0, merged=0.05):
    want, alone = gloo(gradients, *given, 1)
    got, together = gloo(gradients, *given)
    assert_same(got, want, tolerance)
    assert together[0] < alone[0]
    # Of a weight alone, XLA may merge the last gather of one pass and the first of the next.
    assert together[1] <= (1 + merged) * alone[1]


#: What is joined does not depend on what a weight is used for: a part of the uses for each size.
EITHER = [(part, (WIDE, NARROW)[part % 2]) for part in range(8)]


@pytest.mark.parametrize(("part", "sizes"), EITHER)
def test_layers_have_the_same_bits(part, sizes, mesh8, gloo):
    tolerance = 0.0 if sizes == WIDE else 1e-5
    assert_joined(gloo, *gradient_of(LOOPED[part::8], mesh8, sizes), tolerance=tolerance)


@pytest.mark.parametrize(("part", "sizes"), EITHER[:4])
def test_whatever_is_done_to_weights_they_are_the_same(part, sizes, mesh8, gloo):
    params = {name: params_of(USES[name], sizes) for name in [*USES][part::4]}
    layout = layout_of(params, 3, mesh8)

    def loss(params, x):
        return sum(loss_of(USES[name], one, x) for name, one in params.items())

    x = jax.random.normal(jax.random.key(2), (16, sizes[0]))
    args = stored_params(params, layout), jax.device_put(x, layout.batch)
    gradient = jax.grad(gather_where_used(loss, layout))
    # Padded, 8 of the 154 gathers that stand alone are those that XLA merges.
    merged = 0.05 if sizes == WIDE else 8 / 154
    # Standardised weights of plain jax differ by 3.3e-5 from those in fp64.
    assert_joined(gloo, gradient, layout, args, tolerance=3.3e-5, merged=merged)


@pytest.mark.parametrize("name", ["scan", "scan of remat", "indexed", "listed_whole"])
def test_a_layer_is_a_message_a_pass(name, mesh8, gloo):
    """Its two leaves, of 128 kB together; two layers of a list, where so much is let go."""
    given = gradient_of([name], mesh8)
    assert gradients(*given)[1][0] == 2 * 2 * NUM_LAYERS
    layers = 2 if name in LISTS else 1
    _, (count, _) = gloo(gradients, *given, layers * 2**17)
    assert count == 2 * NUM_LAYERS // layers


@pytest.mark.parametrize("name", ["listed", "listed_plainly"])
@pytest.mark.parametrize("kept", [1, 2])
def test_the_last_layers_are_kept_for_the_backward_pass(kept, name, mesh8, gloo):
    """As many as a message has: theirs is the last one of the forward pass and the first back."""
    given = gradient_of([name], mesh8)
    want, (_, alone) = gloo(gradients, *given, 1)
    got, (count, elements) = gloo(gradients, *given, kept * 2**17)
    assert_same(got, want)
    assert count == (2 * NUM_LAYERS - kept) // kept
    assert elements == alone - kept * 2**15


SMALL = gpt.Config(num_layers=3, width=32, num_heads=2, vocab_size=64, context=16)
CONFIGS = {
    "scan": SMALL,
    "list": dataclasses.replace(SMALL, scan=False),
    "plain list": dataclasses.replace(SMALL, scan=False, remat=False),
}


def trained(mesh, config, precision, bucket_bytes):
    """Return losses and parameters of a few steps of a GPT of two dtypes, and a step's report."""

    def init(key):
        params = gpt.init(config, key)
        half = functools.partial(jax.tree.map, lambda x: x.astype(jnp.bfloat16))
        *blocks, last = params["blocks"] if not config.scan else [params["blocks"]]
        return params | {"blocks": half(last) if config.scan else [*blocks, half(last)]}

    shapes = jax.eval_shape(init, jax.random.key(0))
    layout = zerojax.make_layout(shapes, mesh, stage=3, min_size=16)
    recipe = zerojax.Recipe(precision=precision, accumulate=2, bucket_bytes=bucket_bytes)
    loss = functools.partial(gpt.loss, config)
    step = zerojax.make_train_step(loss, optax.adamw(1e-2), layout, recipe)
    state, losses = step.init(init, jax.random.key(0)), []
    for number in range(3):
        tokens = jax.random.randint(jax.random.key(number), (32, 17), 0, 64)
        state, metrics = step(state, tokens)
        losses.append(metrics["loss"])
    losses.append(step.evaluate(state, tokens))
    return (losses, state.params), step.audit(tokens)


@pytest.mark.parametrize(
    ("name", "precision"), [("scan", "bf16"), ("list", "fp32"), ("plain list", "bf16")]
)
def test_steps_learn_the_same_and_are_clean(name, precision, mesh8, gloo):
    """A tied embedding, parameters of two dtypes or masters, and microbatches."""
    want, alone = gloo(trained, mesh8, CONFIGS[name], precision, 1)
    got, report = gloo(trained, mesh8, CONFIGS[name], precision, None)
    assert_same(got, want)
    assert not alone.problems
    assert not report.problems
    assert messages(report)[0] < 0.6 * messages(alone)[0]
    bits = {x.item_bits for x in (*alone.collectives, *report.collectives) if x.op == "all-gather"}
    assert bits == ({16} if precision == "bf16" else {16, 32})
    assert report.judged_volume < alone.judged_volume  # what is used last is kept


def test_elsewhere_nothing_is_joined(mesh8):
    gradient, layout, args = gradient_of(["scan"], mesh8)
    assert prefetched(gradient, 0, layout) is gradient
    assert "zerojax_cut" not in str(jax.make_jaxpr(gradient)(*args))
