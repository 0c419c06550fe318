"""`Layout`: where every leaf lives, decided once from shapes and a mesh, as plain data."""

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from rich.table import Table
from rich.text import Text

from zerojax._arguments import as_given, is_whole_number
from zerojax._display import Shown, decimal
from zerojax._tree import leaves_by_path, path_name
from zerojax._types import AnyMesh, PyTree
from zerojax.layout import _mesh
from zerojax.layout._describe import Description, describe
from zerojax.layout._leaf import Entries, LeafLayout, Rule, as_entries, stacked_from_shapes
from zerojax.layout._optimizer import OptimizerLayout, optimizer_layout
from zerojax.layout._stages import check_stage
from zerojax.layout._tree_layout import TreeLayout
from zerojax.recipe import Recipe, as_recipe

#: Leaves with fewer elements stay whole: a shard of them would be smaller than its message.
MIN_SIZE = 1024
_REMEDY = (
    "hand over what is trained (equinox: eqx.filter(model, eqx.is_inexact_array); nnx: "
    "nnx.state(model, nnx.Param); linen: variables['params'])"
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Layout(Shown, TreeLayout):
    """The placement of parameters, gradients, optimizer states and batches over a mesh.

    Trees of shardings are `params`, `grads`, `masters` and `opt_state(tx)`; `batch` is one. It
    prints as a table of parameters and gradients; `describe(tx)` adds the optimizer's states. An
    optimizer is given bare or wrapped by `zerojax.sharded`. Methods that cut, pad, flatten or phase
    leaves, and names such as `at_once` and `auto_mesh`, serve the package itself.

    >>> layout = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=2)
    >>> print(layout.describe(optax.adam(1e-3)))
    >>> params = jax.device_put(params, layout.params)

    Attributes:
        mesh: the mesh that the user gave, with devices or (`AbstractMesh`) without.
        stage: 0 to 3, arXiv 1910.02054 section 5.
        axes: mesh axes that ZeRO partitions over by kind of tensor, major first.
        batch_axes: mesh axes that cut the batch.
        leaves: one `LeafLayout` per parameter, in flattening order.
        structure: the tree structure of the parameters.
        rules: the user's rules.
        min_size: leaves with fewer elements stay whole.
        has_options: whether a program of it is compiled with the options of a train step.
    """

    def optimizer(self, tx: Any, dtype: Any = None) -> OptimizerLayout:
        """Match every leaf of the optimizer's state to its parameter, and place it.

        Args:
            tx: the optimizer.
            dtype: dtype of the floating parameters that it is given (the masters' dtype, say);
                the parameters' own by default.

        Raises:
            ValueError: a leaf of the state fits parameters with different placements.
        """
        return optimizer_layout(tx, self, dtype)

    def opt_state(self, tx: Any) -> PyTree:
        """Return the shardings of the stored optimizer state, in the structure of `tx.init`.

        Raises:
            ValueError: a leaf of the state fits parameters with different placements.
        """
        return self.optimizer(tx).shardings(self)

    def bytes_per_device(
        self, tx: Any, recipe: Recipe | None = None, *, stored: bool = True
    ) -> dict[str, int]:
        """Return the bytes of model states that one device holds, by kind, and their `total`.

        Kinds are `parameters`, `masters`, `optimizer` and `gradients`, whole or cut by the stage.

        Args:
            tx: the optimizer.
            recipe: of the train step; masters are counted where its precision keeps them.
            stored: True for the train step, which pads parameters that no dim divides at stage 3;
                False for a loop of the user's own around `sharded`, which keeps them whole.
        """
        return self.describe(tx, recipe, stored=stored).bytes

    def describe(
        self, tx: Any, recipe: Recipe | None = None, *, stored: bool = True
    ) -> Description:
        """Describe the placement: a row and a reason per leaf, totals beside the theory.

        The arguments are those of `bytes_per_device`. The result prints as a table, in
        which leaves of a list of layers that are alike have one row.
        """
        recipe = as_recipe(recipe)
        return describe(self, self.optimizer(tx, recipe.precision.updated), recipe, stored)

    @property
    def _summary(self) -> str:
        held = decimal(sum(leaf.bytes_per_device("parameter") for leaf in self.leaves))
        leaves = f"{len(self.leaves)} {'leaves' if self.leaves[1:] else 'leaf'}"
        return f"{self.title} in {leaves}, {held} of them per device"

    def _parts(self) -> Iterator[Text | Table]:
        return self.describe(optax.identity())._parts()


def check_layout(given: Any, call: str) -> None:
    as_given(Layout, given, f"{call} with layout = zerojax.make_layout(params, mesh, stage=...)")


def make_layout(
    params: PyTree,
    mesh: AnyMesh,
    *,
    stage: int,
    axis: str | Sequence[str] | Mapping[str, str | Sequence[str]] = "data",
    batch_axes: str | Sequence[str] | None = None,
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int = MIN_SIZE,
) -> Layout:
    """Decide how parameters, gradients and optimizer states are sharded, leaf by leaf.

    >>> layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=2)

    Args:
        params: the logical parameters, arrays or `ShapeDtypeStruct`s in any pytree.
        mesh: devices, with Auto or Explicit axes; an `AbstractMesh` to place and count without.
        stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too (arXiv
            1910.02054, section 5).
        axis: mesh axis that ZeRO partitions over, or several, major first; or for hybrid sharding
            those of each kind: `{"parameter": "fsdp", "gradient": ("replica", "fsdp"), "optimizer":
            ("replica", "fsdp")}` partitions parameters along "fsdp" alone, so that the loss gathers
            them there. Each kind has the axes of those before it; masters have the optimizer's.
        batch_axes: mesh axes that cut the batch; `axis` by default, of several kinds the widest.
        specs: PartitionSpecs of the user's own for other axes, as a tree (or a prefix of one) like
            the parameters; they stay, and ZeRO partitions what they leave.
        rules: overrides per path, with a warning for those that match no leaf. Layer dims that no
            rule names are told by shapes.
        min_size: leaves with fewer elements stay whole.

    Raises:
        ValueError: an unknown stage or axis, or a spec that does not fit its leaf, or paths of two
            leaves that read alike, as keys with slashes in them can make.
    """
    _check_choices(mesh, rules, min_size)
    axes, widest = _mesh.axes_by_kind(axis, mesh)
    shapes = {path: _shape_of(path, leaf) for path, leaf in leaves_by_path(params).items()}
    if not shapes:
        raise ValueError(f"the parameters hold no arrays, got {params!r}; give a pytree of them")
    given = _broadcast(specs, params)
    entries = map(functools.partial(_user_entries, mesh), shapes, given, shapes.values())
    stacked = stacked_from_shapes({path: leaf.shape for path, leaf in shapes.items()})
    empty = Layout(
        mesh=mesh,
        stage=check_stage(stage),
        axes=axes,
        batch_axes=widest if batch_axes is None else _mesh.as_axes(batch_axes, mesh, "batch axis"),
        leaves=(),
        structure=jax.tree.structure(params),
        rules=tuple(rules),
        min_size=min_size,
    )
    leaves = tuple(map(functools.partial(_place, empty), shapes, shapes.values(), entries, stacked))
    layout = dataclasses.replace(empty, leaves=leaves)
    if layout.unmatched_rules:
        unmatched = [rule.path for rule in layout.unmatched_rules]
        warnings.warn(f"rules that matched no leaf: {unmatched}", stacklevel=2)
    if untrained := _untrained(params, shapes):
        more = f" and {len(untrained) - 3} more" if untrained[3:] else ""
        told = f"the parameters hold what no gradient trains: {', '.join(untrained[:3])}{more}"
        warnings.warn(f"{told}; {_REMEDY}, and the rest to the loss beside it", stacklevel=2)
    return layout


def _untrained(params: PyTree, shapes: Mapping[str, Any]) -> list[str]:
    """Name the leaves that have no gradient, and flax's running statistics."""

    def is_statistic(node: Any) -> bool:
        return type(node).__name__ == "BatchStat"  # nnx; linen's have a name at the top

    pairs = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_statistic)[0]
    kept = ("batch_stats/", *(f"{path_name(path)}/" for path, node in pairs if is_statistic(node)))
    is_trained = {path: jnp.issubdtype(leaf.dtype, jnp.inexact) for path, leaf in shapes.items()}
    return [path for path in shapes if not is_trained[path] or f"{path}/".startswith(kept)]


