"""Optimizer states: which parameter a leaf of the state belongs to, and where it lives."""

import dataclasses
import itertools
import math
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import as_shapes, is_key, leaves_like, named_tuples, path_name
from zerojax._types import PyTree, Shape, TreeDef
from zerojax.layout._leaf import Cut, LeafLayout, Rule
from zerojax.layout._stages import STATES
from zerojax.layout._tree_layout import TreeLayout

#: The attribute of a wrapper's `init` that holds the optimizer inside.
WRAPPED = "zerojax_wrapped"
#: For each dim of a state leaf, the dim of its parameter that it comes from, or None.
Way = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class OptimizerLayout:
    """The placement of every leaf of an optimizer's state."""

    structure: TreeDef  # the tree structure of `tx.init(params)`
    leaves: tuple[LeafLayout, ...]  # one `LeafLayout` per leaf of the state, in flattening order
    # rules for the optimizer that matched no leaf of the state
    unmatched_rules: tuple[Rule, ...] = ()

    @property
    def specs(self) -> PyTree:
        return self.structure.unflatten(leaf.spec("optimizer") for leaf in self.leaves)

    def shardings(self, layout: TreeLayout) -> PyTree:
        placed = (layout.sharding(x.spec("optimizer"), len(x.shape)) for x in self.leaves)
        return self.structure.unflatten(placed)

    @property
    def padded(self) -> tuple[tuple[int, Shape], ...]:
        leaves = enumerate(self.leaves)
        return tuple((number, leaf.shape) for number, leaf in leaves if leaf.is_padded)

    def flatten(self, state: PyTree) -> list[Any]:
        """Return a state's leaves in the order of `leaves`; refuse those of another optimizer."""
        remedy = "make it with the init of this optimizer, for parameters of this layout"
        wanted = [*named_tuples(self.structure.unflatten(self.leaves)).values()]
        if (found := [*named_tuples(state).values()]) != wanted:
            raise ValueError(
                f"the optimizer's state is made of {', '.join(found) or type(state).__name__} "
                f"where {', '.join(wanted) or 'none of these'} is expected; {remedy}"
            )
        try:
            leaves = leaves_like(state, self.structure)
        except ValueError as error:
            raise ValueError(f"the optimizer's state is another one: {error}; {remedy}") from None
        for x, leaf in zip(leaves, self.leaves, strict=True):
            if jnp.shape(x) not in (leaf.shape, leaf.stored_shape):
                told = f"leaf {leaf.path!r} of the optimizer's state has shape {jnp.shape(x)} where"
                raise ValueError(f"{told} {leaf.stored_shape} is expected; {remedy}")
        return leaves


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return the bare optax optimizer: what `zerojax.sharded` wrapped, or what was handed over."""
    if hasattr(tx, "gradient_transformation"):  # optax.MultiSteps
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"an optax GradientTransformation (init and update) is expected, got "
            f"{type(tx).__name__}; hand over the optimizer itself, as in optax.adamw(1e-3)"
        )
    return getattr(tx.init, WRAPPED, None) or optax.with_extra_args_support(tx)


def optimizer_layout(tx: Any, layout: TreeLayout, dtype: Any = None) -> OptimizerLayout:
    """Match the state of an optimizer to the parameters of a layout; see `Layout.optimizer`.

    Which parameter a leaf belongs to is told by structure (`find_owners`), and which dims are left
    of it (`find_ways`): there it lives. Others go by their shape.
    """
    tx = as_transformation(tx)
    shapes = as_shapes(layout.shapes, dtype)
    state = jax.eval_shape(tx.init, shapes)
    pairs, structure = jax.tree_util.tree_flatten_with_path(state)
    owners = find_owners(tx, shapes, state)
    ways = find_ways(tx, shapes, state, owners)
    rules = [rule for rule in layout.rules if rule.kind == "optimizer"]
    used: set[Rule] = set()
    leaves = []
    for (path, leaf), owner, of in zip(pairs, owners, ways, strict=True):
        name = path_name(path)
        rule = next((rule for rule in rules if rule.matches(name)), None)
        if rule is None:
            leaves.append(_place(name, leaf, owner, of, layout))
        else:
            used.add(rule)
            leaves.append(_by_own_shape(name, leaf, layout, owner, rule, "as a rule says"))
    unmatched = tuple(rule for rule in rules if rule not in used)
    if unmatched:
        told = f"rules that matched no leaf of the optimizer's state: {[x.path for x in unmatched]}"
        warnings.warn(told, stacklevel=2)
    return OptimizerLayout(structure, tuple(leaves), unmatched)


def optimizer_leaves(
    path: str, shape: Shape, layout: TreeLayout, beside: Collection[str] = ()
) -> tuple[LeafLayout, ...]:
    """Return how a leaf of an optimizer's state may be placed, told by its path and shape.

    For states whose optimizer is not at hand; `Layout.optimizer` is certain. The parameter is the
    one whose path ends the leaf's. Of `up` [1009, 641], stored as [1016, 641] on eight devices:

        0/mu/up [1016, 641]      [1009, 641], where the parameter lives
        0/mu/up [3, 1016, 641]   a history [3, 1009, 641]
        0/v_row/up [1016]        a factor [1009]
        0/v_col/up [641]         a factor [641], whole or cut by its own shape

    `shape` is logical or stored; `beside` are the paths of the whole state, for parameters named
    as its fields are. Returns one for each reading, with the parameter's dtype. A leaf of no
    parameter has one, by its own shape; its `parameter` is None.
    """
    for owner in layout.owners(path, beside) if math.prod(shape) > 1 else ():
        source = layout.leaves[owner]
        found = []
        for way in possible_ways(len(shape), len(source.shape)):
            pairs = zip(shape, way, strict=True)
            logical = tuple(size if d is None else source.shape[d] for size, d in pairs)
            leaf = jax.ShapeDtypeStruct(logical, source.dtype)
            found.append(_inherit(path, leaf, owner, way, layout))
        fitting = tuple(leaf for leaf in found if shape in (leaf.shape, leaf.stored_shape))
        if fitting:
            return fitting
    return (_by_own_shape(path, jax.ShapeDtypeStruct(shape, jnp.float32), layout),)


def _place(path: str, leaf: Any, owner: Any, ways: list[Way], layout: TreeLayout) -> LeafLayout:
    if math.prod(leaf.shape) <= 1:
        reason = "whole" if leaf.shape else "whole: a scalar"
        return layout.placed(path, leaf, reason, parameter=owner)
    if owner is not None:
        source = layout.leaves[owner]
        options = [_inherit(path, leaf, owner, way, layout) for way in ways]
        if not options:
            why = f"made from {source.path!r} with dims of its own"
            return _by_own_shape(path, leaf, layout, owner, why=why)
        if len({(x.entries, x.dim, x.stored_size) for x in options}) == 1:
            return options[0]
        found = " or ".join(sorted(str(x.shard_spec) for x in options))
        why = f"it comes from parameter {source.path!r} {source.shape} and could live at {found}"
    else:
        same = {(other.entries, other.dim) for other in layout.leaves if other.shape == leaf.shape}
        if len(same) <= 1 or not layout.partitions("optimizer"):
            return _by_own_shape(path, leaf, layout)
        why = f"parameters of this shape live in {len(same)} different ways and its path names none"
    raise ValueError(
        f"leaf {path!r} {leaf.shape} of the optimizer state is ambiguous: {why}; say which with a "
        f"rule: Rule(path={path!r}, kind='optimizer', dim=...), or whole=True in the place of dim"
    )


def _inherit(path: str, leaf: Any, owner: int, way: Way, layout: TreeLayout) -> LeafLayout:
    """Place a leaf where its parameter's dims live.

    Example: of a parameter `[512, 64]` cut along dim 0, a history `[10, 512, 64]` comes by the way
    `(None, 0, 1)` and is cut along dim 1; a factored `[512]` by `(0,)` along dim 0; a factored
    `[64]` by `(1,)` has lost the dim that was cut, and its own shape decides.
    """
    source = layout.leaves[owner]
    entries = tuple(() if dim is None else source.entries[dim] for dim in way)
    kept = ", ".join(f"dim {d}" for d in way if d is not None)
    is_same = way == tuple(range(len(source.shape)))
    relation = "lives with its parameter" if is_same else f"keeps {kept} of its parameter"
    cut, reason = None, f"{relation}: {source.reason}"
    if source.dim is not None and source.dim in way:
        cut = Cut(way.index(source.dim), source.stored_size)
    elif source.dim is not None:
        cut, why = layout.cut(leaf.shape, entries)
        reason = f"{relation}; {why}"
    return layout.placed(path, leaf, reason, entries, cut, STATES, parameter=owner)


def _by_own_shape(
    path: str,
    leaf: Any,
    layout: TreeLayout,
    owner: int | None = None,
    rule: Rule | None = None,
    why: str = "belongs to no parameter",
) -> LeafLayout:
    is_whole = is_key(leaf) or (rule is not None and rule.whole)
    if is_whole or not layout.partitions("optimizer") or math.prod(leaf.shape) <= 1:
        return layout.placed(path, leaf, f"whole: {why}", parameter=owner)
    stacked = rule.stacked_of(path, leaf.shape) if rule else 0
    wanted = rule and rule.dim_of(path, leaf.shape, stacked)
    free = ((),) * len(leaf.shape)
    cut, reason = layout.cut(leaf.shape, free, stacked=stacked, wanted=wanted)
    return layout.placed(path, leaf, f"{why}; {reason}", free, cut, STATES, parameter=owner)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Numbered:
    """A parameter that carries its number through whatever an optimizer's init builds of it."""

    value: Any
    number: int = dataclasses.field(metadata={"static": True})


