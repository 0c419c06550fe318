"""A grammar of training programs: what people write between parameters and a loss.

A program is plain data: blocks in a row, each a way to use weights; a head with a loss of each
example; what the loss has beside it; how it is laid out and computed. `strategy()` draws one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st

import zerojax
from tests.platforms import CHIPS
from tests.properties.blocks import KINDS, LAYERED, STEPS, Block, Tree, drawn_blocks

#: Examples of a step, on 3 devices three times as many; no dim of a weight is as large, so that a
#: dim of this size tells activations from weights.
BATCH = 16
VOCAB = 37  # divides nothing


def _regression(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    return jnp.mean((h @ p["head"] - batch["x"]) ** 2, -1)


def _tied(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    logits = h.astype(jnp.float32) @ p["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])


def _classes(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    logits = (h @ p["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"] % 8)


def _penalised(p: Tree, h: jax.Array, batch: Tree) -> jax.Array:
    squares = sum(jnp.sum(jnp.square(w.astype(jnp.float32))) for w in jax.tree.leaves(p))
    return _regression(p, h, batch) + 1e-4 * squares


#: The loss of each example, [B].
HEADS = {
    "regression": _regression,
    "tied": _tied,
    "classes": _classes,
    "penalised": _penalised,
}
#: What a loss has beside it: a weight of each example, of mean 1, or the mean over a mask; noise; a
#: moving mean of what is normalised over examples; what it returns besides; a table in the batch.
BESIDE = ("nothing", "weights", "masked mean", "dropout", "batch norm", "aux", "table")
KEEP = 0.8


def _frozen_embedding(params: Tree) -> Tree:
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if path[-1].key == "embed" else "trained", params
    )


def _partly_frozen(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, _frozen_embedding)


def clipped(name: str, norm: float) -> optax.GradientTransformation:
    """Clip as a recipe does: the norm leaves out what the optimizer leaves alone."""
    clip = optax.clip_by_global_norm(norm)
    first = _partly_frozen(optax.identity()) if name == "partly frozen" else optax.identity()
    return optax.chain(first, clip, OPTIMIZERS[name]())


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
    "partly frozen": lambda: _partly_frozen(optax.adam(1e-2, eps=1e-3)),
}
#: name: sizes of the mesh, and the axes that ZeRO partitions over.
MESHES = {
    "data=8": ({"data": 8}, "data"),
    "data=3": ({"data": 3}, "data"),
    "data=2 fsdp=4": ({"data": 2, "fsdp": 4}, ("data", "fsdp")),
    "replica=2 data=4": ({"replica": 2, "data": 4}, "data"),
}


#: What a program computes in; "mixed" has matrices of blocks in bf16 and the rest in fp32.
PRECISIONS = {
    "fp32": zerojax.Precision(),
    "bf16": zerojax.Precision(params="bfloat16", master="float32"),
    "mixed": zerojax.Precision(master="float32"),
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
    beside: str = "nothing"
    prefetch: float | None = None
    reshard: bool = True
    chip: str = "cpu"

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
        if self.precision == "mixed":
            params["blocks"] = jax.tree.map(
                lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, params["blocks"]
            )
        return params

    def read(self, params: Tree) -> Tree:
        """Cast masters to what the loss reads."""
        own = jax.eval_shape(self.init, jax.random.key(0))
        low = PRECISIONS[self.precision].params
        return jax.tree.map(lambda x, like: x.astype(low or like.dtype), params, own)

    def compute(
        self, params: Tree, batch: Tree, keep: jax.Array | None = None, moving: Any = None
    ) -> tuple[jax.Array, jax.Array, Any]:
        """Return the loss of a batch, that of each example [B], and the new moving mean [D].

        Args:
            params: as `init` makes them.
            batch: as `batch` makes it, without marks.
            keep: what activations are multiplied by, [B, D].
            moving: the moving mean, [D].
        """
        h = params["embed"][batch["tokens"]] + batch["x"].astype(params["embed"].dtype)  # [B, D]
        if keep is not None:
            h = h * keep.astype(h.dtype)
        if moving is not None:
            wide = h.astype(jnp.float32)
            mean = wide.mean(0)
            h = ((wide - mean) * jax.lax.rsqrt(1.0 + wide.var(0)) + moving).astype(h.dtype)
            moving = 0.9 * moving + 0.1 * jax.lax.stop_gradient(mean)
        for block, p in zip(self.blocks, params["blocks"], strict=True):
            h = KINDS[block.kind][1](block, h, p).astype(h.dtype)
        rows = HEADS[self.head](params, h, batch).astype(jnp.float32)
        if self.beside == "table":
            rows = rows * batch["table"][batch["tokens"]]
        if self.beside == "masked mean":
            return jnp.sum(rows * batch["weights"]) / jnp.sum(batch["weights"]), rows, moving
        if self.beside == "weights":
            rows = rows * batch["weights"]
        return rows.mean(), rows, moving

    @property
    def loss(self) -> Callable[..., Any]:
        """The loss as its user writes it: by its parameters it asks for what it needs."""

        def plain(params: Tree, batch: Tree) -> Any:
            return self.compute(params, batch)[0]

        def with_dropout(params: Tree, batch: Tree, key: jax.Array) -> Any:
            return self.compute(params, batch, dropped(key, batch["x"].shape))[0]

        def with_batch_norm(params: Tree, batch: Tree, model_state: Any) -> Any:
            loss, _, moving = self.compute(params, batch, moving=model_state)
            return loss, moving

        def with_aux(params: Tree, batch: Tree) -> Any:
            loss, rows, _ = self.compute(params, batch)
            return loss, {"rows": rows, "mean": rows.mean(), "odd": jnp.sum(batch["tokens"] % 2)}

        special = {"dropout": with_dropout, "batch norm": with_batch_norm, "aux": with_aux}
        return special.get(self.beside, plain)

    @property
    def rounded(self) -> str:
        """The precision in which its gradients are rounded; some losses round by themselves."""
        steps = any(block.weight in STEPS for block in self.blocks)
        return "bf16" if steps or self.precision != "fp32" else "fp32"

    @property
    def num_examples(self) -> int:
        """Count the examples of a step."""
        return BATCH * 3 if "3" in self.mesh else BATCH

    def batch(self, seed: int) -> Tree:
        """Draw a batch."""
        a, b, c = jax.random.split(jax.random.key(seed), 3)
        num = self.num_examples
        batch = {
            "x": jax.random.normal(a, (num, self.dim)),
            "tokens": jax.random.randint(b, (num,), 0, VOCAB),
        }
        if self.beside in ("weights", "masked mean"):
            mask = jax.random.bernoulli(c, 0.6, (num,)).at[0].set(True).astype(jnp.float32)
            batch["weights"] = mask / mask.mean()
        if self.beside == "table":
            batch["table"] = zerojax.Whole(jnp.linspace(0.5, 1.5, VOCAB))
        return batch


def dropped(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw what dropout multiplies activations by."""
    return jax.random.bernoulli(key, KEEP, shape) / KEEP


