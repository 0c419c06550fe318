"""Aliases and the vocabulary that the whole package is written in.

Note: kinds of tensor
    *parameter* what the loss reads; *gradient* what its derivative gives; *optimizer* the optax
    state; *master* the high-precision copy of the parameters that the optimizer updates;
    *activation* what the forward pass keeps for the backward pass.

Note: forms of a leaf
    *logical* the user's shape; *stored* padded where no dim divides; *shard* one device's part of
    the stored leaf; *gathered* the stored leaf made whole again on every device of the axis.

``axis`` is of the mesh, ``dim`` of a tensor, ``num_`` a count. Psi is the number of parameters, N
the number of shards. Bytes are bytes; GB = 1e9 and GiB = 2**30, and output says which.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from jax.sharding import AbstractMesh, Mesh

PyTree: TypeAlias = Any
TreeDef: TypeAlias = Any  #: what jax.tree.structure returns
Kind: TypeAlias = Literal["parameter", "gradient", "optimizer", "master"]
Shape: TypeAlias = tuple[int, ...]
Axes: TypeAlias = tuple[str, ...]
LossFn: TypeAlias = Callable[..., Any]
AnyMesh: TypeAlias = Mesh | AbstractMesh  #: with devices, or with sizes alone


def platform_of(device: Any) -> str:
    """Return the backend of a device: "cpu", "gpu" or "tpu"."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, str(device.platform))