def find_owners(tx: optax.GradientTransformation, shapes: Any, state: Any) -> list[int | None]:
    """Return which parameter each leaf of the state was made from; None for none."""
    leaves, tree = jax.tree.flatten(shapes)
    numbered = tree.unflatten(_Numbered(x, i) for i, x in enumerate(leaves))

    def is_numbered(node: Any) -> bool:
        return isinstance(node, _Numbered)

    # An optimizer whose masks or labels look at leaves can fail on nodes, and fail in any way;
    # then optax's placeholders are asked.
    try:
        marked = jax.eval_shape(tx.init, numbered)
    except Exception:  # noqa: BLE001
        marked = ()
    held, wanted = ([(x.shape, x.dtype) for x in jax.tree.leaves(of)] for of in (marked, state))
    if held == wanted:
        owners: list[int | None] = []
        for node in jax.tree.leaves(marked, is_leaf=is_numbered):
            owners += [node.number if is_numbered(node) else None] * len(jax.tree.leaves(node))
        return owners

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    try:
        marked = optax.tree_map_params(
            tx,
            lambda leaf, number: leaf if is_masked(leaf) else number,
            state,
            tree.unflatten(range(tree.num_leaves)),
            transform_non_params=lambda _: -1,
            is_leaf=is_masked,
        )
    # optax runs the optimizer's own init on placeholders, so anything can be raised here; leaves
    # without an owner are placed by their own shape or refused as ambiguous.
    except Exception:  # noqa: BLE001
        marked = ()
    found = jax.tree.leaves(marked)
    if len(found) != len(wanted):
        return [None] * len(wanted)
    return [owner if isinstance(owner, int) and owner >= 0 else None for owner in found]