def _check_choices(mesh: Any, rules: Any, min_size: Any) -> None:
    if not isinstance(mesh, AnyMesh):
        told = f"a mesh is expected, got {type(mesh).__name__}; write make_layout(params, mesh,"
        raise TypeError(f"{told} stage=...) with mesh = zerojax.make_mesh({{'data': 8}})")
    if len(types := {x.name for x in mesh.axis_types}) > 1 or "Manual" in types:
        told = f"the axes of the mesh are {', '.join(sorted(types))}; make all of them Auto, as"
        raise ValueError(f"{told} zerojax.make_mesh does, or all Explicit")
    others = [] if isinstance(rules, Sequence) else [rules]
    others += [rule for rule in rules if not isinstance(rule, Rule)] if not others else []
    if others:
        raise TypeError(
            f"rules is a list of rules, as in rules=[zerojax.Rule(path='embed', whole=True)], got "
            f"{others[0]!r}"
        )
    if not is_whole_number(min_size, 0):
        raise ValueError(f"min_size is a number of elements, 0 or more, got {min_size!r}")


def _place(layout: Layout, path: str, leaf: Any, entries: Entries, stacked: int) -> LeafLayout:
    matching = [rule for rule in layout.rules if rule.kind == "parameter" and rule.matches(path)]
    layers = next((r for r in matching if r.stacked is not None), None)
    stacked = stacked if layers is None else layers.stacked_of(path, leaf.shape)
    rule = next((r for r in matching if r.whole or r.dim is not None), None)
    taken = sorted({name for name in itertools.chain(*entries) if name in layout.axis})
    cut = None
    if not layout.kinds:
        reason = f"whole: stage {layout.stage} partitions nothing"
    elif rule is not None and rule.whole:
        reason = "whole: as a rule says"
    elif taken:
        reason = f"as the user's spec says, which uses {', '.join(taken)} already"
    else:
        told = 0 if layers is None else stacked
        wanted = None if rule is None else rule.dim_of(path, leaf.shape, told)
        cut, reason = layout.cut(leaf.shape, entries, stacked=stacked, wanted=wanted)
    return layout.placed(path, leaf, reason, entries, cut, layout.kinds, stacked=stacked)


