"""Operations on each example that XLA's partitioner does not divide: it gathers all examples.

GPUs and CPUs don't divide a Fourier transform along the batch, libtpu no decomposition of matrices,
and CPUs no `top_k`. Each device does those of its own examples:

    h:f32[64,32]  8 devices      y = shard_map[ fft h:[8,32] ]
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import REMATERIALISED, bind_here, called, runs_in_place, variables
from zerojax.layout import Layout

#: Operations, and how many of the last dims they mix; a Fourier transform says it itself.
_MIXED = {"eigh": 2, "fft": 0, "lu": 2, "svd": 2, "top_k": 1}


def is_apart(eqn: Any, layout: Layout, from_batch: set[Any]) -> bool:
    """Whether an equation, or a call of it, is one that each device does for its own examples.

    These lie along the first dim; where devices can't divide it, the partitioner has its way.
    """
    parts, name = layout.num_batch_parts, eqn.primitive.name
    if parts == 1 or from_batch.isdisjoint(variables(eqn.invars)):
        return False
    if runs_in_place(eqn) or name == REMATERIALISED:
        return any(is_apart(x, layout, from_batch) for x in called(eqn).eqns)
    if name not in _MIXED or (name == "top_k" and layout.platform != "cpu"):
        return False
    shape = eqn.invars[0].aval.shape
    if eqn.params.get("axis", -1) % len(shape) == 0:  # top_k of the examples
        return False
    mixed = _MIXED[name] or len(eqn.params["fft_lengths"])
    return len(shape) > mixed and shape[0] % parts == 0


def bind_apart(eqn: Any, values: Sequence[Any], layout: Layout) -> list[jax.Array]:
    """Let each device do an operation for its own examples."""
    mesh, axes = layout.auto_mesh, layout.batch_axes
    own = jax.shard_map(
        lambda *xs: bind_here(eqn, xs),
        mesh=mesh,
        in_specs=P(axes),
        out_specs=P(axes),
        axis_names={*axes},
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return own(*values)
