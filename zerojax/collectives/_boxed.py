"""A parameter on its way to its first real use, and the gather that happens there.

A `Boxed` value is a stored parameter in global view: sliced, transposed or cast it stays
partitioned, because none of that needs the other devices' part. `open_box` ends the journey: it
gathers (or, below stage 3, passes on) the parameter, and its transpose sends the gradient straight
to shards, which is a reduce-scatter where the gradient is born.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from zerojax._jaxpr import bind, opened
from zerojax.collectives._gather import gather, scatter
from zerojax.layout import Entries, Layout, LeafLayout


@dataclasses.dataclass(frozen=True)
class Pending:
    """An equation that waits for the gather.

    Attributes:
        eqn: the equation, of one result.
        operands: its inputs: scalars, and None in the place of the box.
    """

    eqn: Any
    operands: tuple[Any, ...]

    def run(self, opened: jax.Array) -> jax.Array:
        """Run the equation on the opened box."""
        return bind(self.eqn, [opened if x is None else x for x in self.operands])[0]


@dataclasses.dataclass(frozen=True)
class Boxed:
    """A partitioned parameter that has not been used yet.

    Attributes:
        value: the stored array, whole or partitioned.
        entries: the user's mesh axes per dim.
        dim: the partitioned dim; None where the leaf stays whole.
        size: logical size of `dim`, which padding may exceed.
        dtype: dtype that the use asks for; wider than the value's where a cast waits.
        path: for messages.
        pending: equations that wait for the gather, in order.
    """

    value: jax.Array
    entries: Entries
    dim: int | None
    size: int
    dtype: Any
    path: str
    pending: tuple[Pending, ...] = ()

    @property
    def is_padded(self) -> bool:
        """Whether the stored value is longer than the logical one."""
        return self.dim is not None and self.value.shape[self.dim] != self.size

    def holding(self, value: jax.Array) -> Boxed:
        """Return a box with another array of the same placement."""
        return dataclasses.replace(self, value=value)

    def moved(self, value: jax.Array, dims: tuple[int | None, ...]) -> Boxed:
        """Return a box with the result of a structural operation.

        Args:
            value: the result.
            dims: for each of its dims, the old dim that it is, or None: (1, 0) of a transpose.
        """
        entries = tuple(() if dim is None else self.entries[dim] for dim in dims)
        dim = None if self.dim is None else dims.index(self.dim)
        return dataclasses.replace(self, value=value, entries=entries, dim=dim)


def box(value: jax.Array, leaf: LeafLayout) -> Boxed:
    """Return a box with a stored parameter."""
    size = 0 if leaf.dim is None else leaf.shape[leaf.dim]
    return Boxed(value, leaf.entries, leaf.dim, size, value.dtype, leaf.path)


@dataclasses.dataclass(frozen=True)
class Opening:
    """How boxes are opened.

    Attributes:
        layout: the placement.
        reduce_dtype: dtype in which gradients are summed over devices; None is their own.
    """

    layout: Layout
    reduce_dtype: Any = None

    @property
    def gathers(self) -> bool:
        """Whether parameters are partitioned, so that opening moves bytes."""
        return self.layout.partitions("parameter")

    def widens(self, dtype: Any) -> bool:
        """Whether gradients of this dtype are summed in a wider one."""
        return (
            self.reduce_dtype is not None
            and jnp.issubdtype(dtype, jnp.floating)
            and jnp.dtype(dtype) != jnp.dtype(self.reduce_dtype)
        )

    def open_box(self, boxed: Boxed) -> jax.Array:
        """Return the logical parameter on every device, gathered if it was partitioned."""
        stored, dtype, dim, size = boxed.value.dtype, boxed.dtype, boxed.dim, boxed.size
        padding = boxed.value.shape[dim] - size if dim is not None else 0

        @jax.custom_vjp
        def whole(x: jax.Array) -> jax.Array:
            if self.gathers and dim is not None:
                x = gather(x, self.layout, boxed.entries, dim)
            if padding:
                x = jax.lax.slice_in_dim(x, 0, size, axis=dim or 0)
            return checkpoint_name(x.astype(dtype), GATHERED)

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            if padding:
                widths = [(0, padding if d == dim else 0) for d in range(cotangent.ndim)]
                cotangent = jnp.pad(cotangent, widths)
            wide = self.reduce_dtype if self.widens(stored) else stored
            cotangent = scatter(cotangent.astype(wide), self.layout, boxed.entries, dim)
            return (cotangent.astype(stored),)

        whole.defvjp(lambda x: (whole(x), None), backward)
        out = whole(boxed.value)
        for pending in boxed.pending:
            out = pending.run(out)
        return out


def cast(boxed: Boxed, dtype: Any) -> Boxed:
    """Cast a boxed parameter: at once where that leaves less to gather, else after the gather."""
    if jnp.dtype(dtype).itemsize < jnp.dtype(boxed.value.dtype).itemsize:
        boxed = boxed.holding(boxed.value.astype(dtype))
    return dataclasses.replace(boxed, dtype=dtype)


#: The name under which rematerialisation policies see a gathered weight.
GATHERED = "zerojax_gathered"

#: What stands between a gather and the use of a weight; cheap to do again.
FROM_GATHERED = frozenset(
    """
    broadcast_in_dim convert_element_type copy reshape sharding_constraint slice squeeze transpose
    """.split()
)


@functools.cache
def never_saves_gathered(policy: Any) -> Any:
    """Wrap a rematerialisation policy so that no gathered weight is kept for the backward pass.

    Args:
        policy: the user's; None saves everything else.
    """

    def wrapped(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name in FROM_GATHERED or _makes_gathered(primitive.name, params):
            return False
        return True if policy is None else policy(primitive, *avals, **params)

    return wrapped


def _makes_gathered(name: str, params: dict[str, Any]) -> bool:
    """Whether an operation is `open_box`, or the name it gives its result."""
    if name == "name":
        return params["name"] == GATHERED
    inner, _ = opened(params.get("call_jaxpr"))
    return inner is not None and any(
        eqn.primitive.name == "name" and eqn.params["name"] == GATHERED for eqn in inner.eqns
    )
