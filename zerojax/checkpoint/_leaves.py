"""What the leaves of a state are, apart from their values: all that a manifest says of them.

A checkpoint holds logical leaves. Padding is zeros at the end of one dim: a leaf that is padded for
one number of shards is read for another by cutting the zeros off and adding others. Which leaves
are padded is told, in this order:

1. by a train state, which names its padded optimizer leaves (`TrainState.padded`);
2. by `tx`, where the caller passes the optimizer, for the part of the tree that is its state;
3. by the parameters, for a part of the tree that has their structure and shapes.

Any other leaf that is cut may be padded: an error asks for `tx`, as a wrong guess drops values.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import GetAttrKey

from zerojax import _tree
from zerojax._display import decimal
from zerojax._tree import is_key, is_named_tuple, leaves_by_path, num_bytes, path_name
from zerojax._types import Kind, PyTree, Shape
from zerojax.layout import Layout, OptimizerLayout, optimizer_leaves

#: The parts of a train state that hold parameters: the paths begin so.
COPIES = ("params", "masters")
PARAMS, MASTERS = (f"{name}/" for name in COPIES)
#: All of its parts that are placed, with their kinds.
KINDS: dict[str, Kind] = {"params": "parameter", "masters": "master", "opt_state": "optimizer"}
REMEDY = "pass the layout that the state was made under: step.layout"
#: The largest size that files and arrays have.
MOST_BYTES = 2**63 - 1
#: The optimizer, where it was handed over.
Optimizer: TypeAlias = optax.GradientTransformation | None
#: A key path and what is there.
Node = tuple[tuple[Any, ...], Any]
#: The part of a train state that a loss scale adds: the paths begin so.
LOSS_SCALE = "loss_scale/"
LOSS_SCALE_LEAVES = (f"{LOSS_SCALE}scale", f"{LOSS_SCALE}good_steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedLeaf:
    shape: Shape  # logical shape
    stored_shape: Shape  # shape with padding, as the arrays on disk have it
    dtype: str  # its name; of typed PRNG keys `key<...>`, whose integers are what is stored
    num_bytes: int  # bytes of the logical leaf

    def __post_init__(self) -> None:
        if not self.is_key:
            jnp.dtype(self.dtype)  # a TypeError where there is none of that name
        dims = (*zip(self.shape, self.stored_shape, strict=True), (self.num_bytes, MOST_BYTES))
        fits = all(0 <= size <= stored <= MOST_BYTES for size, stored in dims)
        if not fits or math.prod(self.stored_shape) > MOST_BYTES:
            raise ValueError(f"no array has the shape {self.shape}, stored {self.stored_shape}")

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key<")


def saved_leaves(tree: PyTree, layout: Layout, tx: Optimizer = None) -> dict[str, SavedLeaf]:
    """Describe every leaf of a tree of arrays or shapes, by path; see `logical_shapes`."""
    logical = logical_shapes(tree, layout, tx)
    return {
        path: SavedLeaf(
            shape=logical[path],
            stored_shape=tuple(jnp.shape(x)),
            dtype=str(dtype_of(x)),
            num_bytes=num_bytes(logical[path], dtype_of(x)),
        )
        for path, x in leaves_by_path(tree).items()
    }


def dtype_of(x: Any) -> Any:
    """Return the dtype that a leaf has in JAX: 64 bits only where they are enabled."""
    dtype = x.dtype if hasattr(x, "dtype") else jnp.result_type(x)
    return dtype if is_key(x) else jax.dtypes.canonicalize_dtype(dtype)


def placed_leaves(tree: PyTree, sharding: jax.sharding.Sharding) -> PyTree:
    """Place the leaves that are no JAX arrays yet: NumPy's, and Python's numbers."""

    def place(keys: tuple[Any, ...], x: Any) -> jax.Array:
        path = path_name(keys)
        if not all(path.split("/")):
            raise ValueError(f"the path {path!r} has a part without a name; rename that key")
        if isinstance(x, jax.Array) and not x.is_deleted():
            return x
        if isinstance(x, jax.Array):
            raise ValueError(f"leaf {path!r} is deleted (donated); save what the step returned")
        array = np.asarray(x)
        if array.dtype.kind in "OUSMm":  # objects, texts, times
            told = f"leaf {path!r} is a {type(x).__name__} and no array; save arrays alone"
            raise TypeError(f"{told} (of an equinox module: eqx.filter(module, eqx.is_array))")
        placed = jax.device_put(array, sharding)
        same = np.asarray(placed).astype(array.dtype) == array
        if isinstance(x, float) or (same | (array != array)).all():  # NaN equals nothing
            return placed
        told = f"leaf {path!r} is {array.dtype} and would lose values as {placed.dtype}"
        raise ValueError(f"{told}; cast it yourself, or enable jax_enable_x64")

    return jax.tree_util.tree_map_with_path(place, tree)


def optimizer_nodes(tree: PyTree) -> dict[str, str]:
    """Return path and type of the NamedTuples that are neither parameters nor the loss scale.

    Two optimizers may have leaves of the same names and shapes and mean other things by them.
    """
    found, others = _tree.named_tuples(tree), (PARAMS, MASTERS, LOSS_SCALE)
    return {path: name for path, name in found.items() if not f"{path}/".startswith(others)}


def logical_shapes(tree: PyTree, layout: Layout, tx: Optimizer = None) -> dict[str, Shape]:
    """Return the logical shape of every leaf of a tree of arrays or shapes, by path."""
    below = list(_tree.nodes(tree))
    of_tx = {} if tx is None else _like(below, layout.optimizer(tx))
    known = _as_train_states_say(below, layout, _like(below, layout) | of_tx)
    tuples = tuple(f"{path_name(path)}/" for path, node in below if is_named_tuple(node))
    leaves = leaves_by_path(tree)
    for name, x in leaves.items():
        is_optax = name.startswith(tuples)
        # With tx no leaf of its state is in doubt; a NamedTuple in doubt is another optimizer's.
        in_doubt = name not in known and (tx is None or (is_optax and not of_tx))
        if in_doubt and _may_be_padded(x, layout, is_optax=is_optax):
            told = f"leaf {name!r} is stored as {list(jnp.shape(x))}, with padding or without; pass"
            raise ValueError(f"{told} tx=, the optimizer, to save, restore or Checkpoints")
    return {name: known.get(name, jnp.shape(x)) for name, x in leaves.items()}


def _may_be_padded(x: Any, layout: Layout, *, is_optax: bool) -> bool:
    """Return whether a leaf is cut, or may be, along a dim that padding may have made longer.

    Outside of an optimizer's state these are the sizes that padded parameters have.
    """
    padded = (leaf.stored_size for leaf in layout.leaves if leaf.is_padded)
    sizes = {size for size in jnp.shape(x) if size and size % layout.num_shards == 0}
    if is_key(x) or layout.num_shards == 1 or not (sizes if is_optax else sizes & {*padded}):
        return False
    return _is_cut(x, layout) is not False


def check_placed(tree: PyTree, layout: Layout) -> None:
    """Refuse a train state that is partitioned where the layout's stage keeps it whole, or not."""
    for path, node in _train_states(_tree.nodes(tree)) if layout.num_shards > 1 else ():
        for name, kind in KINDS.items():
            below = leaves_by_path(_tree.unwrapped(getattr(node, name)))
            for step, x in below.items():
                placed = optimizer_leaves(step, jnp.shape(x), layout, below)
                cut = layout.partitions(kind)
                specs = [leaf.shard_spec if cut else leaf.whole_spec for leaf in placed]
                wanted = {_cuts(spec, layout) for spec in specs}
                is_placed = isinstance(getattr(x, "sharding", None), NamedSharding)
                is_placed &= all(leaf.parameter is not None for leaf in placed)
                if is_placed and (is_cut := _is_cut(x, layout)) not in wanted:
                    words = ("partitioned", "whole") if is_cut else ("whole", "partitioned")
                    leaf = f"{path_name((*path, GetAttrKey(name)))}/{step}".removesuffix("/.")
                    told = f"leaf {leaf!r} is {words[0]}; at the layout's stage {layout.stage}"
                    raise ValueError(f"{told} it is {words[1]}; {REMEDY}")


