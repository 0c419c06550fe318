"""A layer's input, the activation checkpoint: cut over an axis of the mesh while it waits."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax.recipe import LAYER_INPUT


def mesh_parts(axis: str | None) -> int:
    """Count the devices along an axis of the mesh that is set, which has to have it."""
    if axis is None:
        return 1
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"RematPolicy(partition={axis!r}): no mesh is set, so that layer inputs can't be cut; "
            "give the policy to a train step, Recipe(remat=), or call within jax.set_mesh(mesh)"
        )
    check_axis(axis, mesh)
    return mesh.shape[axis]


def check_axis(axis: str, mesh: Any) -> None:
    if axis not in mesh.axis_names:
        raise ValueError(
            f"RematPolicy(partition={axis!r}): the mesh has no such axis; it has {dict(mesh.shape)}"
        )


def cut_input(x: jax.Array, axis: str | None) -> jax.Array:
    """Name each device's part of a layer's input, which policies keep alone; return the whole.

    The input is [B, ...], whole along the axis; None cuts nothing. What is no activation (whole
    numbers, scalars) stays as it is; what no dim divides is named whole.
    """
    if not _is_activation(x):
        return x
    dim = _dim_to_cut(x, axis)
    if dim is None:
        return checkpoint_name(x, LAYER_INPUT)

    def named(x: jax.Array) -> jax.Array:
        part = jax.lax.with_sharding_constraint(x, _spec(x, dim, axis))
        return whole(checkpoint_name(part, LAYER_INPUT), axis)

    # What is cut and made whole again has the gradient of what was whole all the time: were it cut
    # too, the layer before would have to gather it.
    return _with_whole_gradient(named, x, axis)


def whole(x: jax.Array, axis: str | None) -> jax.Array:
    """Make an activation [B, ...] and its gradient whole along an axis that may cut it."""
    dim = _dim_to_cut(x, axis)
    return x if dim is None else jax.lax.with_sharding_constraint(x, _spec(x, dim, None))


def whole_gradient(x: jax.Array, axis: str | None) -> jax.Array:
    """Return a layer's output [B, ...] as it is, and make its gradient whole."""
    return x if _dim_to_cut(x, axis) is None else _with_whole_gradient(lambda x: x, x, axis)


def _with_whole_gradient(place: Any, x: jax.Array, axis: str | None) -> jax.Array:
    placed = jax.custom_vjp(place)
    # Rematerialisation must see names, which `placed` would hide, so the forward rule has `place`.
    placed.defvjp(lambda x: (place(x), None), lambda _, g: (whole(g, axis),))
    return placed(x)


def _dim_to_cut(x: jax.Array, axis: str | None) -> int | None:
    """Choose the dim of [B, ...] that is cut: the first after the examples that the parts divide.

    None where nothing is cut: one part, no activation, or no dim that divides.
    """
    parts = mesh_parts(axis)
    if parts == 1 or not _is_activation(x):
        return None
    return next((dim for dim in range(1, x.ndim) if x.shape[dim] % parts == 0), None)


def _is_activation(x: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating) and jnp.ndim(x) > 1


def _spec(x: jax.Array, dim: int, axis: str | None) -> P:
    return P(*[axis if d == dim else P.UNCONSTRAINED for d in range(x.ndim)])
