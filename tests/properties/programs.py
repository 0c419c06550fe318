"""A grammar of training programs: what people write between parameters and a loss.

A program is plain data: blocks in a row, each a way to use weights, on activations `h` of [B, D]; a
head with a loss; how it is laid out and computed. `strategy()` draws one, `Program.loss` runs it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st

Tree = Any
#: Examples of a step, on 3 devices three times as many; no dim of a weight is as large, so that a
#: dim of this size tells activations from weights.
BATCH = 16
VOCAB = 37  # divides nothing

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


def _scanned(wrap: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., jax.Array]:
    def run(block: Block, h: jax.Array, p: Tree) -> jax.Array:
        body = wrap(lambda h, layer: (_layer(block, h, layer), None))
        return around(lambda h, p: jax.lax.scan(body, h, p)[0])(h, p)

    return run


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
    return g @ w.T, h.T @ g


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


def _plain(f: Any) -> Any:
    return f


#: kind: how its parameters are made, and how it runs.
KINDS: dict[str, tuple[Callable[..., Tree], Callable[..., jax.Array]]] = {
    "list": (_listed, _in_list),
    "list of checkpoints": (_listed, _in_list_remat),
    "scan": (_stacked(_pair), _scanned(_plain, _plain)),
    "scan of checkpoints": (_stacked(_pair), _scanned(jax.checkpoint, _plain)),
    "checkpoint of a scan": (_stacked(_pair), _scanned(_plain, jax.checkpoint)),
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
}


#: The kinds with layers that `Recipe(remat="full")` finds.
LAYERED = [kind for kind in KINDS if "scan" in kind or "loop" in kind or "checkpoint" in kind]


def _regression(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    return jnp.mean((h @ p["head"] - batch["x"]) ** 2)


def _tied(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    logits = h.astype(jnp.float32) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]).mean()


def _classes(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    logits = (h @ p["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"] % 8).mean()


def _penalised(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    squares = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in jax.tree.leaves(p))
    return _regression(p, h, batch) + 1e-4 * squares


HEADS = {
    "regression": _regression,
    "tied": _tied,
    "classes": _classes,
    "penalised": _penalised,
}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-3, weight_decay=1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2, eps=1e-3)),
    "rmsprop": lambda: optax.rmsprop(1e-3, eps=1e-3),
    "masked": lambda: optax.masked(
        optax.adam(1e-2, eps=1e-3), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
}
#: name: sizes of the mesh, and the axes that ZeRO partitions over.
MESHES = {
    "data=8": ({"data": 8}, "data"),
    "data=3": ({"data": 3}, "data"),
    "data=2 fsdp=4": ({"data": 2, "fsdp": 4}, ("data", "fsdp")),
    "replica=2 data=4": ({"replica": 2, "data": 4}, "data"),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program: what is computed, where it lives, how it runs."""

    blocks: tuple[Block, ...]
    head: str
    dim: int
    optimizer: str
    mesh: str
    stage: int
    min_size: int
    precision: str
    accumulate: int
    reduce: str | None
    clip_norm: float | None
    remat: str | None

    def init(self, key: jax.Array) -> Tree:
        """Draw the parameters."""
        keys = jax.random.split(key, len(self.blocks) + 2)
        D = self.dim
        width = 8 if self.head == "classes" else D
        params = {
            "embed": jax.random.normal(keys[0], (VOCAB, D)),
            "head": jax.random.normal(keys[1], (D, width)) * D**-0.5,
            "blocks": [
                KINDS[block.kind][0](key, block.num_layers, D, block.width)
                for key, block in zip(keys[2:], self.blocks, strict=True)
            ],
        }
        if self.head == "tied":
            del params["head"]
        return params

    def loss(self, params: Tree, batch: Tree) -> jax.Array:
        """Compute the mean loss of a batch."""
        h = params["embed"][batch["tokens"]] + batch["x"].astype(params["embed"].dtype)  # [B, D]
        for block, p in zip(self.blocks, params["blocks"], strict=True):
            h = KINDS[block.kind][1](block, h, p).astype(h.dtype)
        return HEADS[self.head](params, h, batch).astype(jnp.float32)

    @property
    def rounded(self) -> str:
        """The precision in which its gradients are rounded; some losses round by themselves."""
        steps = any(block.weight in STEPS for block in self.blocks)
        return "bf16" if steps else self.precision

    @property
    def num_examples(self) -> int:
        """Count the examples of a step."""
        return BATCH * 3 if "3" in self.mesh else BATCH

    def batch(self, seed: int) -> Tree:
        """Draw a batch."""
        a, b = jax.random.split(jax.random.key(seed))
        num = self.num_examples
        return {
            "x": jax.random.normal(a, (num, self.dim)),
            "tokens": jax.random.randint(b, (num,), 0, VOCAB),
        }


def _blocks() -> st.SearchStrategy[Block]:
    return st.builds(
        Block,
        kind=st.sampled_from(sorted(KINDS)),
        weight=st.sampled_from(list(WEIGHTS)),
        num_layers=st.integers(2, 3),
        width=st.sampled_from([8, 12, 33, 40]),
    )


def strategy() -> st.SearchStrategy[Program]:
    """Draw programs."""
    return st.builds(
        Program,
        blocks=st.lists(_blocks(), min_size=1, max_size=2).map(tuple),
        head=st.sampled_from(list(HEADS)),
        dim=st.sampled_from([24, 32, 20, 13]),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        mesh=st.sampled_from(list(MESHES)),
        stage=st.sampled_from([3, 2, 1, 0]),
        min_size=st.sampled_from([1, 64]),
        precision=st.sampled_from(["fp32", "fp32", "bf16"]),
        accumulate=st.sampled_from([1, 2]),
        reduce=st.sampled_from([None, "each", "once"]),
        clip_norm=st.sampled_from([None, 0.5]),
        remat=st.sampled_from([None, None, "full", "dots"]),
    ).map(_possible)


def _possible(program: Program) -> Program:
    """Replace what zerojax refuses: one reduction at stage 3, and layers where there are none."""
    if program.stage == 3 and program.reduce == "once":
        program = dataclasses.replace(program, reduce=None)
    if program.remat == "full" and not any(block.kind in LAYERED for block in program.blocks):
        program = dataclasses.replace(program, remat="dots")
    return program


_PLAIN = Program(
    blocks=(Block("list", "as it is", 2, 12),),
    head="regression",
    dim=20,
    optimizer="sgd",
    mesh="data=8",
    stage=3,
    min_size=1,
    precision="fp32",
    accumulate=1,
    reduce=None,
    clip_norm=None,
    remat=None,
)
#: Programs that were wrong once: XLA aborted, or whole weights were kept.
FOUND = [
    dataclasses.replace(_PLAIN, mesh="replica=2 data=4", stage=1, precision="bf16", reduce="once"),
    dataclasses.replace(_PLAIN, blocks=(Block("custom derivative", "reversed", 2, 40),)),
    dataclasses.replace(
        _PLAIN, blocks=(Block("indexed stack", "pruned", 3, 8),), dim=13, mesh="data=3"
    ),
    dataclasses.replace(_PLAIN, blocks=(Block("transposed", "frozen", 2, 33),), dim=13),
    dataclasses.replace(_PLAIN, blocks=(Block("stack indexed in a loop", "cut", 3, 8),), dim=24),
    dataclasses.replace(_PLAIN, blocks=(Block("lora", "reversed", 3, 33),), dim=32),
]