def _as_train_states_say(below: Any, layout: Layout, known: dict[str, Shape]) -> dict[str, Shape]:
    """Add to what is known the leaves of every train state, of which none is in doubt."""
    for path, node in _train_states(below):
        known = _stored(path, node) | known
        for name in COPIES:
            copy = (*path, GetAttrKey(name)), _tree.unwrapped(getattr(node, name))
            fitting = _like([copy], layout)  # parameters that are a bare array are no node below
            if copy[1] is not None and not fitting:
                _raise_misfit(*copy, layout)
            known |= fitting
        shapes = _stored((*path, GetAttrKey("opt_state")), node.opt_state)
        names = list(shapes)
        known |= shapes | {names[number]: shape for number, shape in node.padded}
    return known


def _train_states(below: Iterable[Node]) -> list[Node]:
    return [x for x in below if hasattr(x[1], "opt_state") and hasattr(x[1], "padded")]


def _raise_misfit(path: tuple[Any, ...], copy: PyTree, layout: Layout) -> NoReturn:
    """Name the first leaf of a train state's parameters or masters that the layout does not know.

    With another layout, padding would be taken for values.
    """
    root, found = path_name(path), _stored(path, copy)
    known = {f"{root}/{leaf.path}".removesuffix("/."): leaf for leaf in layout.leaves}
    for name in {**found, **known}:
        leaf, shape = known.get(name), found.get(name)
        if leaf is None or shape not in (leaf.shape, leaf.stored_shape):
            wanted = leaf and f"{leaf.shape}, stored {leaf.stored_shape}"
            raise ValueError(f"leaf {name!r}: state {shape}, layout {wanted}; {REMEDY}")
    raise ValueError(f"{root!r} is another tree than the layout's; {REMEDY}")


