"""The train state: born sharded, and as shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._types import PyTree, Shape
from zerojax.collectives import auto_region, constrain, shard_tree, store, to_logical
from zerojax.layout import Layout, OptimizerLayout
from zerojax.optim import Hosted, as_transformation, check_like, hosted_leaves, store_state
from zerojax.recipe import HOST_MEMORY, OffloadPolicy, Precision
from zerojax.train._loss_scale import LossScale, first_loss_scale
from zerojax.train._precision import cast_floating


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "masters", "opt_state", "loss_scale"),
    meta_fields=("padded",),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a training step reads and writes.

    Attributes:
        step: int32 scalar, steps done, with those that a loss scale skipped.
        params: what the loss reads. Stages 0 to 2: logical leaves. Stage 3: stored leaves, padded
            where no dim divides; `unpad` gives the logical ones.
        masters: stored high-precision copy that the optimizer updates, or None.
        opt_state: stored optimizer state, in the structure of `tx.init`.
        loss_scale: `scale`, a float32 scalar, and `good_steps`, an int32 one, finite steps since it
            last changed; None where `Precision` asks for no loss scale.
        padded: number in `jax.tree.leaves(opt_state)` and logical shape of every optimizer leaf
            that is stored with padding. Static: it is part of the tree's structure.
    """

    step: Any
    params: PyTree
    masters: PyTree
    opt_state: PyTree
    loss_scale: Any = None
    padded: tuple[tuple[int, Shape], ...] = ()


def init_train_state(
    init_fn: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    layout: Layout,
    *args: Any,
    precision: Precision | None = None,
    offload: OffloadPolicy | None = None,
) -> TrainState:
    """Initialise parameters and optimizer state directly as shards.

    Args:
        init_fn: `init_fn(*args)` gives the logical parameters; it is run under jit.
        tx: the optimizer, not wrapped.
        layout: the placement.
        *args: for `init_fn`, a PRNG key for instance.
        precision: dtypes; the step needs the same.
        offload: what lives in the host's memory; the step needs the same.

    Returns:
        The state, placed as `make_train_step` returns it.

    Raises:
        ValueError: the parameters are not those that the layout was made from, or an offload is
            asked of a backend without host memory.
    """
    build, shardings = _builder(init_fn, tx, layout, precision, offload)
    return jax.jit(build, out_shardings=shardings)(*args)


def abstract_train_state(
    init_fn: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    layout: Layout,
    *args: Any,
    precision: Precision | None = None,
    offload: OffloadPolicy | None = None,
) -> TrainState:
    """Give the state of `init_train_state` as shapes with shardings; nothing is run."""
    build, shardings = _builder(init_fn, tx, layout, precision, offload)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        jax.eval_shape(build, *args),
        shardings,
    )


def unpad(tree: PyTree, layout: Layout) -> PyTree:
    """Give the logical leaves of a tree like the parameters: stored padding is cut off.

    Args:
        tree: `state.params`, `state.masters`, or anything of that structure.
        layout: the placement that the tree was stored under.

    Returns:
        The tree with logical shapes. A leaf that was padded comes back whole on every device.
    """
    given = layout.structure.flatten_up_to(tree)
    for leaf, x in zip(layout.leaves, given, strict=True):
        if jnp.shape(x) not in (leaf.shape, leaf.stored_shape):
            raise ValueError(
                f"leaf {leaf.path!r} has shape {jnp.shape(x)}; the layout knows {leaf.shape} "
                f"and stored {leaf.stored_shape}"
            )
    padded = {
        leaf.path: leaf
        for leaf, x in zip(layout.leaves, given, strict=True)
        if jnp.shape(x) != leaf.shape
    }

    def cut(stored: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            path: constrain(to_logical(x, padded[path]), layout, padded[path].spec)
            for path, x in stored.items()
        }

    specs = {path: leaf.spec for path, leaf in padded.items()}
    shardings = {path: layout.sharding(spec) for path, spec in specs.items()}
    region = auto_region(cut, layout, lambda *_: specs)
    stored = {
        leaf.path: x for leaf, x in zip(layout.leaves, given, strict=True) if leaf.path in padded
    }
    logical = jax.jit(region, out_shardings=shardings)(stored) if padded else {}
    return layout.structure.unflatten(
        logical.get(leaf.path, x) for leaf, x in zip(layout.leaves, given, strict=True)
    )


