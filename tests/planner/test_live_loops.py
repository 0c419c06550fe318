"""What lies in memory while loops run over layers, and how a model axis and the host share it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.planner.live_programs import WIDE, N, handmade, peak, shape, trace_of
from zerojax.planner.traced import Sharing, checkpoint_bytes, lifetimes_of


def layers(params, x):
    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return jax.lax.scan(layer, x, params)[0].sum()


def layers_peak(num_layers, *args, **options):
    params = shape(num_layers, WIDE, WIDE)
    return peak(layers, params, shape(4, WIDE), 16, *args, **options)


@pytest.mark.parametrize(
    ("stage", "weights"), [(0, 1 + 1), (1, 1 + 1 / N), (2, 1 + 1 / N), (3, 1 / N + 1 / N)]
)
def test_a_scanned_layer_adds_its_weights_their_gradients_and_its_input(stage, weights):
    W, A = 4 * WIDE**2, 4 * 16 * WIDE
    assert layers_peak(6, stage=stage) - layers_peak(5, stage=stage) == weights * W + A


def test_a_scanned_layer_is_gathered_and_its_gradient_whole_one_layer_at_a_time():
    W, A = 4 * WIDE**2, 4 * 16 * WIDE
    for num_layers in (5, 50):
        stacked = num_layers * (2 * W / N + A)
        beside = layers_peak(num_layers, stage=3) - stacked
        assert W < beside < 2 * W + 8 * A


def test_checkpoints_that_are_offloaded_leave_two_layers_on_the_device():
    A = 4 * 16 * WIDE
    for num_layers in (5, 50):
        kept = layers_peak(num_layers) - layers_peak(num_layers, offloads=True)
        assert kept == pytest.approx((num_layers - 2) * A)
    assert layers_peak(2) == layers_peak(2, offloads=True)


def test_checkpoints_that_are_partitioned_are_cut_by_the_model_axis():
    A = 4 * 16 * WIDE
    options = {"model_axis": 2, "parts": 2}
    whole, cut = (layers_peak(6, **options, partitions=partitions) for partitions in (False, True))
    assert whole - cut == 6 * A / 2
    params = shape(6, WIDE, WIDE)
    program = trace_of(layers, params, shape(4, WIDE)).operations
    lifetimes = lifetimes_of(program, 1, "cpu")
    for partitions, parts in ((False, 1), (True, 2)):
        sharing = Sharing(model_axis=2, partitions=partitions)
        assert checkpoint_bytes(lifetimes, 16, sharing) == 6 * A / parts


def test_what_lies_within_layers_is_cut_by_the_model_axis_and_what_they_hand_on_is_not():
    def loss(params, x):
        def layer(h, w):  # keeps its input [B, D], and h @ w [B, 4D] beside it
            return h + jnp.sin(jnp.sin(h @ w).reshape(-1, 4, WIDE)).sum(1), None

        return jax.lax.scan(layer, x, params)[0].sum()

    def of_a_layer(axis):
        options = {"model_axis": axis, "parts": axis}
        params = [shape(num_layers, WIDE, 4 * WIDE) for num_layers in (6, 7)]
        less, more = (peak(loss, x, shape(4, WIDE), 16, **options) for x in params)
        return more - less

    W, A = 4 * 4 * WIDE**2, 4 * 16 * WIDE
    assert of_a_layer(1) > 2 * W + A, "weights and gradients; its input; more beside it"
    assert of_a_layer(4) == A + (of_a_layer(1) - A) / 4


def test_a_cond_takes_what_its_largest_branch_takes():
    def little(x):
        return jnp.cumsum(x, 1).sum()

    def much(x):
        return jnp.cumsum(jnp.cumsum(x, 1), 1).sum()

    def program(*branches):
        def function(w, x):
            return jax.lax.cond(x.sum() > 0, *branches, x), w

        return handmade(function, shape(4), shape(WIDE))

    A = 4 * 64 * WIDE
    for branches in ((little, much), (much, little)):
        found = peak(program(*branches), shape(4), None, 64)
        assert 3 * A <= found <= 3 * A + 64  # x, and two sums
    assert 2 * A <= peak(program(little, little), shape(4), None, 64) <= 2 * A + 64


def indexed(params, x):
    layer = jax.checkpoint(lambda w, h: jnp.tanh(h @ w))
    for i in range(len(params)):
        x = layer(params[i], x)
    return x.sum()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_layers_that_are_read_out_of_a_stack_are_gathered_and_reduced_one_by_one(platform):
    """Three shards of each: of the parameter, of its gradient, and one more.

    A Python loop adds up all gradients at the end, beside their sum.
    """
    W = 4 * WIDE**2

    def found(num_layers):
        params, batch = shape(num_layers, WIDE, WIDE), shape(4, WIDE)
        return peak(indexed, params, batch, 16, platform, stage=3)

    assert found(51) - found(50) == 3 * W / N
    assert found(5) - 5 * 3 * W / N < 2 * W


def test_what_a_scan_keeps_is_made_in_its_stack_on_a_tpu():
    """libtpu fuses what a body computes with the update of the stack; XLA:GPU copies it there."""

    def keeping(params, x):
        def layer(h, w):
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jax.lax.scan(layer, x, params)[0].sum()

    params = {"up": shape(4, WIDE, 8 * WIDE), "down": shape(4, 8 * WIDE, WIDE)}
    gpu, tpu = (peak(keeping, params, shape(4, WIDE), 1024, x, 2) for x in ("gpu", "tpu"))
    hidden = 4 * 1024 * 8 * WIDE
    assert hidden / 2 < gpu - tpu <= hidden + 4 * 1024 * WIDE


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("stage", range(4))
def test_a_product_writes_its_gradient_either_way_around(stage, platform):
    """The gradient of `h @ head` comes of a product and a transpose: one buffer has it."""

    def found(turned):
        def loss(params, x):
            h = layers(params["layers"], x) + x
            logits = h @ (params["head"].T if turned else params["head"])
            return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

        head = (32 * WIDE, WIDE) if turned else (WIDE, 32 * WIDE)
        params = {"head": shape(*head), "layers": shape(3, WIDE, WIDE)}
        return peak(loss, params, shape(4, WIDE), 64, platform, stage)

    assert found(turned=False) == found(turned=True)
