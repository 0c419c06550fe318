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
import math

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
        mesh = jax.sharding.get_abstract_mesh()
        if self.axis is None or mesh.empty or self.axis not in mesh.axis_names:
            return 1
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        return mesh.shape[self.axis] if types[self.axis] == AxisType.Auto else 1

    def num_groups(self, num_examples: int) -> int:
        """Count the groups that the mesh's other axes may cut a batch into; 1 where they don't."""
        mesh = jax.sharding.get_abstract_mesh()
        groups = math.prod(
            mesh.shape[name]
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Auto and name != self.axis
        )
        return groups if num_examples % groups == 0 else 1

    def whole(self, x: jax.Array) -> jax.Array:
        """Have all of [B, T, ...] on every device along the axis."""
        return self._cut(x, None)

    def gathered(self, x: jax.Array) -> jax.Array:
        """Return a pair's products all of [B, T, ...]; their gradient goes straight to tokens.

        That is Megatron-LM's pair of a gather forwards and a reduce-scatter backwards, or without
        `sequence` of nothing forwards and a sum backwards.
        """
        if self.num_parts == 1 or not self.sequence:
            return self.whole(x)

        @jax.custom_vjp
        def gather(x: jax.Array) -> jax.Array:
            return self.whole(x)

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
        return self._cut(x, 1 if self.sequence else None)

    def cut(self, x: jax.Array, dim: int) -> jax.Array:
        """Cut heads, hidden units or the vocabulary along the axis."""
        return self._cut(x, dim % x.ndim)

    def _cut(self, x: jax.Array, dim: int | None) -> jax.Array:
        if self.num_parts == 1:
            return x
        entries = [self.axis if d == dim else None for d in range(x.ndim)]
        # Which device has which examples is not the model's to say.
        return jax.lax.with_sharding_constraint(x, P(P.UNCONSTRAINED, *entries[1:]))
