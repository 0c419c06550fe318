"""A parameter on its way to its first real use, and the gather that happens there.

A `Boxed` value is a logical parameter in global view, which stays cut into shards, and the
equations that were recorded because they can't be done on shards. Of

    v = transpose w; c = convert_element_type[new_dtype=float32] v; o = dot_general x c

`v` is a box with the transposed shards, `c` the same box with one recorded equation, and the
product, which mixes it with something else, opens it. `open_box` gathers (or, below stage 3, passes
on) the value and runs what was recorded; its transpose sends the gradient straight to shards, which
is a reduce-scatter where the gradient is born.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from zerojax._jaxpr import bind, num_products, opened
from zerojax._primitives import primitives
from zerojax.collectives.forms import constrain, cut, gather_weight, scatter, to_logical
from zerojax.collectives.gathers._wide import bind_wide
from zerojax.layout import Entries, Layout, LeafLayout, as_spec

#: Of a field that is a part of the tree's structure.
_STATIC = {"static": True}


@dataclasses.dataclass(frozen=True)
class Label:
    """A text for messages, equal to any other: jax traces a function of equal layers once."""

    text: str = dataclasses.field(compare=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    eqn: Any = dataclasses.field(metadata=_STATIC)  # the equation, of one result
    operands: tuple[Any, ...]  # its inputs: scalars, other boxes, and None in the place of the box


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Boxed:
    """A parameter that has not been used yet; a pytree, so that it passes every boundary of JAX."""

    # the logical array, in global view; where parameters are partitioned, cut along `dim`
    value: jax.Array
    entries: Entries = dataclasses.field(metadata=_STATIC)  # the user's mesh axes per dim
    # the partitioned dim; None where the leaf stays whole
    dim: int | None = dataclasses.field(metadata=_STATIC)
    path: Label = dataclasses.field(metadata=_STATIC)
    recorded: tuple[Recorded, ...] = ()  # equations that wait for the gather, in order
    # `value` in fp32 where several uses read it: their gradients are added up before one rounding
    wide: jax.Array | None = None

    @property
    def shape_alone(self) -> "Boxed":
        """The box without arrays, for the rules of derivatives: jax keeps what these close over."""
        return dataclasses.replace(self, value=jax.typeof(self.value), recorded=(), wide=None)

    @property
    def source(self) -> jax.Array:
        """The array that a use's gradient goes to."""
        return self.value if self.wide is None else self.wide

    @property
    def dtype(self) -> Any:
        return self.recorded[-1].eqn.outvars[0].aval.dtype if self.recorded else self.value.dtype

    @property
    def held(self) -> frozenset[int]:
        own = (dim for dim, axes in enumerate(self.entries) if axes)
        return frozenset(own) if self.dim is None else frozenset({*own, self.dim})

    def moved(self, value: jax.Array, dims: tuple[int | None, ...]) -> "Boxed":
        """Return a box with the result of a structural operation.

        `dims` has for each of its dims the old one that it is, or None: (1, 0) of a transpose.
        """
        entries = tuple(() if dim is None else self.entries[dim] for dim in dims)
        dim = None if self.dim is None else dims.index(self.dim)
        return dataclasses.replace(self, value=value, entries=entries, dim=dim, wide=None)

    def record(self, eqn: Any, operands: list[Any]) -> "Boxed":
        return dataclasses.replace(self, recorded=(*self.recorded, Recorded(eqn, tuple(operands))))

    def shared(self) -> "Boxed":
        """Let several uses add up gradients in fp32: of 256 the sum in bf16 was 16% too large."""
        dtype = self.value.dtype
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
        wide = self.value.astype(jnp.float32) if is_narrow and self.wide is None else self.wide
        return dataclasses.replace(self, wide=wide)

    def replayed(self, value: jax.Array, run: Callable[[Any, list[Any]], list[Any]]) -> jax.Array:
        """Run what was recorded on an array in the place of the box."""
        for waiting in self.recorded:
            (value,) = run(waiting.eqn, [value if x is None else x for x in waiting.operands])
        return value