def _like(below: Sequence[Node], placed: Layout | OptimizerLayout) -> dict[str, Shape]:
    """Return the logical shapes below every node that has the leaves and shapes of a layout.

    They are matched by path, as in `_tree.leaves_like`: nnx holds an optimizer's state in others.
    """
    wanted, known = _stored((), placed.structure.unflatten(placed.leaves)), {}
    leaves = dict(zip(map(_tree.unboxed, wanted), placed.leaves, strict=True))
    for path, node in below:
        if jax.tree.structure(node).num_leaves == len(leaves):
            own = [leaves.get(_tree.unboxed(name)) for name in _stored((), node)]
            found = dict(zip(_stored(path, node).items(), own, strict=True))
            if all(x and shape in (x.stored_shape, x.shape) for (_, shape), x in found.items()):
                known |= {name: x.shape for (name, _), x in found.items() if x}
    return known


def _stored(path: tuple[Any, ...], node: PyTree) -> dict[str, Shape]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(node)
    return {path_name((*path, *step)): tuple(jnp.shape(x)) for step, x in pairs}


def places(like: PyTree, layout: Layout) -> dict[str, jax.sharding.Sharding]:
    """Return where leaves go: to their own places, else to those of parameters or their states.

    What is no parameter's by its path goes to all devices; what is large of that is told.
    """
    leaves, unknown = leaves_by_path(like), {}
    found: dict[str, jax.sharding.Sharding] = {}
    states = tuple(f"{path}/" for path in _tree.named_tuples(like))
    for path, x in leaves.items():
        # jit moves what is not committed, such as a fresh `jnp.zeros`; what was read is committed.
        place = getattr(x, "sharding", None) if getattr(x, "committed", True) else None
        found[path] = place or layout.sharding(P())
        if place is not None or is_key(x):
            continue
        of_state: Kind = "optimizer" if path.startswith(states) else "parameter"
        kind, shape = KINDS.get(path.split("/")[0], of_state), jnp.shape(x)
        fitting = optimizer_leaves(path, shape, layout, leaves)
        owner = fitting[0].parameter
        fitting = (layout.leaves[owner],) if kind == "parameter" and owner is not None else fitting
        spec, *others = {x.spec(kind) if x.stored_shape == shape else None for x in fitting}
        if spec is None or others or owner is None:
            is_large = layout.partitions(kind) and math.prod(shape) >= layout.min_size
            unknown |= {path: x} if is_large and isinstance(x, jax.ShapeDtypeStruct) else {}
        else:
            found[path] = layout.sharding(spec, len(shape))
    if unknown:
        size = decimal(sum(num_bytes(x.shape, x.dtype) for x in unknown.values()))
        told = f"leaf {next(iter(unknown))!r} of like ({len(unknown)} such, {size}) has no sharding"
        warnings.warn(f"{told}, nor a place in the layout: whole on every device", stacklevel=2)
    return found


def _is_cut(x: Any, layout: Layout) -> bool | None:
    """Return whether an array is partitioned over ZeRO's axes; None if its placement is unknown."""
    sharding = getattr(x, "sharding", None)
    return None if sharding is None else _cuts(getattr(sharding, "spec", ()), layout)


def _cuts(spec: Iterable[Any], layout: Layout) -> bool:
    return not {*layout.axis}.isdisjoint(jax.tree.leaves((*spec,)))