def _shape_of(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, bool | int | float | complex | np.ndarray):  # without x64 in 32 bits
        return jax.eval_shape(jnp.asarray, leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf
    told = f"leaf {name!r} of the parameters is a {type(leaf).__name__}, and arrays are expected"
    of_init = "write jax.eval_shape(init, key) for the shapes of what it returns"
    raise ValueError(f"{told}; {of_init if callable(leaf) and name == '.' else _REMEDY}")


def _broadcast(specs: PyTree, params: PyTree) -> list[Any]:
    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, P)

    try:
        full = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "specs do not have the structure of the parameters, or a prefix of it: "
            f"{str(error).splitlines()[0]}; write one PartitionSpec (or None) per leaf or subtree"
        ) from None
    return jax.tree.structure(params).flatten_up_to(full)  # None that parameters hold is no leaf


def _user_entries(mesh: AnyMesh, name: str, spec: Any, leaf: jax.ShapeDtypeStruct) -> Entries:
    shape = leaf.shape
    if not isinstance(spec, P | None):
        raise ValueError(
            f"specs hold a {type(spec).__name__}; PartitionSpecs (or None) are expected, such as "
            "the .spec of a NamedSharding"
        )
    try:
        entries = as_entries(spec, len(shape))
    except ValueError as error:
        raise ValueError(f"spec of leaf {name!r} {shape}: {error}") from None
    if len({*(used := [*itertools.chain(*entries)])}) < len(used):
        raise ValueError(f"spec of leaf {name!r} {shape}: {spec} names an axis twice")
    for dim, names in enumerate(entries):
        axes = _mesh.as_axes(names, mesh, f"leaf {name!r}: spec axis")
        parts = _mesh.num_devices(mesh, axes)
        if shape[dim] % parts:
            told = f"leaf {name!r} {shape}: {parts} devices along {axes} do not divide dim {dim}"
            raise ValueError(told)
    return entries
