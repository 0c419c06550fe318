"""Moving a leaf between its forms: logical, stored, shard, gathered.

Everything here is written for Auto axes. On a mesh with Explicit axes the caller enters
`auto_region` first, so that a model that knows nothing of explicit sharding still traces.

Gathers and reductions go in the phases that the layout has found. Between two phases stands a
barrier: without it the compiler would make one collective of both.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes
from zerojax._types import Axes, Kind, PyTree, Shape
from zerojax.collectives.forms._tiles import has_pieces, in_tiles, scattered_shape, scatters_at_once
from zerojax.layout import Layout, LeafLayout, Placed, as_spec


def constrain(x: jax.Array, layout: Layout, spec: P) -> jax.Array:
    """Ask the partitioner for a placement; inside jit the shape need not divide."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(layout.auto_mesh, spec))


def to_stored(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    if not leaf.is_padded:
        return x
    widths = [(0, new - old) for old, new in zip(leaf.shape, leaf.stored_shape, strict=True)]
    return jnp.pad(x, widths)


def to_logical(x: jax.Array, leaf: LeafLayout) -> jax.Array:
    if not leaf.is_padded:
        return x
    return jax.lax.slice(x, [0] * x.ndim, leaf.shape)


def shard(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Cut a logical leaf into shards, without padding: the last one may be short."""
    return constrain(x, layout, leaf.shard_spec)


def store(x: jax.Array, leaf: LeafLayout, layout: Layout, kind: Kind = "optimizer") -> jax.Array:
    """Turn a logical leaf into the stored shards of a kind of tensor."""
    return constrain(to_stored(x, leaf), layout, leaf.spec(kind))


def view(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Turn stored shards into the logical leaf, cut the same way; nothing moves."""
    return shard(to_logical(x, leaf), leaf, layout)


def shard_tree(tree: PyTree, layout: Layout) -> PyTree:
    return layout.map_leaves(lambda leaf, x: shard(x, leaf, layout), tree)


def auto_region(function: Callable[..., Any], layout: Layout, out_specs: Any) -> Callable[..., Any]:
    """Run a function under Auto axes whatever the axes of its arguments are.

    `out_specs` are PartitionSpecs of the results, asked for on Explicit axes. In the place of some
    stands a function from a result's shape to its spec.
    """

    def is_spec(node: Any) -> bool:
        return isinstance(node, P)

    def call(*args: Any) -> Any:
        if not any(map(is_explicit, jax.tree.leaves(args))):
            return function(*args)
        specs = out_specs
        if not all(map(is_spec, jax.tree.leaves(specs, is_leaf=is_spec))):
            with jax.sharding.use_abstract_mesh(layout.auto_mesh.abstract_mesh):
                out = jax.eval_shape(function, *as_shapes(args))
            specs = jax.tree.map(
                lambda spec, x: spec if is_spec(spec) else jax.tree.map(spec, x),
                *(out_specs, out),
                is_leaf=is_spec,
            )
        shardings = jax.tree.map(layout.sharding, specs, is_leaf=is_spec)
        return jax.sharding.auto_axes(function, out_sharding=shardings)(*args)

    return call


def is_explicit(x: Any) -> bool:
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return mesh is not None and jax.sharding.AxisType.Explicit in mesh.axis_types


def shard_spec(layout: Layout, leaf: Placed, kind: Kind) -> P:
    return as_spec(leaf.entries, leaf.dim, layout.axes[kind])


def gather(x: jax.Array, layout: Layout, leaf: Placed, kind: Kind = "parameter") -> jax.Array:
    """Gather stored shards of a kind of tensor over the axes that ZeRO partitions over."""
    phases = layout.phases_of(x.shape, leaf.dim)
    dtype, x = x.dtype, _to_bits(x, layout, shard_spec(layout, leaf, kind))
    for sharding in reversed(phases.between(leaf, layout.axes[kind])):
        x = jax.lax.with_sharding_constraint(x, sharding)
        x = jax.lax.optimization_barrier(x)
    return _from_bits(constrain(x, layout, as_spec(leaf.entries)), dtype)


def _to_bits(x: jax.Array, layout: Layout, spec: P) -> jax.Array:
    """View shards of 16-bit floats as integers for gloo: XLA:CPU would move them in 32 bits."""
    if x.dtype.itemsize != 2 or not uses_gloo(layout):
        return x
    # Placed, or the partitioner gathers before it, and floats.
    return constrain(jax.lax.bitcast_convert_type(x, jnp.uint16), layout, spec)


def _from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


#: The name of shards, cut along their first dim, that may be gathered together with others.
CUT = "zerojax_cut"


def gather_weight(x: jax.Array, layout: Layout, leaf: Placed, dtype: Any = None) -> jax.Array:
    """Gather a parameter, in a dtype of one byte or its own; for gloo as rows, as most lie."""
    if dtype is not None:
        return gather_narrow(x, layout, leaf, dtype)
    if leaf.dim is None or any(leaf.entries) or not uses_gloo(layout):
        return gather(x, layout, leaf)
    rows = _to_bits(jnp.moveaxis(x, leaf.dim, 0), layout, P(layout.axes["parameter"]))
    rows = checkpoint_name(rows, CUT)
    return jnp.moveaxis(_from_bits(constrain(rows, layout, P()), x.dtype), 0, leaf.dim)


def scatter(x: jax.Array, layout: Layout, leaf: Placed) -> jax.Array:
    """Sum what every device has, partial sums or a whole array, and keep its shard of the sum.

    Of a gradient [512, 64] that is cut along dim 0, the partitioner is asked for, one by one:

        P(), P("data")                  the whole sum, and its shards: a reduce-scatter
        P("fsdp")                       shards alone, if the batch is cut along "replica" too
        P("x"), barrier, P(("x", "y"))  on a torus, in two phases: along x, then the shards along y
    """
    dim = leaf.dim
    kept = [d for d, size in enumerate(x.shape) if size > 1 or leaf.entries[d]]
    if dim in kept and len(kept) < x.ndim and layout.platform == "tpu":
        # The kernel of a convolution, [1, 1, 256, 256], would be all-reduced.
        held: Any = leaf
        entries = tuple(leaf.entries[d] for d in kept)
        matrix = dataclasses.replace(held, entries=entries, dim=kept.index(dim))
        return scatter(x.reshape([x.shape[d] for d in kept]), layout, matrix).reshape(x.shape)
    if dim:  # along dim 0 libtpu was seen to scatter sums of the partitioner's in any case
        x = in_tiles(x, layout, dim)
    phases = layout.phases_of(x.shape, dim, reduces=True)
    is_gathered = phases.dims and dim == x.ndim - 1 > 0  # along a minor dim, between phases
    is_phased = dim is not None and len(phases.axes) > 1 and not is_gathered
    if not is_phased and (dim is None or {*layout.batch_axes} <= {*layout.axes["gradient"]}):
        # Asked for shards alone, the partitioner may gather activations instead and compute each
        # shard's gradient from all examples; asked for the whole sum first, it reduces, and the
        # compiler makes a reduce-scatter of the sum and the cut. Not so where the batch is cut
        # along more axes: the whole would be summed along these too, across slow links.
        x = constrain(x, layout, as_spec(leaf.entries))
    return cut(x, layout, leaf, "gradient", in_phases=is_phased)


def cut(
    x: jax.Array, layout: Layout, leaf: Placed, kind: Kind, *, in_phases: bool = False
) -> jax.Array:
    """Cut a leaf into the shards of a kind of tensor; partial sums may be summed in phases."""
    phases = layout.phases_of(x.shape, leaf.dim, reduces=True)
    for sharding in phases.between(leaf, layout.axes[kind]) if in_phases else ():
        x = jax.lax.with_sharding_constraint(x, sharding)
        x = jax.lax.optimization_barrier(x)
    return constrain(x, layout, shard_spec(layout, leaf, kind))


def uses_gloo(layout: Layout) -> bool:
    """Whether a mesh spans CPUs of several processes, where each array that moves is a message."""
    return layout.platform == "cpu" and len({d.process_index for d in layout.devices.flat}) > 1


def on_devices(mesh: Any, function: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """Run a function on each device's parts, as `jax.shard_map` does, with the mesh set."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.shard_map(function, mesh=mesh, **how)(*args)


class PerDevice:
    """Sums of what devices compute each for itself, under `shard_map` over the batch axes."""

    def __init__(self, layout: Layout) -> None:
        #: the batch axes, as the mesh of the phases names them
        self.axes: Axes = layout.phases.expand(layout.batch_axes)
        self._layout = layout
        self._phases = layout.phases.within(layout.axes["gradient"])
        self._names = tuple(name for phase in self._phases for name in phase)
        groups = (layout.phases.expand(axes) for axes in layout.groups)
        self._at_once = tuple(axes for axes in groups if {*axes} <= {*self._names})

    def run(
        self,
        function: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        *args: Any,
        by_hand: frozenset[str] = frozenset(),
    ) -> Any:
        """Run a function once per device of the batch axes, and of the axes cut `by_hand` too."""
        names, mesh = {*self.axes} | by_hand, self._layout.phases.mesh
        how: Any = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": names}
        return on_devices(mesh, function, *args, check_vma=False, **how)

    def dim_of(self, leaf: Placed) -> int | None:
        """Return the dim along which a leaf is summed straight into shards, or None."""
        is_free = leaf.dim is not None and not leaf.entries[leaf.dim]
        return leaf.dim if is_free and {*self._names} <= {*self.axes} else None

    def sum_copies(self, copies: jax.Array, leaf: Placed) -> jax.Array:
        """Sum stored leaves, a copy for each device, into shards where `dim_of` has a dim.

        The user's axes are cut by hand as well: a sum that scatters makes whole along them what is
        left to the partitioner.
        """
        dim = self.dim_of(leaf)
        if dim is None:
            zero = jnp.zeros((), copies.dtype)  # jnp.sum would add in fp32, and move that
            return scatter(jax.lax.reduce(copies, zero, jax.lax.add, (0,)), self._layout, leaf)
        own = tuple(self._layout.phases.expand(axes) for axes in leaf.entries)
        places = P(self.axes, *as_spec(own)), as_spec(own, dim, self._names)
        hand = frozenset[str]().union(*own)
        return self.run(lambda x: self.sum_over(x[0], dim), *places, copies, by_hand=hand)

    def sum_over(self, x: jax.Array, dim: int) -> jax.Array:
        """Sum stored leaves over devices, each device keeping its shard of `dim`."""
        dtype = x.dtype
        if self._layout.platform == "tpu" and jnp.iscomplexobj(x):  # libtpu scatters none
            return jax.lax.complex(self.sum_over(x.real, dim), self.sum_over(x.imag, dim))
        if self._layout.platform == "cpu" and dtype.itemsize == 2:
            # XLA sums 16-bit numbers in fp32 on a CPU, but its own conversion aborts the process
            # where another axis of the mesh is left to the partitioner (seen in jaxlib 0.10.2).
            x = x.astype(jnp.float32)
        shape, wanted = x.shape, scattered_shape(x.shape, dim, self._layout)
        if wanted != shape:
            x = jnp.pad(x, [(0, size - old) for size, old in zip(wanted, shape, strict=True)])
        x = in_tiles(x, self._layout, dim)
        is_phased = wanted == shape and has_pieces(shape, dim, self._layout, self._layout.phases)
        is_one = not is_phased and scatters_at_once(wanted, dim, self._layout)
        for phase in self._at_once if is_one else self._phases:
            x = self._scattered(x, phase, dim)
        if wanted != shape:
            x = jax.lax.optimization_barrier(x)  # libtpu fails over a slice of what it scatters
            x = jax.lax.slice(x, [0] * x.ndim, [*shape[:dim], x.shape[dim], *shape[dim + 1 :]])
        rest = tuple(name for name in self.axes if name not in self._names)
        return (jax.lax.psum(x, rest) if rest else x).astype(dtype)

    def _scattered(self, x: jax.Array, axes: Axes, dim: int) -> jax.Array:
        """Sum over axes, and keep this device's shard.

        Between processes on CPUs a reduce-scatter took 8 times as long as an all-reduce: gloo polls
        without a pause for what has arrived before this process asks for it.
        """
        if not uses_gloo(self._layout):
            return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        rows = x.shape[dim] // jax.lax.axis_size(axes)
        start = jax.lax.axis_index(axes) * rows
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, axes), start, rows, dim)

    def spec(self, dim: int) -> P:
        return P(*[None] * dim, self._names)


#: Elements of a block; a row that it does not divide is one block.
BLOCK = 128
#: Rows shorter than this are gathered as they are: scales would be a large part of them.
_SHORTEST = 64


def gather_narrow(x: jax.Array, layout: Layout, leaf: Placed, dtype: Any) -> jax.Array:
    """Gather floating shards as codes and scales, and decode what arrives.

    A block lies along a dim that is not cut, so that each is encoded where it is stored. Leaves
    without such a dim, biases and norms, are gathered as they are.

    With blocks of 2 and int8 (or float8_e4m3fn), `[127.0, -38.1, 2.54, 1.27]` is scales `[1.0,
    0.02]` and codes `[127, -38, 127, 64]`, and arrives as `[127.0, -38.0, 2.54, 1.28]`.
    """
    held = {dim for dim, axes in enumerate(leaf.entries) if axes or dim == leaf.dim}
    along = block_dim(x.shape, held)
    if along is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
        return gather(x, layout, leaf)
    spec = shard_spec(layout, leaf, "parameter")
    parts = encode(x, along, dtype)
    codes, scales = (gather(constrain(part, layout, spec), layout, leaf) for part in parts)
    return decode(codes, scales, along, x.dtype)


def block_dim(shape: Shape, cut: Collection[int]) -> int | None:
    """Return the dim that blocks lie along, the longest that nothing cuts; None without one."""
    free = [d for d, size in enumerate(shape) if d not in cut and size >= _SHORTEST]
    return max(free, key=shape.__getitem__, default=None)


def num_blocks(size: int) -> int:
    return 1 if size % BLOCK else size // BLOCK


def _in_blocks(x: jax.Array, along: int, count: int) -> jax.Array:
    return x.reshape(*x.shape[:along], count, x.shape[along] // count, *x.shape[along + 1 :])


def encode(x: jax.Array, along: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return codes of the shape of `x`, and fp32 scales, one for each block along a dim.

    A scale is the block's largest magnitude over the largest code. XLA may divide by multiplying
    with a reciprocal: of the largest magnitude itself, from 2**126 on, that would be 0.
    """
    blocks = _in_blocks(x.astype(jnp.float32), along, num_blocks(x.shape[along]))
    largest = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    scales = jnp.max(jnp.abs(blocks), axis=along + 1) / largest
    # Smaller ones may be taken for 0 when they divide. NaNs and infinities arrive as NaNs.
    divisors = jnp.where(scales < jnp.finfo(scales.dtype).tiny, 1, scales)
    codes = blocks / jnp.expand_dims(divisors, along + 1)
    codes = jnp.round(codes) if dtype == jnp.int8 else codes
    return codes.astype(dtype).reshape(x.shape), scales


def decode(codes: jax.Array, scales: jax.Array, along: int, dtype: Any) -> jax.Array:
    blocks = _in_blocks(codes.astype(jnp.float32), along, scales.shape[along])
    return (blocks * jnp.expand_dims(scales, along + 1)).reshape(codes.shape).astype(dtype)