@dataclasses.dataclass(frozen=True)
class Opening:
    layout: Layout  # the placement
    reduce_dtype: Any = None  # dtype in which gradients are summed over devices; None is their own
    # int8 or float8_e4m3fn, in which weights are gathered; None is their own
    gather_dtype: Any = None
    # whether what the forward pass gathered is kept for the backward pass
    keeps: bool = False

    @property
    def gathers(self) -> bool:
        return self.layout.partitions("parameter")

    def widens(self, dtype: Any) -> bool:
        """Whether gradients of this dtype are summed in another one."""
        is_wide = self.reduce_dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        return is_wide and jnp.dtype(dtype) != jnp.dtype(self.reduce_dtype)

    def box(self, stored: jax.Array, leaf: LeafLayout, in_turns: bool) -> Any:
        """Return a box with a stored parameter, or the parameter where opening would do nothing.

        `in_turns` says whether each turn of a loop uses it, where devices have copies of vectors.
        """
        is_whole = leaf.dim is None and self.gathers and not self.widens(stored.dtype)
        if is_whole and stored.ndim < 2 - in_turns:
            return stored
        value = to_logical(stored, leaf) if stored.shape != leaf.shape else stored
        return self.placed(Boxed(value, leaf.entries, leaf.dim, Label(leaf.path)))

    def placed(self, boxed: Boxed) -> Boxed:
        """Keep what was computed on shards on shards.

        Left to the partitioner, a value between two constraints may lie whole: it would gather the
        weight of `x @ w.T`, transpose it and keep that for the backward pass.
        """
        if not self.gathers or boxed.dim is None:
            return boxed
        place = functools.partial(cut, layout=self.layout, leaf=boxed.shape_alone, kind="parameter")
        if self.layout.axes["parameter"] != self.layout.axes["gradient"]:
            place = self._placing(place, boxed)
        wide = None if boxed.wide is None else place(boxed.wide)
        return dataclasses.replace(boxed, value=place(boxed.value), wide=wide)

    def uncut(self, x: jax.Array, like: Boxed) -> jax.Array:
        """Replicate an operand or the result of `w / norm(w)` below stage 3, in the shape of `w`.

        The partitioner would cut them as their gradients are cut, and gather norms or quotients.
        So it would the mask of `where(abs(w) > 1, w, 0)`, and `tanh(w)`.
        """
        if self.gathers or like.dim is None or jnp.ndim(x) == 0 or self.widens(x.dtype):
            return x
        boxed = dataclasses.replace(like, value=jnp.broadcast_to(x, like.value.shape))
        place = functools.partial(constrain, layout=self.layout, spec=as_spec(like.entries))
        is_float = jnp.issubdtype(x.dtype, jnp.inexact)
        return (self._placing(place, boxed) if is_float else place)(boxed.value)

    def _placing(self, place: Callable[[Any], Any], boxed: Boxed) -> Callable[[Any], Any]:
        """Let gradients of what is placed become shards, where a constraint would gather them."""
        placed = jax.custom_vjp(place)
        shards = functools.partial(cut, layout=self.layout, leaf=boxed.shape_alone, kind="gradient")
        placed.defvjp(lambda x: (place(x), None), lambda _, g: (shards(g),))
        return placed

    def num_parts(self, boxed: Boxed, dim: int) -> int:
        axes = (*boxed.entries[dim], *(self.layout.axis if dim == boxed.dim else ()))
        return self.layout.num_parts(axes)

    def padding(self, boxed: Boxed) -> int:
        """Count the rows that a box lacks along its cut dim for parts that are as large."""
        dim = boxed.dim
        return 0 if dim is None else -boxed.value.shape[dim] % self.num_parts(boxed, dim)

    def settled(self, values: list[Any]) -> list[Any]:
        """Run on the shards of boxes what was recorded of them, which is elementwise."""

        def one(box: Boxed) -> jax.Array:
            first = box.recorded[0].eqn.primitive.name if box.recorded else ""
            widens = first == "convert_element_type"  # of what is wide already
            return box.replayed(box.source if widens else box.value, bind)

        return [one(v) if isinstance(v, Boxed) else v for v in values]

    def open_box(self, boxed: Boxed) -> jax.Array:
        """Return the logical parameter on every device, gathered if it was partitioned.

        It comes in the dtype in which its gradient is summed, where that is another.
        """
        like, dim, source = boxed.shape_alone, boxed.dim, boxed.source.dtype
        stored, shape = like.dtype, like.value.shape
        wide = self.reduce_dtype if self.widens(stored) else stored
        padding = self.padding(like)

        def unpadded(x: jax.Array) -> jax.Array:
            return jax.lax.slice(x, [0] * x.ndim, shape) if padding else x

        def gathered(x: jax.Array) -> jax.Array:
            if self.gathers and dim is not None:
                x = pad_rows(x.astype(stored), dim, padding)
                x = unpadded(gather_weight(x, self.layout, like, self.gather_dtype))
            x = x.astype(stored).astype(wide)
            return checkpoint_name(x, GATHERED) if self.gathers else x

        def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
            cotangent = pad_rows(cotangent.astype(wide), dim, padding)
            cotangent = unpadded(scatter(cotangent, self.layout, like))
            return (checkpoint_name(cotangent.astype(source), REDUCED),)

        whole = jax.custom_vjp(gathered)
        # Below stage 3 the weight itself: a loop would stack a copy of it for its backward pass.
        forward = whole if self.gathers else gathered
        whole.defvjp(lambda x: (forward(x), None), backward)
        return boxed.replayed(whole(boxed.source), self.open_and_bind)

    def open_and_bind(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Run an equation on opened boxes; results may be wider than it was traced with."""
        operands = [self.widened(v, eqn).open_box(v) if isinstance(v, Boxed) else v for v in values]
        return bind_wide(eqn, operands, self.layout)

    def widened(self, boxed: Boxed, eqn: Any = None) -> "Opening":
        """Sum the gradient of what the program widens before it is rounded, as products make it.

        XLA:GPU sums it whole in fp32, rounds and then cuts it where the rounding stands in between.
        """
        is_wide = boxed.dtype.itemsize > boxed.value.dtype.itemsize and self.reduce_dtype is None
        is_wide = is_wide and jnp.issubdtype(boxed.dtype, jnp.floating)  # not complex(w, v)
        if not is_wide or (eqn is not None and not num_products(eqn)):
            return self
        return dataclasses.replace(self, reduce_dtype=boxed.dtype)

    def opened(self, value: Any) -> Any:
        """Open a box, in the dtype that the program gave it; pass anything else on."""
        return self.open_box(value).astype(value.dtype) if isinstance(value, Boxed) else value


def pad_rows(x: jax.Array, dim: int | None, rows: int) -> jax.Array:
    # jnp.pad's zero is an operand of the gather in a loop, beside the shard.
    widths = [(0, rows if d == dim else 0, 0) for d in range(x.ndim)]
    return jax.lax.pad(x, np.zeros((), x.dtype), widths) if rows else x


#: The name under which rematerialisation policies see a gathered weight.
GATHERED = "zerojax_gathered"

#: The name of a gradient that has been reduced.
REDUCED = "zerojax_reduced"


@functools.cache
def wrap_policy(policy: Any, *, keeps: bool) -> Any:
    """Wrap a user's policy so that gathered weights are kept, or never are.

    Without a policy of the user's: if they are kept, nothing else is saved; if not, all else is.
    """

    def wrapped(primitive: Any, *avals: Any, **params: Any) -> Any:
        is_derived = not keeps and primitive.name in primitives("from_gathered")
        if is_derived or makes_gathered(primitive.name, params):
            # jax rounds what is kept by `reduce_precision`, which takes no complex numbers.
            return keeps and not any(jnp.iscomplexobj(x) for x in avals)
        return not keeps if policy is None else policy(primitive, *avals, **params)

    return wrapped


def makes_gathered(name: str, params: dict[str, Any]) -> bool:
    """Whether an operation is `open_box`, or the name it gives its result."""
    if name == "name":
        return params["name"] == GATHERED
    inner, _ = opened(params.get("call_jaxpr"))
    return inner is not None and any(
        eqn.primitive.name == "name" and eqn.params["name"] == GATHERED for eqn in inner.eqns
    )