def state_shardings(
    tx: optax.GradientTransformation,
    layout: Layout,
    precision: Precision,
    hosted: Hosted | None = None,
) -> TrainState:
    """Give the sharding of every leaf of the train state; `hosted` are those on the host."""
    cut = layout.map_leaves(lambda leaf: layout.sharding(leaf.shard_spec))
    whole = layout.map_leaves(lambda leaf: layout.sharding(leaf.spec))
    everywhere = layout.sharding(jax.sharding.PartitionSpec())
    shardings = TrainState(
        step=everywhere,
        params=cut if layout.partitions("parameter") else whole,
        masters=None if precision.master is None else cut,
        opt_state=layout.opt_state(tx, dtype=precision.updated),
        loss_scale=None if precision.loss_scale is None else LossScale(everywhere, everywhere),
        padded=padded_leaves(layout.optimizer(tx, precision.updated)),
    )
    if not hosted:
        return shardings
    return _map_hosted(lambda s: s.with_memory_kind(HOST_MEMORY), shardings, hosted)


def padded_leaves(placed: OptimizerLayout) -> tuple[tuple[int, Shape], ...]:
    """List number and logical shape of the leaves that are stored with padding."""
    return tuple((i, leaf.shape) for i, leaf in enumerate(placed.leaves) if leaf.is_padded)


def _map_hosted(function: Callable[[Any], Any], state: TrainState, hosted: Hosted) -> TrainState:
    """Map a function over the leaves of a state that live in the host's memory."""

    def over(tree: PyTree, far: Sequence[bool]) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            function(x) if is_far else x for x, is_far in zip(leaves, far, strict=True)
        )

    return dataclasses.replace(
        state,
        masters=over(state.masters, hosted.masters) if any(hosted.masters) else state.masters,
        opt_state=over(state.opt_state, hosted.state),
    )


def _builder(
    init_fn: Callable[..., PyTree],
    tx: optax.GradientTransformation,
    layout: Layout,
    precision: Precision | None,
    offload: OffloadPolicy | None,
) -> tuple[Callable[..., TrainState], TrainState]:
    precision = precision or Precision()
    tx = as_transformation(tx)
    placed = layout.optimizer(tx, precision.updated)
    hosted = hosted_leaves(offload, layout, placed, has_masters=precision.master is not None)

    def place(params: PyTree) -> TrainState:
        updated = shard_tree(cast_floating(params, precision.updated), layout)
        low = cast_floating(updated, precision.params) if precision.master is not None else updated
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=layout.map_leaves(
                lambda leaf, x: (
                    store(x, leaf, layout)
                    if layout.partitions("parameter")
                    else constrain(x, layout, leaf.spec)
                ),
                low,
            ),
            masters=None
            if precision.master is None
            else layout.map_leaves(lambda leaf, x: store(x, leaf, layout), updated),
            opt_state=store_state(tx.init(updated), placed, layout),
            loss_scale=first_loss_scale(precision.loss_scale),
            padded=padded_leaves(placed),
        )
        if not hosted:
            return state
        return _map_hosted(lambda x: jax.device_put(x, jax.memory.Space.Host), state, hosted)

    shardings = state_shardings(tx, layout, precision, hosted)

    def build(*args: Any) -> TrainState:
        params = init_fn(*args)
        check_like(params, layout, "what init_fn returns")
        specs = jax.tree.map(lambda s: s.spec, shardings)
        return auto_region(place, layout, lambda *_: specs)(params)

    return build, shardings