def strategy() -> st.SearchStrategy[Program]:
    """Draw programs."""
    return st.builds(
        Program,
        blocks=st.lists(drawn_blocks(), min_size=1, max_size=2).map(tuple),
        head=st.sampled_from(list(HEADS)),
        dim=st.sampled_from([24, 32, 20, 13]),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        mesh=st.sampled_from(list(MESHES)),
        stage=st.sampled_from([3, 2, 1, 0]),
        min_size=st.sampled_from([1, 64]),
        precision=st.sampled_from(["fp32", "fp32", "bf16", "mixed"]),
        accumulate=st.sampled_from([1, 2]),
        reduce=st.sampled_from([None, "each", "once"]),
        clip_norm=st.sampled_from([None, 0.5]),
        remat=st.sampled_from([None, None, "full", "dots"]),
        beside=st.sampled_from(BESIDE),
        prefetch=st.sampled_from([None, 1, 0.5]),
        reshard=st.sampled_from([True, True, False]),
        chip=st.sampled_from(["cpu", *CHIPS]),
    ).map(_possible)


def _possible(program: Program) -> Program:
    """Replace what zerojax refuses or warns of.

    That is one reduction at stage 3, weights that are kept gathered below it, layers where there
    are none, and losses that are no mean over examples where devices or microbatches are averaged.
    """
    if program.stage != 3:
        program = dataclasses.replace(program, reshard=True, prefetch=None)
    if program.stage == 3 and program.reduce == "once":
        program = dataclasses.replace(program, reduce=None)
    if program.remat == "full" and not any(block.kind in LAYERED for block in program.blocks):
        program = dataclasses.replace(program, remat="dots")
    if program.beside in ("masked mean", "batch norm"):
        program = dataclasses.replace(program, reduce="each")
    if program.beside == "masked mean":
        program = dataclasses.replace(program, accumulate=1)
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
#: Programs that were wrong once: XLA aborted or summed too much, or whole weights were kept.
FOUND = [
    dataclasses.replace(_PLAIN, mesh="replica=2 data=4", stage=1, precision="bf16", reduce="once"),
    dataclasses.replace(
        _PLAIN, blocks=(Block("depthwise", "half", 2, 8),), mesh="replica=2 data=4", reduce="each"
    ),
    dataclasses.replace(_PLAIN, blocks=(Block("custom derivative", "reversed", 2, 40),)),
    dataclasses.replace(
        _PLAIN, blocks=(Block("indexed stack", "pruned", 3, 8),), dim=13, mesh="data=3"
    ),
    dataclasses.replace(_PLAIN, blocks=(Block("transposed", "frozen", 2, 33),), dim=13),
    dataclasses.replace(_PLAIN, blocks=(Block("stack indexed in a loop", "cut", 3, 8),), dim=24),
    dataclasses.replace(_PLAIN, blocks=(Block("lora", "reversed", 3, 33),), dim=32),
]
