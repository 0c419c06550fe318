"""In which order of its dims a TPU holds an array in memory: which two are cut into tiles."""

import itertools
import math

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding

from zerojax._types import Shape
from zerojax.layout import Layout, LeafLayout, Phases, fills_tiles, scattered_size

#: Rows and columns of a tile, along the minor two dims.
_TILE = (8, 128)
#: Elements whose copies matter. A barrier for less, on gpt2-xl's positions, cost 153 MiB on v5p.
_LARGE = 2**18


def row_major(x: jax.Array, layout: Layout) -> jax.Array:
    """Ask for an array held in memory as parameters lie, in order.

    Else a GPU turns whole stacks around, from before the backward pass on, and back: a fifth more
    memory for experts [8, 1024, 704] that are cut along 1024. On a CPU it would cost a copy.
    """
    return x if layout.platform == "cpu" else _held(x, [*range(x.ndim)])


def in_tiles(x: jax.Array, layout: Layout, dim: int) -> jax.Array:
    """Ask a TPU to hold a gradient so in memory that each shard is made of whole tiles.

    libtpu makes a reduce-scatter of whole tiles only, and chooses which dims those are along. With
    8 devices it would reduce these whole:

        [heads, model, head size] = [8, 256, 32], cut along 256    held model last: 32 columns
        [heads, head size, model] = [8, 32, 256], cut along 32     held in order: 4 rows
        [rows padded to 256, 251], cut along 256                   held by columns: 32 columns

    The first and the last are held in order, the second with the dim that is cut as the major one.
    """
    is_held = layout.platform == "tpu" and x.ndim > 1
    return _held(x, _reduced(x.shape, dim, layout)) if is_held else x


def scattered_shape(shape: Shape, dim: int, layout: Layout) -> Shape:
    """Return the shape that a gradient is padded to so that a TPU scatters it along `dim`.

    On chips that form 3-D tori the dim that lies minor is padded (`layout.scattered_size`).
    """
    chip = layout.hardware
    if len(shape) < 2 or chip is None or chip.span < 2 or scatters_at_once(shape, dim, layout):
        return shape
    minor = _reduced(shape, dim, layout)[-1]
    return (*shape[:minor], scattered_size(shape[minor]), *shape[minor + 1 :])


def scatters_at_once(shape: Shape, dim: int, layout: Layout) -> bool:
    """Return whether SparseCores scatter a gradient over a whole torus, as they do whole tiles."""
    order = _reduced(shape, dim, layout)
    tile = _TILE[order.index(dim) - len(order)] if dim in order[-2:] else 1
    is_whole = layout.by_sparse_cores and shape[dim] % (tile * layout.num_shards) == 0
    return layout.has_options and is_whole and has_pieces(shape, dim, layout, layout.at_once)


def has_pieces(shape: Shape, dim: int, layout: Layout, phases: Phases) -> bool:
    minor = _reduced(shape, dim, layout)[-1]
    return minor == dim or phases.scatters(shape[minor])


def as_state(x: jax.Array, leaf: LeafLayout, layout: Layout) -> jax.Array:
    """Ask a TPU to hold shards of a logical gradient in memory as the states of its leaf are held.

    libtpu holds what a program is given with the least padding: [7693, 448] by columns, 1% of it
    instead of 15. Else it copies masters and moments into the order of the gradient, and back.
    """
    if layout.platform != "tpu" or x.ndim < 2 or leaf.is_padded:
        return x
    spec, mesh = leaf.shard_spec, layout.auto_mesh
    shape = NamedSharding(mesh, spec).shard_shape(x.shape)
    made, wanted = _reduced(leaf.stored_shape, leaf.dim, layout), _padded_least(shape)
    if wanted == made or math.prod(shape) < _LARGE:
        return x

    def held(x: jax.Array) -> jax.Array:
        return _held(_held(x, made), wanted)  # or it would be reduced in this order

    # The partitioner would gather what stands before a constraint.
    return jax.shard_map(held, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _held(x: jax.Array, order: list[int]) -> jax.Array:
    if jnp.iscomplexobj(x):  # libtpu splits these in two, and refuses to be told how they lie
        return x
    return with_layout_constraint(x, MemoryLayout(major_to_minor=tuple(order)))


def _reduced(shape: Shape, dim: int | None, layout: Layout) -> list[int]:
    """Return the order in which a gradient is reduced, from the major dim to the minor one."""
    order = [*range(len(shape))]
    if dim is not None and not fills_tiles(shape, dim, layout.num_shards):
        order.insert(0, order.pop(dim))
    return order


def _padded_least(shape: Shape) -> list[int]:
    """Return the order in which libtpu holds an array that it is given."""

    def padded(minor: tuple[int, ...]) -> float:
        sizes = ((shape[dim], n) for dim, n in zip(minor, _TILE, strict=True))
        return math.prod(-(-size // n) * n / size for size, n in sizes)

    dims = range(len(shape))
    minor = min(((a, b) for b, a in itertools.permutations(reversed(dims), 2)), key=padded)
    return [*(dim for dim in dims if dim not in minor), *minor]
