"""A train state from one layout to another, in memory, leaf by leaf."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import leaves_by_path, unwrapped
from zerojax._types import Kind, Shape
from zerojax.checkpoint import KINDS, check_placed, logical_shapes
from zerojax.collectives import auto_region
from zerojax.layout import Layout, LeafLayout, OptimizerLayout, check_layout, optimizer_leaves
from zerojax.recipe import HOST_MEMORY
from zerojax.train._checks import check_usable
from zerojax.train._state import TrainState, hold


def move(
    state: TrainState,
    layout: Layout,
    other: Layout,
    *,
    tx: optax.GradientTransformation | None = None,
) -> TrainState:
    """Move a train state to another layout: another stage, mesh or number of devices.

    Logical values are equal to the bit. Leaves move one after the other, and each is deleted where
    it was, so that no more than the largest leaf is there twice. The state is donated: use the one
    that is returned, which a step of the other layout takes.

    Args:
        state: from a step, its leaves as stored; donated.
        layout: the placement that it lives under: `step.layout`.
        other: the placement that it is to have, made from the same parameters.
        tx: the optimizer, wrapped by `sharded` or not; needed only where a leaf of its state can
            be placed in several ways, or a rule places one, which an error then says.

    Raises:
        TypeError: the state is no `TrainState`, or not of arrays.
        ValueError: it was donated before, or made under another layout, or the layouts were made
            from other parameters (the leaf is named), or on a mesh without devices. Nothing moves.
    """
    for one in (layout, other):
        check_layout(one, "move(state, layout, other)")
        _ = one.devices  # raises where the mesh has none
    check_usable(state)
    for path, x in leaves_by_path(state).items():
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"move takes a state of arrays on devices, and leaf {path!r} is of type "
                f"{type(x).__name__}; zerojax.restore reads one that was saved"
            )
    check_placed(state, layout)
    logical = logical_shapes(state, layout, tx)
    placed = other.optimizer(tx) if tx is not None else _by_path(state, logical, other)
    wanted: dict[str, tuple[LeafLayout, Kind]] = {}
    for part, kind in KINDS.items():
        if getattr(state, part) is not None:
            leaves = placed.leaves if kind == "optimizer" else other.leaves
            wanted |= {f"{part}/{leaf.path}".removesuffix("/."): (leaf, kind) for leaf in leaves}
    fitting = {path: leaf.shape for path, (leaf, _) in wanted.items()}
    given = {path: shape for path, shape in logical.items() if path.startswith((*KINDS,))}
    for path in (*given, *fitting):
        if given.get(path) != fitting.get(path):
            raise ValueError(
                f"leaf {path!r} of the state does not fit the other layout; make both layouts from "
                "the same parameters"
            )
    leaves = []
    for path, x in leaves_by_path(state).items():
        shape, spec = x.shape, P()
        if path in wanted:
            leaf, kind = wanted[path]
            shape = leaf.stored_shape if kind in leaf.axes else leaf.shape
            spec = leaf.spec(kind)
        leaves.append(_move_leaf(x, logical[path], shape, spec, layout, other))
    moved = jax.tree.unflatten(jax.tree.structure(state), leaves)
    if moved.step is state.step:  # by its step the old state is known to be donated
        step = _renewed(state.step, (), (), state.step.sharding, other)
        moved = dataclasses.replace(moved, step=step)
    params = hold(unwrapped(moved.params), other)
    return dataclasses.replace(moved, params=params, padded=placed.padded)


def _by_path(state: TrainState, logical: Mapping[str, Shape], other: Layout) -> OptimizerLayout:
    leaves, paths = [], leaves_by_path(state.opt_state)
    for path in paths:
        name = f"opt_state/{path}".removesuffix("/.")
        found = optimizer_leaves(path, logical[name], other, paths)
        is_ruled = any(rule.kind == "optimizer" and rule.matches(path) for rule in other.rules)
        if is_ruled or len({(leaf.shard_spec, leaf.stored_shape) for leaf in found}) > 1:
            raise ValueError(
                f"leaf {name!r} {list(logical[name])} can be placed in several ways; pass tx=, the "
                "optimizer that made the state"
            )
        leaves.append(found[0])
    return OptimizerLayout(jax.tree.structure(state.opt_state), tuple(leaves))


def _move_leaf(
    x: jax.Array, logical: Shape, shape: Shape, spec: P, layout: Layout, other: Layout
) -> jax.Array:
    """Move one leaf, and delete it where it was.

    Between two paddings it has a shape that both meshes cut: `[1009]`, stored as `[1016]` on 8
    devices and to be `[1010]` on 5, moves as `[1040]`.
    """
    sharding = other.sharding(spec)
    if x.sharding.memory_kind == HOST_MEMORY:
        sharding = sharding.with_memory_kind(HOST_MEMORY)
    if shape == x.shape and x.sharding == sharding:
        return x
    if 0 in logical:
        return jnp.zeros(shape, x.dtype, device=sharding)
    between = x.shape
    if not logical == x.shape == shape:
        ways = ((x.shape, x.sharding.shard_shape(x.shape)), (shape, sharding.shard_shape(shape)))
        units = map(math.lcm, *([a // b for a, b in zip(*way, strict=True)] for way in ways))
        between = tuple(-(-size // n) * n for size, n in zip(logical, units, strict=True))
    moved = jax.device_put(_renewed(x, logical, between, x.sharding, layout), sharding)
    moved.block_until_ready()
    return moved if between == shape else _renewed(moved, logical, shape, sharding, other)


def _renewed(
    x: jax.Array, logical: Shape, shape: Shape, sharding: Any, layout: Layout
) -> jax.Array:
    """Copy a leaf, to another padding or the same, and delete it.

    What `jax.device_put` returns may share buffers with what it was given. The copy has no other
    owner, so that its buffers are freed, or go on in the result.
    """

    def resize(x: jax.Array) -> jax.Array:
        if x.shape == shape:
            return jnp.copy(x)
        widths = [(0, new - old) for old, new in zip(logical, shape, strict=True)]
        return jnp.pad(jax.lax.slice(x, [0] * x.ndim, logical), widths)

    new = jax.jit(auto_region(resize, layout, sharding.spec), out_shardings=sharding)(x)
    new.block_until_ready()
    x.delete()
    return new
