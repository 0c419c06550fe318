"""Blocks of random programs: ways to use weights between activations `h` of [B, D] and the next."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

Tree = Any

# Ways to use a weight before it meets activations; each keeps its shape.
WEIGHTS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "as it is": lambda w: w,
    "half": lambda w: 0.5 * w + 0.01,
    "tanh": jnp.tanh,
    "clipped": lambda w: jnp.clip(w, -0.5, 0.5),
    "pruned": lambda w: jnp.where(jnp.abs(w) < 0.02, 0.0, w),
    "rounded": lambda w: w + jax.lax.stop_gradient(jnp.round(w * 8) / 8 - w),
    "bf16": lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
    "standardised": lambda w: w * jax.lax.rsqrt(1e-2 + jnp.mean(w * w)),
    "by rows": lambda w: w / (0.1 + jnp.linalg.norm(w, axis=-1, keepdims=True)),
    "reshaped": lambda w: w.reshape(-1).reshape(w.shape) * 1.0,
    "reversed": lambda w: w[..., ::-1],
    "twice": lambda w: w.swapaxes(-1, -2).swapaxes(-1, -2),
    "frozen": jax.lax.stop_gradient,
    "cut": lambda w: jnp.concatenate([w[..., :3], w[..., 3:]], -1),
    "jitted": jax.jit(lambda w: w * 1.5),
    "checkpointed": jax.checkpoint(jnp.sin),
}

#: Those with steps: where sums in another order differ by a rounding, a weight may jump.
STEPS = ("bf16", "rounded", "pruned")


@dataclasses.dataclass(frozen=True)
class Block:
    """Some layers in a row.

    Attributes:
        kind: how they are written.
        weight: the use of their first weight.
        num_layers: how many.
        width: F.
    """

    kind: str
    weight: str
    num_layers: int
    width: int


def _layer(block: Block, h: jax.Array, layer: Tree) -> jax.Array:
    use = WEIGHTS[block.weight]
    return (h + 0.5 * jnp.tanh(h @ use(layer["up"])) @ layer["down"]).astype(h.dtype)


def _stacked(make: Callable[..., Tree]) -> Callable[..., Tree]:
    return lambda key, n, D, F: jax.vmap(lambda k: make(k, D, F))(jax.random.split(key, n))


def _pair(key: jax.Array, D: int, F: int) -> Tree:
    a, b = jax.random.split(key)
    return {
        "up": jax.random.normal(a, (D, F)) * D**-0.5,
        "down": jax.random.normal(b, (F, D)) * F**-0.5,
    }


def _listed(key: jax.Array, n: int, D: int, F: int) -> Tree:
    return [_pair(k, D, F) for k in jax.random.split(key, n)]


def _in_list(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for layer in p:
        h = _layer(block, h, layer)
    return h


def _in_list_remat(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for layer in p:
        h = jax.checkpoint(functools.partial(_layer, block))(h, layer)
    return h


def _doubled(block: Block, h: jax.Array, layer: Tree) -> jax.Array:
    """Use a layer, its two halves apart, and the same in other numbers."""
    h, half = _layer(block, h, layer), block.width // 2
    up, down = layer["up"], layer["down"]
    for first, then in ((up[:, :half], down[-half:]), (up[:, -half:], down[:half])):
        h = (h + 0.1 * jnp.tanh(h @ first) @ then).astype(h.dtype)
    return _layer(block, h, jax.tree.map(lambda w: 0.5 * w, layer))


def _in_list_twice(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for layer in p:
        h = _doubled(block, h, layer)
    return h


def _scan_twice(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    return jax.lax.scan(lambda h, layer: (_doubled(block, h, layer), None), h, p)[0]


def _scan_of_repeats(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    order = jnp.array([*range(block.num_layers), 0])
    turns = {"up": p["up"][order], "down": jnp.repeat(p["down"], 2, axis=0)[: len(order)]}
    h = jax.lax.scan(lambda h, layer: (_layer(block, h, layer), None), h, turns)[0]
    turns = jax.tree.map(lambda w: jnp.tile(w, (2, 1, 1)), p)
    return jax.lax.scan(lambda h, layer: (_layer(block, h, layer), None), h, turns)[0]


def _scanned(wrap: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., jax.Array]:
    def run(block: Block, h: jax.Array, p: Tree) -> jax.Array:
        body = wrap(lambda h, layer: (_layer(block, h, layer), None))
        return around(lambda h, p: jax.lax.scan(body, h, p)[0])(h, p)

    return run


def _shared(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    """Run one layer in all turns, beside a product that is rematerialised by itself."""
    layer = jax.checkpoint(functools.partial(_layer, block))

    def turn(h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return layer(h, p) + 0.1 * jax.checkpoint(lambda h: jnp.sin(h) * jnp.cos(h))(h), None

    return jax.lax.scan(turn, h, None, length=block.num_layers)[0]


def _indexed(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for i in range(block.num_layers):
        h = _layer(block, h, jax.tree.map(lambda w, i=i: w[i], p))
    return h


def _fori(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    def body(h: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return _layer(block, h, jax.tree.map(lambda w: w[i], p)), None

    return jax.lax.scan(body, h, jnp.arange(block.num_layers))[0]


def _transposed(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    use = WEIGHTS[block.weight]
    for layer in p:
        h = h + 0.5 * jnp.tanh(h @ use(layer["down"]).T) @ layer["up"].T
    return h


def _einsum(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    use = WEIGHTS[block.weight]
    for layer in p:
        heads = jnp.einsum("bd,df->bf", h, use(layer["up"]))
        h = h + 0.5 * jnp.einsum("bf,fd->bd", jnp.tanh(heads), layer["down"])
    return h


def _vmapped(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    return jax.vmap(lambda row: _in_list(block, row, p))(h)


def _chosen(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    run = functools.partial(_layer, block)
    for i, layer in enumerate(p):
        h = jax.lax.cond(i % 2 == 0, run, lambda h, q: h + 0.1 * run(h, q), h, layer)
    return h


def _normed(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for layer in p:
        scale = 1.0 + layer["scale"].astype(jnp.float32)
        normed = (h * jax.lax.rsqrt(1e-3 + jnp.mean(h * h, -1, keepdims=True))) * scale
        h = _layer(block, normed.astype(h.dtype), layer) + layer["bias"]
    return h


def _with_norms(key: jax.Array, n: int, D: int, F: int) -> Tree:
    more = {"scale": jnp.zeros(D), "bias": jnp.full(D, 0.1)}
    return [{**layer, **more} for layer in _listed(key, n, D, F)]


@jax.custom_vjp
def _own(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(h @ w)


def _own_forward(h: jax.Array, w: jax.Array) -> Any:
    return _own(h, w), (h, w)


def _own_backward(kept: Any, g: jax.Array) -> Any:
    h, w = kept
    g = g * (1 - jnp.tanh(h @ w) ** 2)
    return (g @ w.T).astype(h.dtype), (h.T @ g).astype(w.dtype)


_own.defvjp(_own_forward, _own_backward)


def _own_derivative(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    use = WEIGHTS[block.weight]
    for layer in p:
        h = h + 0.5 * _own(h, use(layer["up"])) @ layer["down"]
    return h


def _lora(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    base = jax.lax.stop_gradient(p["base"])
    for layer, adapter in zip(base, p["adapters"], strict=True):
        h = _layer(block, h, layer) + h @ adapter["a"] @ adapter["b"]
    return h


def _with_adapters(key: jax.Array, n: int, D: int, F: int) -> Tree:
    keys = jax.random.split(key, n)
    adapters = [
        {"a": jax.random.normal(k, (D, 2)) * 0.1, "b": jnp.full((2, D), 0.05)} for k in keys
    ]
    return {"base": _listed(key, n, D, F), "adapters": adapters}


def _biased(block: Block, h: jax.Array, layer: Tree) -> jax.Array:
    """Mix the features by attention with biases that a table has for each distance."""
    distances = jnp.arange(h.shape[1])[:, None] - jnp.arange(h.shape[1])[None] + h.shape[1]
    bias = WEIGHTS[block.weight](layer["table"])[distances].transpose(2, 0, 1)
    wide = h.astype(jnp.float32)
    scores = 0.2 * wide[:, None, :, None] * wide[:, None, None, :] + bias
    mixed = jnp.einsum("bhij,bj->bi", jax.nn.softmax(scores), wide).astype(h.dtype)
    return (h + 0.5 * jnp.tanh(mixed @ layer["mix"])).astype(h.dtype)


def _in_list_biased(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    for layer in p:
        h = _biased(block, h, layer)
    return h


def _scan_biased(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    body = jax.checkpoint(lambda h, layer: (_biased(block, h, layer), None))
    return jax.lax.scan(body, h, p)[0]


def _table(key: jax.Array, D: int, F: int) -> Tree:
    a, b = jax.random.split(key)
    return {
        "table": 0.5 * jax.random.normal(a, (2 * D, 4)),
        "mix": jax.random.normal(b, (D, D)) * D**-0.5,
    }


def _tables(key: jax.Array, n: int, D: int, F: int) -> Tree:
    return [_table(k, D, F) for k in jax.random.split(key, n)]


def _depthwise(block: Block, h: jax.Array, p: Tree) -> jax.Array:
    """Convolve the features and their reverse, as two tokens, each feature by itself."""
    for layer in p:
        kernel = WEIGHTS[block.weight](layer["kernel"]).astype(h.dtype)
        tokens, names = jnp.stack([h, h[:, ::-1]], 1), ("NHC", "HIO", "NHC")
        mixed = jax.lax.conv_general_dilated(
            tokens, kernel, (1,), "SAME", dimension_numbers=names, feature_group_count=h.shape[1]
        )
        h = (h + 0.5 * jnp.tanh(mixed[:, 0] @ layer["mix"])).astype(h.dtype)
    return h


def _kernels(key: jax.Array, n: int, D: int, F: int) -> Tree:
    return [
        {"kernel": jax.random.normal(k, (3, 1, D)), "mix": _table(k, D, F)["mix"]}
        for k in jax.random.split(key, n)
    ]


def _plain(f: Any) -> Any:
    return f


#: kind: how its parameters are made, and how it runs.
KINDS: dict[str, tuple[Callable[..., Tree], Callable[..., jax.Array]]] = {
    "list": (_listed, _in_list),
    "list of checkpoints": (_listed, _in_list_remat),
    "scan": (_stacked(_pair), _scanned(_plain, _plain)),
    "scan of checkpoints": (_stacked(_pair), _scanned(jax.checkpoint, _plain)),
    "list, layers twice": (_listed, _in_list_twice),
    "loop, layers twice": (_stacked(_pair), _scan_twice),
    "scan of repeated layers": (_stacked(_pair), _scan_of_repeats),
    "checkpoint of a scan": (_stacked(_pair), _scanned(_plain, jax.checkpoint)),
    "scan of a shared checkpoint": (lambda key, n, D, F: _pair(key, D, F), _shared),
    "jit of a scan": (_stacked(_pair), _scanned(_plain, jax.jit)),
    "indexed stack": (_stacked(_pair), _indexed),
    "stack indexed in a loop": (_stacked(_pair), _fori),
    "transposed": (_listed, _transposed),
    "einsum": (_listed, _einsum),
    "vmap": (_listed, _vmapped),
    "cond": (_listed, _chosen),
    "norms": (_with_norms, _normed),
    "custom derivative": (_listed, _own_derivative),
    "lora": (_with_adapters, _lora),
    "tables": (_tables, _in_list_biased),
    "scan of tables": (_stacked(_table), _scan_biased),
    "depthwise": (_kernels, _depthwise),
}


#: The kinds with layers that `Recipe(remat="full")` finds.
LAYERED = [kind for kind in KINDS if "scan" in kind or "loop" in kind or "checkpoint" in kind]


def drawn_blocks() -> st.SearchStrategy[Block]:
    """Draw a block."""
    return st.builds(
        Block,
        kind=st.sampled_from(sorted(KINDS)),
        weight=st.sampled_from(list(WEIGHTS)),
        num_layers=st.integers(2, 3),
        width=st.sampled_from([8, 12, 33, 40]),
    )
