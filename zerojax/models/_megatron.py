"""Megatron-LM's model parallelism as PartitionSpecs: what is cut along the axis, and where.

A layer is two pairs of products. The first weight of a pair is cut by columns and the second by
rows, so that what lies between, heads or hidden units, is a device's own, and one sum over the axis
ends the pair. The embedding is cut by rows of the vocabulary. Between the pairs the residual stream
is whole on every device, or with `sequence` cut along the tokens: then each sum is a
reduce-scatter, and a gather begins the next pair.

Constraints hold on a mesh that is set and has the axis with type Auto; elsewhere they say nothing,
so that the same model runs on one device.

Source: Megatron-LM, arXiv 1909.08053 section 3; sequence parallelism, arXiv 2205.05198 section 4.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class ModelParallel:
    """Places the activations of a model along one axis of the mesh."""

    axis: str | None  # the mesh axis; None places nothing
    sequence: bool = False  # whether the residual stream is cut along the tokens

    @property
    def num_parts(self) -> int:
        """Count the devices along the axis of the mesh that is set; 1 where there is none."""
        return 1 if self.axis is None else _auto_axes().get(self.axis, 1)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Return a pair's products all of [B, T, ...]; their gradient goes straight to tokens.

        That is Megatron-LM's pair of a gather forwards and a reduce-scatter backwards, or without
        `sequence` of nothing forwards and a sum backwards.
        """
        if self.num_parts == 1 or not self.sequence:
            return self.cut(x, None)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return self.cut(x, None)

        gather.defvjp(lambda x: (gather(x), None), lambda _, g: (self.residual(g),))
        return gather(x)

    def residual(self, x: jax.Array) -> jax.Array:
        """Place the residual stream [B, T, D]."""
        parts = self.num_parts
        if self.sequence and x.shape[1] % parts:
            raise ValueError(
                f"gpt: {parts} devices along {self.axis!r} do not divide {x.shape[1]} tokens; give "
                f"a multiple of {parts} tokens, or sequence_parallel=False"
            )
        return self.cut(x, 1 if self.sequence else None)

    def cut(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Cut heads, hidden units or the vocabulary along the axis; None makes [B, ...] whole."""
        if self.num_parts == 1:
            return x
        entries: list[Any] = [None] * x.ndim
        if dim is not None:
            entries[dim] = self.axis
        # Which device has which examples is not the model's to say.
        return jax.lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, *entries[1:]))


def _auto_axes() -> dict[str, int]:
    """Return the axes of type Auto of the mesh that is set, with their sizes."""
    mesh = jax.sharding.get_abstract_mesh()
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in types if kind == AxisType.Auto}