def find_ways(
    tx: optax.GradientTransformation, shapes: Any, state: Any, owners: list[int | None]
) -> list[list[Way]]:
    """Return for each leaf of the state how its dims come from its parameter's; see `dim_sources`.

    Where sizes repeat, shapes alone can't tell: `[16]` of `[16, 16]`. Then `tx.init` is traced with
    the repeated sizes made distinct, in their order, for optimizers that sort dims by size.
    """
    of = [x.shape for x in jax.tree.leaves(shapes)]
    found = [
        [] if owner is None else dim_sources(leaf.shape, of[owner])
        for leaf, owner in zip(jax.tree.leaves(state), owners, strict=True)
    ]
    if all(len(ways) < 2 for ways in found):
        return found
    like = jax.ShapeDtypeStruct
    distinct = jax.tree.map(lambda x: like(_distinct_sizes(x.shape), x.dtype), shapes)
    leaves, structure = jax.tree.flatten(jax.eval_shape(tx.init, distinct))
    if structure != jax.tree.structure(state):
        return found
    for number, (leaf, owner) in enumerate(zip(leaves, owners, strict=True)):
        if owner is not None and len(found[number]) > 1:
            ways = dim_sources(leaf.shape, _distinct_sizes(of[owner]))
            found[number] = ways if len(ways) == 1 else found[number]
    return found


def _distinct_sizes(shape: Shape) -> Shape:
    """Make the sizes of a shape distinct by raising some; sorted by size, dims keep their order."""
    sizes, last = list(shape), 0
    for dim in sorted(range(len(shape)), key=lambda d: (shape[d], d)):
        sizes[dim] = last = max(shape[dim], last + 1)
    return tuple(sizes)


def dim_sources(shape: Shape, of: Shape) -> list[Way]:
    """Return from which dims of a parameter the dims of a state leaf may come.

    Of a parameter [512, 64, 64], a history [10, 512, 64, 64] comes by (None, 0, 1, 2), and a factor
    [512, 64] by (0, 1) or (0, 2). Nothing where it can't come from the parameter.
    """
    return [
        way
        for way in possible_ways(len(shape), len(of))
        if all(d is None or of[d] == size for size, d in zip(shape, way, strict=True))
    ]


def possible_ways(ndim: int, of: int) -> Iterable[Way]:
    """Return all ways to make `ndim` dims from those of a parameter: dims in front, or fewer."""
    if ndim >= of:
        return [(None,) * (ndim - of) + tuple(range(of))]
    return itertools.combinations(range(of), ndim)
