"""Chunked cross-entropy is cross-entropy, with fewer logits at a time, on any mesh and stage."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.models.cross_entropy import chunked_cross_entropy

B, T, D = 8, 6, 16
MOVES = (
    r"= \(?\w+\[([\d,]*)\].*? (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
)


def whole(hidden, embed, targets):
    logits = jnp.einsum("btd,vd->btv", hidden, embed).astype(jnp.float32)
    wanted = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - wanted


def drawn(vocab_size, dtype, batch=B):
    keys = jax.random.split(jax.random.key(vocab_size), 4)
    return (
        jax.random.normal(keys[0], (batch, T, D)).astype(dtype),
        jax.random.normal(keys[1], (vocab_size, D)).astype(dtype),
        jax.random.randint(keys[2], (batch, T), 0, vocab_size),
        jax.random.normal(keys[3], (batch, T)),
    )


def weighted(function, weights):
    """Give nats and gradients of a sum that weighs every token differently."""

    def loss(hidden, embed, targets):
        nats = function(hidden, embed, targets)
        return jnp.sum(nats * weights), nats

    def run(hidden, embed, targets):
        (_, nats), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, embed, targets)
        return nats, *grads

    return jax.jit(run)


def assert_same(found, wanted, dtype):
    # Rounding of the logits' dtype where logits and gradients are of the order of D ** 0.5 and 1.
    bound = 8 * float(jnp.finfo(dtype).eps) * D**0.5
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        x, y = (np.asarray(v, np.float32) for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("vocab_size", "chunk", "num_shards", "num_groups", "dtype"),
    [
        (96, 32, 1, 1, jnp.float32),
        (96, 1000, 1, 1, jnp.float32),
        (96, 1, 1, 1, jnp.float32),
        (257, 100, 1, 1, jnp.float32),  # no divisor
        (257, 100, 1, 4, jnp.bfloat16),
        (257, 50, 4, 2, jnp.float32),  # a shard that is partly padding
        (257, 50, 4, 2, jnp.bfloat16),
        (5, 2, 4, 1, jnp.float32),  # a shard that is nothing else
        (1000, 384, 1, 1, jnp.float32),  # chunks of even size, smaller than asked for
    ],
)
def test_it_is_the_cross_entropy_of_whole_logits(vocab_size, chunk, num_shards, num_groups, dtype):
    hidden, embed, targets, weights = drawn(vocab_size, dtype)
    chunked = functools.partial(
        chunked_cross_entropy, chunk=chunk, num_shards=num_shards, num_groups=num_groups
    )
    found = weighted(chunked, weights)(hidden, embed, targets)
    assert found[0].dtype == jnp.float32
    assert_same(found, weighted(whole, weights)(hidden, embed, targets), dtype)


def test_large_logits_stay_numbers():
    hidden, embed, targets, weights = drawn(257, jnp.float32)
    found = weighted(functools.partial(chunked_cross_entropy, chunk=64), weights)
    nats, *grads = found(hidden * 1e4, embed * 1e4, targets)
    wanted = whole(hidden * 1e4, embed * 1e4, targets)
    np.testing.assert_allclose(nats, wanted, rtol=1e-5, atol=1e-5 * float(jnp.abs(wanted).max()))
    assert all(np.isfinite(g).all() for g in grads)


def test_a_target_out_of_range_costs_nan():
    hidden, embed, targets, _ = drawn(96, jnp.float32)
    nats = chunked_cross_entropy(hidden, embed, targets.at[0, 0].set(96), chunk=32)
    assert np.isnan(nats[0, 0])
    assert np.isfinite(np.ravel(nats)[1:]).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk": 0}, "chunk is 0; give at least 1"),
        ({"num_shards": 0}, "num_shards is 0"),
        ({"num_groups": 3}, "num_groups=3 does not divide the batch of 8"),
        ({"embed": jnp.zeros((96, D + 1))}, r"embed \(96, 17\) must be \[B, T, D\] and \[V, D\]"),
        ({"targets": jnp.zeros((B,), jnp.int32)}, r"targets \(8,\) must be \[B, T\], \(8, 6\)"),
    ],
)
def test_bad_input_is_named(change, said):
    hidden, embed, targets, _ = drawn(96, jnp.float32)
    given = {"hidden": hidden, "embed": embed, "targets": targets, "chunk": 32} | change
    with pytest.raises(ValueError, match=said):
        chunked_cross_entropy(**given)


@pytest.mark.parametrize(("data", "model"), [(8, 1), (4, 2), (2, 4)])
def test_a_partitioned_vocabulary_stays_where_it_is(data, model):
    vocab_size, chunk = 512, 32
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((data, model), ("data", "model"), axis_types=kinds)
    hidden, embed, targets, weights = drawn(vocab_size, jnp.float32)
    chunked = functools.partial(
        chunked_cross_entropy, chunk=chunk, num_shards=model, num_groups=data
    )
    by_batch, by_rows = (NamedSharding(mesh, P(axis)) for axis in ("data", "model"))
    run = jax.jit(
        weighted(chunked, weights),
        in_shardings=(by_batch, by_rows, by_batch),
        out_shardings=(by_batch, by_batch, by_rows),
    )
    compiled = run.lower(hidden, embed, targets).compile()
    placed = jax.device_put((hidden, embed, targets), (by_batch, by_rows, by_batch))
    assert_same(compiled(*placed), weighted(whole, weights)(hidden, embed, targets), jnp.float32)
    moved = _moved(compiled.as_text())
    assert {op for op, _, _ in moved} == {"all-reduce"}
    assert not any(in_loop for _, _, in_loop in moved)
    # Statistics and the gradient of `hidden` over `model`, that of the shard of `embed` over
    # `data`: each once.
    statistics, to_hidden, to_shard = B // data * T, B // data * T * D, vocab_size // model * D
    assert {size for _, size, _ in moved} == {to_shard} | (
        {statistics, to_hidden} if model > 1 else set()
    )


def _moved(text):
    """List the collectives of a program: operation, elements of a result, whether in a loop."""
    found, in_entry = [], False
    for line in text.splitlines():
        if line and not line[0].isspace():
            in_entry = line.startswith("ENTRY")
        for dims, op in re.findall(MOVES, line):
            size = int(np.prod([int(n) for n in dims.split(",") if n]))
            found.append((op, size, not in_entry))
    return found


def init(vocab_size, width, key):
    keys = jax.random.split(key)
    return {
        "embed": jax.random.normal(keys[0], (vocab_size, width)) / 8,
        "kernel": jax.random.normal(keys[1], (width, width)) / 8,
    }


def tied(cross_entropy, params, tokens):
    """Give the loss of a model whose head is its embedding."""
    x = jnp.tanh(params["embed"][tokens[:, :-1]] @ params["kernel"])
    return jnp.mean(cross_entropy(x, params["embed"], tokens[:, 1:]))


@pytest.mark.parametrize(
    ("stage", "vocab_size", "width", "dim"), [(2, 203, 64, 1), (3, 203, 64, 1), (3, 208, 60, 0)]
)
def test_a_step_with_it_is_the_step_with_whole_logits(mesh8, stage, vocab_size, width, dim):
    key, begin = jax.random.key(0), functools.partial(init, vocab_size, width)
    tokens = jax.random.randint(jax.random.key(1), (16, T + 1), 0, 203)
    results = []
    for used, at in ((whole, 0), (functools.partial(_in_groups, 8), stage)):
        layout = zerojax.make_layout(jax.eval_shape(begin, key), mesh8, stage=at)
        tx = optax.adamw(1e-2)
        step = zerojax.make_train_step(functools.partial(tied, used), tx, layout)
        state = step.init(begin, key)
        text = step.lower(state, tokens).compile().as_text()
        for _ in range(3):
            state, metrics = step(state, tokens)
        results.append((metrics["loss"], zerojax.unpad(state.params, layout)))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    assert layout.leaves[0].dim == dim
    moved = _moved(text)
    assert not any(in_loop for _, _, in_loop in moved)
    # For the forward and for the backward pass at stage 3, for the new parameters at stage 2.
    gathers = [size for op, size, _ in moved if op == "all-gather" and size == vocab_size * width]
    assert len(gathers) == (2 if stage == 3 else 1)


def _in_groups(num_groups, hidden, embed, targets):
    return chunked_cross_entropy(hidden, embed, targets, chunk=64, num_groups=num_groups)


def largest_array(jaxpr, apart):
    """Give the most elements of any array in a traced program, embeddings and their like apart."""
    sizes = [0]
    for eqn in jaxpr.eqns:
        sizes += [largest_array(inner, apart) for inner in jaxprs_in_params(eqn.params)]
        sizes += [v.aval.size for v in eqn.outvars if v.aval.size != apart]
    return max(sizes)


@pytest.mark.parametrize("vocab_size", [8192, 50257, 262144])
def test_no_more_logits_are_traced_than_a_chunk_has(vocab_size):
    chunk = 2048
    hidden, targets = jnp.zeros((2, T, D)), jnp.zeros((2, T), jnp.int32)
    embed = jax.ShapeDtypeStruct((vocab_size, D), jnp.float32)

    def loss(hidden, embed):
        return jnp.sum(chunked_cross_entropy(hidden, embed, targets, chunk=chunk))

    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, embed)
    largest = largest_array(traced.jaxpr, vocab_size * D)
    assert largest <= chunk * max(2 * T, D)


def beyond_arguments(target, vocab_size, num_groups):
    """Compile value and gradients, and give peak less arguments and results, in bytes.

    The embedding and its gradient are among the arguments and results; they are the only ones that
    grow with the vocabulary.
    """
    mesh = zerojax.topology_mesh(target, {"data": 8})
    by_batch, on_all = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    hidden = jax.ShapeDtypeStruct((8, 512, 512), jnp.bfloat16, sharding=by_batch)
    embed = jax.ShapeDtypeStruct((vocab_size, 512), jnp.bfloat16, sharding=on_all)
    targets = jax.ShapeDtypeStruct((8, 512), jnp.int32, sharding=by_batch)

    def loss(hidden, embed, targets):
        return jnp.mean(
            chunked_cross_entropy(hidden, embed, targets, chunk=2048, num_groups=num_groups)
        )

    run = jax.jit(jax.value_and_grad(loss, (0, 1)), out_shardings=(on_all, (by_batch, on_all)))
    stats = run.lower(hidden, embed, targets).compile().memory_analysis()
    return stats.peak_memory_in_bytes - stats.argument_size_in_bytes - stats.output_size_in_bytes


@pytest.mark.parametrize(
    ("target", "num_groups"),
    [
        pytest.param("v5p:2x2x2", 8, marks=pytest.mark.aot("libtpu")),
        pytest.param("h100:1x8", 1, marks=pytest.mark.aot("cuda")),
    ],
)
def test_temporaries_do_not_grow_with_the_vocabulary(target, num_groups):
    small, large = (beyond_arguments(target, v, num_groups) for v in (8192, 262144))
    assert large == pytest.approx(small, rel=0.1)
    # Of one chunk: logits and their slopes, fp32 and in the dtype of the product.
    assert large < 512 * 2048 * 2 * (4 + 2) + 2**22
