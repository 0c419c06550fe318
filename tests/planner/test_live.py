"""What lies in memory, and when: peaks of small programs as one adds them up by hand."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.planner.live_programs import LOSS, WIDE, N, handmade, leaves_of, peak, shape, trace_of
from zerojax.models import gpt
from zerojax.planner.traced import Sharing, lifetimes_of, peak_of
from zerojax.planner.traced._operations import BACKENDS
from zerojax.planner.traced._split import is_padded, num_parts


def test_the_example_above_the_clock():
    """w 64 bytes, x 128, the loss 4, dy 128, dw 64."""
    found = peak(lambda w, x: jnp.sum(jnp.sin(x @ w)), shape(4, 4), shape(8, 4), 8)
    assert found == 64 + 128 + 4 + 128 + 64 == 388


# ------------------------------------------------------------------ a chain of products

CHAIN = {"in": shape(8, WIDE), "w": [shape(WIDE, WIDE), shape(WIDE, WIDE)]}


def chain(params, x):
    """y1 = x in; y2 = y1 w0; y3 = y2 w1; the loss is elementwise."""
    return jnp.sum(jnp.sin(x @ params["in"] @ params["w"][0] @ params["w"][1]))


def chain_sizes(examples):
    return 4 * WIDE**2, 4 * 8 * WIDE, 4 * examples * WIDE, 4 * examples * 8  # W, in, A, x


def chain_peak(examples, *args, **options):
    return peak(chain, CHAIN, shape(4, 8), examples, *args, **options)


@pytest.mark.parametrize("examples", [16, 1024], ids=["weights weigh more", "examples weigh more"])
def test_a_chain_at_stage_0(examples):
    W, small, A, x = chain_sizes(examples)
    # The gradient of w1 is made while y1, y2 and the gradient of y3 are there; that of w0 when the
    # first one is complete, of y1 and the gradient of y2.
    moments = [3 * W + 3 * A, 4 * W + 2 * A]
    assert chain_peak(examples) == small + x + LOSS + max(moments)


@pytest.mark.parametrize("examples", [16, 1024])
def test_from_stage_1_on_a_gradient_is_scattered_as_soon_as_it_is_there(examples):
    W, small, A, x = chain_sizes(examples)
    # The gradient of w0 is turned around beside its shard and that of w1.
    moments = [3 * W + 3 * A, 3 * W + 2 * W / N + A]
    assert chain_peak(examples, stage=1) == small + x + LOSS + max(moments)


def test_new_parameters_wait_to_be_written_beside_the_old_ones():
    W, *_ = chain_sizes(16)
    # While the gradient of w0 is turned around, the new values of both may be on their way.
    found = [chain_peak(16, "tpu", 1, unwritten=size) for size in (0, W / 2, 3 * W)]
    assert [x - found[0] for x in found] == [0, W / 2, 2 * W]


def test_a_gathered_weight_is_there_while_it_is_used_and_no_longer():
    W, small, A, x = chain_sizes(16)
    held = (2 * W + small) / N
    # w0 is gathered for the gradient of y1, beside it that of y2; both gradients are scattered.
    assert chain_peak(16, stage=3) == held + x + LOSS + 2 * W / N + W + 2 * A


@pytest.mark.parametrize(("combines", "waiting"), [(0.0, 0), (1e6, 2)])
def test_on_a_gpu_gradients_leave_while_the_next_one_is_made(monkeypatch, combines, waiting):
    """Where their shards are smaller than what XLA reduces at once, they wait, whole."""
    backend = dataclasses.replace(BACKENDS["gpu"], combines=combines)
    monkeypatch.setitem(BACKENDS, "gpu", backend)
    W, small, A, x = chain_sizes(16)
    held = (2 * W + small) / N
    # w0 is gathered, a gradient is turned around, and the one before is on its way into shards;
    # y1 and the gradient of y2.
    beyond = waiting * (W - W / N)
    assert chain_peak(16, "gpu", 3) == held + x + LOSS + 3 * W + 2 * A + beyond
    assert chain_peak(16, "cpu", 3) < chain_peak(16, "gpu", 3)


def test_a_list_of_layers_gathers_ahead_and_once_for_all_that_is_computed_again():
    W, A = 4 * WIDE**2, 4 * WIDE
    params = [[shape(WIDE, WIDE)] * 2] * 4

    def loss(params, x):
        for layer in params:
            x = jax.checkpoint(lambda w, x: jnp.sin(x @ w[0]) @ w[1])(layer, x)
        return jnp.sum(jnp.sin(x))

    def found(**options):
        return peak(loss, params, shape(4, WIDE), 1, "cpu", 3, **options)

    # Where layer 0 is computed again, the first weight of layer 1 is left for its backward pass,
    # and the second one of layer 0 on its way. Six gradients are scattered.
    assert found(group=W) == 8 * W / N + LOSS + 3 * W + 6 * W / N + 2 * A
    # Nothing goes ahead: the last gradient is turned around beside its shard and all others.
    assert found() == 8 * W / N + LOSS + W + 8 * W / N + A


def test_parameters_that_come_back_from_masters_are_freed_after_their_last_use():
    W, small, A, x = chain_sizes(16)
    assert chain_peak(16) == small + x + LOSS + 4 * W + 2 * A
    # `in` is gone when y1 is there, and w1 when the gradient of w0 is made.
    assert chain_peak(16, frees=True) == x + LOSS + 3 * W + 3 * A


@pytest.mark.parametrize(("products", "is_kept"), [(4, False), (5, True)])
def test_values_that_are_soon_read_last_lie_in_vector_memory(products, is_kept):
    """y is read again behind some products; what these make is read by the next one alone."""

    def function(w, x):
        y = z = x @ w
        for _ in range(products):
            z = z @ w
        return (z * y).sum(), w

    w, A = shape(WIDE, WIDE), 4 * 64 * WIDE
    program = handmade(function, w, shape(WIDE))
    near, far = (peak(program, w, None, 64, "tpu", vector_memory=size) for size in (A, A - 1))
    held = 4 * WIDE**2 + A  # w and x
    assert near == pytest.approx(held + A * is_kept, abs=LOSS)
    assert far == pytest.approx(held + 3 * A, abs=LOSS), "y, and two of the chain"


@pytest.mark.parametrize(("tables", "stage"), [(1, 0), (1, 2), (1, 3), (2, 0)])
def test_a_tied_tables_logits_lie_in_memory_below_stage_3(tables, stage):
    """Its gradient's product waits for the look-up's part; that of a table of its own does not."""
    params = [shape(512, 64, dtype=jnp.bfloat16)] * tables

    def loss(params, tokens):
        logits = (params[0][tokens] @ params[-1].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    logits = 2 * 8 * 16 * 512  # their gradient in bf16
    tokens = shape(8, 16, dtype=jnp.int32)
    far, near = (peak(loss, params, tokens, 8, "tpu", stage, vector_memory=x) for x in (0, logits))
    assert (far == near) == (tables == 1 and stage < 3)


def test_small_values_of_a_scan_lie_in_vector_memory_as_far_as_there_is_room():
    params, program = model(scan=True)
    lifetimes = lifetimes_of(program, len(leaves_of(params)), "tpu")

    def held(size, reduced=0.0):
        sharing = Sharing(vector_memory=size, reduced=reduced)
        return peak_of(lifetimes, leaves_of(params), 8, frees=False, sharing=sharing)

    batch = 4 * 8 * 33  # 8 examples of 32 tokens and one
    parameters = sum(leaf.held for leaf in leaves_of(params))
    assert held(2**30) == parameters + batch
    made = held(0) - held(2**30)
    for size in (made / 2, made, 2 * made):
        assert held(0) - size / 2 <= held(size) < held(0)
    # But a gradient that SparseCores reduce lies in memory, and no more than there is without any.
    assert held(2**30) < held(2**30, made / 8) < held(2**30, 2 * made) == held(0)


def test_a_gradient_is_as_large_as_the_model_axis_leaves_its_parameter():
    W, small, A, x = chain_sizes(16)
    # All of a layer is cut in two, and the batch is not.
    found = chain_peak(16, model_axis=2, parts=2)
    assert found == x + (small + LOSS + 4 * W + 2 * A) / 2


# ------------------------------------------------------------------ the batch


def test_the_batch_stays_all_microbatches_of_it():
    *_, x = chain_sizes(16)
    assert chain_peak(16, accumulate=3) - chain_peak(16) == 2 * x

    def function(w, x):  # x is read at the beginning, and the most is there at the end
        row = jnp.cumsum(x, axis=1).sum(axis=1, keepdims=True)
        wide = jnp.cumsum(row @ jnp.ones((1, 8 * WIDE)), axis=1)
        return wide.sum(), w

    program = handmade(function, shape(4), shape(WIDE))
    A, fixed = 4 * 64 * WIDE, 4 * 4  # x, w
    for frees in (False, True):
        assert peak(program, shape(4), None, 64, frees=frees) == A + 2 * 8 * A + fixed


# ------------------------------------------------------------------ in place


def in_place_program(dtype=jnp.float32, *, reads_again=False):
    def function(w, x):
        a = jnp.cumsum(x, axis=1)  # [B, D], a kernel's
        b = (a * 2.0).astype(dtype)  # lies in memory for the product
        c = b @ jnp.ones((WIDE, 1), dtype)
        again = jnp.cumsum(a, axis=1)[:, :1].sum() if reads_again else 0.0
        return c.sum() + again, w

    return handmade(function, shape(4), shape(WIDE))


def test_a_result_takes_the_place_of_an_operand_that_is_read_for_the_last_time():
    A, fixed = 4 * 64 * WIDE, 4 * 4 + 4 * WIDE + 4 * 64  # w, the ones, c
    at = functools.partial(peak, params=shape(4), batch=None, examples=64)
    assert at(in_place_program()) == 2 * A + fixed  # x, and one more
    half = at(in_place_program(jnp.bfloat16))
    assert 2.5 * A <= half <= 2.5 * A + fixed, "of other bytes it can't"
    assert at(in_place_program(reads_again=True)) >= 3 * A, "what is read again stays"


def test_a_parameter_that_is_not_freed_is_not_written_over():
    W, x = 4 * WIDE**2, 4 * 4 * 8

    def loss(w, x):
        return jnp.sum(jnp.sin(w)) + jnp.sum(x)

    kept, freed = (peak(loss, shape(WIDE, WIDE), shape(4, 8), 4, frees=f) for f in (False, True))
    assert 2 * W <= kept - x <= 2 * W + 4 * LOSS
    assert W <= freed - x <= W + 4 * LOSS


def test_an_elementwise_operand_lies_in_memory_unless_the_backend_merges_it():
    def function(w, x):
        return (jnp.sin(x) @ jnp.ones((WIDE, 1))).sum(), w

    program = handmade(function, shape(4), shape(WIDE))
    gpu, cpu, tpu = (peak(program, shape(4), None, 64, p) for p in ("gpu", "cpu", "tpu"))
    A, ones = 4 * 64 * WIDE, 4 * WIDE
    assert gpu == cpu
    assert A <= gpu - tpu <= A + ones


def test_a_parameter_for_every_example_is_as_large_as_all_of_them():
    def function(w, x):
        queries = jnp.broadcast_to(w, (x.shape[0], *w.shape))
        return jnp.einsum("bqd,bd->bq", queries, x).sum(), w

    w = shape(16, WIDE)
    program = handmade(function, w, shape(WIDE))
    queries, x = 4 * 64 * 16 * WIDE, 4 * 64 * WIDE
    assert peak(program, w, None, 64) == 4 * 16 * WIDE + x + queries + 4 * 64 * 16


# ------------------------------------------------------------------ backends


def product_peak(m, k, n, platform):
    """Return the peak of [m, k] @ [k, n] in fp32, m examples."""

    def function(w, x):
        return (x @ w).sum(), w

    w = shape(k, n)
    return peak(handmade(function, w, shape(k)), w, None, m, platform)


@pytest.mark.parametrize(("k", "parts", "pads"), [(2560, 8, False), (2561, 8, True)])
def test_a_gpu_writes_parts_of_a_product_and_pads_what_does_not_divide(k, parts, pads):
    m, n = 256, 640
    copies = 4 * k * (m + n) if pads else 0
    gpu, tpu = (product_peak(m, k, n, platform) for platform in ("gpu", "tpu"))
    assert gpu - tpu == pytest.approx(4 * parts * m * n + copies, abs=LOSS)


def test_a_gpu_makes_a_product_of_many_tiles_at_once():
    assert product_peak(256, 641, 72_821, "gpu") == product_peak(256, 641, 72_821, "tpu")


def test_a_contraction_over_examples_is_as_long_as_the_microbatch():
    """The gradient of a weight sums over examples, of which the trace saw another number."""

    def function(w, x):
        return x.sum(), jnp.einsum("bi,bj->ij", x, x)

    w = shape(WIDE, WIDE)
    program = handmade(function, w, shape(WIDE))
    for examples in (64, 4096, 4100):
        parts = num_parts(WIDE, WIDE, examples, 1, 4)
        copies = 2 * 4 * examples * WIDE if is_padded(examples, parts) else 0
        written = 4 * parts * WIDE**2 if parts > 1 else 0
        gpu, tpu = (peak(program, w, None, examples, p) for p in ("gpu", "tpu"))
        assert gpu - tpu == pytest.approx(written + copies, abs=LOSS)


def test_a_scatter_is_written_into_the_sum_that_it_goes_to():
    def function(w, x, ids):
        rows = jnp.zeros_like(x).at[ids].add(w)  # as the look-up of words has it
        return ((rows + 2.0 * x) @ jnp.ones((WIDE, 1))).sum(), w

    A = 4 * 64 * WIDE
    program = handmade(function, shape(WIDE), shape(WIDE), shape(dtype=jnp.int32))
    for platform in ("gpu", "tpu"):
        assert 2 * A < peak(program, shape(WIDE), None, 64, platform) < 2.1 * A


# ------------------------------------------------------------------ a whole model


@functools.cache
def model(**options):
    config = gpt.Config(num_layers=4, width=64, num_heads=2, vocab_size=128, context=32, **options)
    params = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    batch = shape(4, config.context + 1, dtype=jnp.int32)
    return params, trace_of(functools.partial(gpt.loss, config), params, batch).operations


@pytest.mark.parametrize("scan", [True, False])
def test_more_examples_and_lower_stages_never_take_less(scan):
    params, program = model(scan=scan)
    for platform, frees in itertools.product(("cpu", "gpu", "tpu"), (False, True)):
        lifetimes = lifetimes_of(program, len(leaves_of(params)), platform)
        by_stage = [
            [peak_of(lifetimes, leaves_of(params, s), b, frees=frees) for b in (1, 2, 3, 8, 9)]
            for s in (0, 1, 3)
        ]
        for peaks in by_stage:
            assert peaks == sorted(peaks)
        whole, cut, _ = by_stage
        assert all(a >= b for a, b in zip(whole, cut, strict=True))
