"""`Layout`: where every leaf lives, decided once from shapes and a mesh, as plain data."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._tree import num_elements, path_name
from zerojax._types import AnyMesh, Axes, Kind, LossFn, PyTree, Shape, TreeDef
from zerojax.layout import _mesh
from zerojax.layout._describe import Description, describe
from zerojax.layout._leaf import NO_DIM, Entries, LeafLayout, as_entries, choose_dim
from zerojax.layout._optimizer import OptimizerLayout, optimizer_layout
from zerojax.layout._rule import Rule
from zerojax.layout._stacked import stacked_from_shapes, stacked_rules
from zerojax.layout._stages import STAGES, check_stage
from zerojax.layout._torus import Phases, find_phases
from zerojax.recipe import Precision

#: Leaves with fewer elements stay whole: a shard of them would be smaller than its message.
MIN_SIZE = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The placement of parameters, gradients, optimizer states and batches over a mesh.

    Attributes:
        mesh: the mesh that the user gave, with devices or (`AbstractMesh`) without.
        stage: 0 to 3, arXiv 1910.02054 section 5.
        axis: mesh axes that ZeRO partitions over, major first.
        batch_axes: mesh axes that cut the batch.
        leaves: one `LeafLayout` per parameter, in flattening order.
        structure: the tree structure of the parameters.
        rules: the user's rules.
        unmatched_rules: rules that matched no parameter.
        min_size: leaves with fewer elements stay whole.
    """

    mesh: AnyMesh
    stage: int
    axis: Axes
    batch_axes: Axes
    leaves: tuple[LeafLayout, ...]
    structure: TreeDef
    rules: tuple[Rule, ...]
    unmatched_rules: tuple[Rule, ...]
    min_size: int

    @property
    def num_shards(self) -> int:
        """N: the parts that the axis cuts a leaf into."""
        return _mesh.num_devices(self.mesh, self.axis)

    @property
    def num_batch_parts(self) -> int:
        """Count the parts that the batch axes cut a batch into."""
        return self.num_parts(self.batch_axes)

    def num_parts(self, axes: Axes) -> int:
        """Count the parts that some axes of the mesh cut a dim into."""
        return _mesh.num_devices(self.mesh, axes)

    def local_shape(self, leaf: LeafLayout, shape: Shape) -> Shape:
        """Give the part of a leaf that the user's own axes leave to a device."""
        parts = map(self.num_parts, leaf.entries)
        return tuple(math.ceil(size / part) for size, part in zip(shape, parts, strict=True))

    @property
    def num_params(self) -> int:
        """Psi: the number of logical parameters."""
        return sum(num_elements(leaf.shape) for leaf in self.leaves)

    @cached_property
    def auto_mesh(self) -> AnyMesh:
        """The mesh with Auto axes, in which constraints are written."""
        return _mesh.auto_mesh(self.mesh)

    @cached_property
    def phases(self) -> Phases:
        """The phases in which leaves are gathered and gradients reduced."""
        return find_phases(self.mesh, self.axis)

    @property
    def devices(self) -> np.ndarray:
        """The devices of the mesh, in its shape; a ValueError where the mesh has none."""
        return _mesh.devices_of(self.mesh)

    @property
    def platform(self) -> str:
        """Name the backend of the devices: "cpu", "gpu" or "tpu"; a ValueError without any."""
        platform = str(self.devices.flat[0].platform)
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)

    def partitions(self, kind: Kind) -> bool:
        """Tell whether the stage partitions a kind of tensor."""
        return kind in STAGES[self.stage]

    @property
    def shapes(self) -> PyTree:
        """The logical parameters as shapes."""
        return self.map_leaves(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))

    @property
    def params(self) -> PyTree:
        """Shardings of the logical parameters; a leaf that no dim divides stays whole here."""
        return self._shardings("parameter")

    @property
    def grads(self) -> PyTree:
        """Shardings of the logical gradients; a leaf that no dim divides stays whole here."""
        return self._shardings("gradient")

    @property
    def batch(self) -> NamedSharding:
        """Sharding of every leaf of a batch: its leading dim over the batch axes."""
        return self.sharding(P(self.batch_axes) if self.batch_axes else P())

    def sharding(self, spec: P) -> NamedSharding:
        """Bind a spec to the layout's mesh."""
        return NamedSharding(self.mesh, spec)

    def map_leaves(self, function: Callable[..., Any], *rest: PyTree) -> PyTree:
        """Map `function(leaf_layout, *values)` over the parameters' structure."""
        columns = [self.structure.flatten_up_to(tree) for tree in rest]
        return self.structure.unflatten(map(function, self.leaves, *columns))

    def optimizer(self, tx: optax.GradientTransformation, dtype: Any = None) -> OptimizerLayout:
        """Match every leaf of the optimizer's state to its parameter, and place it.

        Args:
            tx: the optimizer, not wrapped.
            dtype: dtype of the floating parameters that it is given (the masters' dtype, say);
                the parameters' own by default.
        """
        placed = optimizer_layout(tx, self, dtype)
        stored = tuple(leaf.stored_shape for leaf in placed.leaves)
        self._optimizers.setdefault((placed.structure, stored), placed)
        return placed

    @cached_property
    def _optimizers(self) -> dict[Any, OptimizerLayout]:
        return {}

    @property
    def optimizers(self) -> tuple[OptimizerLayout, ...]:
        """The placements of all optimizers that were asked for, by which states are recognised."""
        return tuple(self._optimizers.values())

    def opt_state(self, tx: optax.GradientTransformation, *, dtype: Any = None) -> PyTree:
        """Give the shardings of the stored optimizer state, in the structure of `tx.init`.

        Args:
            tx: the optimizer, not wrapped.
            dtype: dtype of the floating parameters that it is given.

        Raises:
            ValueError: a leaf of the state fits parameters with different placements.
        """
        state = self.optimizer(tx, dtype)
        return state.structure.unflatten(self.sharding(leaf.shard_spec) for leaf in state.leaves)

    def bytes_per_device(
        self,
        tx: optax.GradientTransformation,
        precision: Precision | None = None,
        *,
        stored: bool = True,
    ) -> dict[str, int]:
        """Count the bytes of the model states that one device holds, by kind.

        Args:
            tx: the optimizer, not wrapped.
            precision: dtypes of the train step; masters are counted where it keeps them.
            stored: True for the train step, which pads parameters that no dim divides at stage 3;
                False for a loop of the user's own around `sharded`, which keeps them whole.

        Returns:
            Bytes of `parameters`, `gradients` (while they are whole or partitioned as the stage
            says), `masters`, `optimizer` and their `total`.
        """
        return self.describe(tx, precision, stored=stored).bytes

    def describe(
        self,
        tx: optax.GradientTransformation,
        precision: Precision | None = None,
        *,
        stored: bool = True,
    ) -> Description:
        """Describe the placement: a row and a reason per leaf, totals beside the theory.

        The arguments are those of `bytes_per_device`. The result prints as a table.
        """
        return describe(self, tx, precision or Precision(), stored)

    def _shardings(self, kind: Kind) -> PyTree:
        partitioned = self.partitions(kind)
        return self.map_leaves(
            lambda leaf: self.sharding(
                leaf.shard_spec if partitioned and not leaf.is_padded else leaf.spec
            )
        )


def make_layout(
    params: PyTree,
    mesh: AnyMesh,
    *,
    stage: int,
    axis: str | Sequence[str] = "data",
    batch_axes: str | Sequence[str] | None = None,
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int = MIN_SIZE,
    strict: bool = False,
    loss_fn: LossFn | None = None,
    batch: PyTree = None,
) -> Layout:
    """Decide where every leaf lives.

    Args:
        params: the parameters as arrays or `ShapeDtypeStruct`s, in any pytree.
        mesh: devices, with Auto or Explicit axes; an `AbstractMesh` to place and count without.
        stage: 0 to 3, arXiv 1910.02054 section 5.
        axis: mesh axis that ZeRO partitions over, or several, major first.
        batch_axes: mesh axes that cut the batch; `axis` by default.
        specs: PartitionSpecs of the user's own for other axes, as a tree (or a prefix of one) like
            the parameters; they stay, and ZeRO partitions what they leave.
        rules: overrides per path; the first that matches a leaf decides.
        min_size: leaves with fewer elements stay whole.
        strict: refuse every leaf of `min_size` or more that would stay whole without a rule that
            says so, and every rule that matches nothing.
        loss_fn: `loss_fn(params, batch)`, traced to see which leaves a scan over layers slices.
            Without it, stacked leaves are told by rules and by shapes.
        batch: arrays or shapes, for `loss_fn`.

    Raises:
        ValueError: an unknown stage or axis, a spec that does not fit its leaf, or, under
            `strict`, leaves that stay whole; all of them are named.
    """
    stage = check_stage(stage)
    axes = _mesh.as_axes(axis, mesh, "axis")
    cut_batch = axes if batch_axes is None else _mesh.as_axes(batch_axes, mesh, "batch axis")
    pairs, structure = jax.tree_util.tree_flatten_with_path(params)
    names = [path_name(path) for path, _ in pairs]
    shapes = [_shape_of(name, leaf) for name, (_, leaf) in zip(names, pairs, strict=True)]
    entries = [
        _user_entries(name, spec, shape.shape, mesh)
        for name, spec, shape in zip(
            names, _broadcast(specs, params, structure), shapes, strict=True
        )
    ]
    if loss_fn is None:
        stacked = stacked_from_shapes([path for path, _ in pairs], [s.shape for s in shapes])
    else:
        scanned = {rule.path: rule.stacked or 0 for rule in stacked_rules(loss_fn, params, batch)}
        stacked = [scanned.get(f"^{re.escape(name)}$", 0) for name in names]
    compiled = [(rule, re.compile(rule.path)) for rule in rules if rule.kind == "parameter"]
    used: set[Rule] = set()
    placed: dict[Any, tuple[Any, ...]] = {}  # thousands of leaves have a few dozen shapes
    leaves = []
    for name, shape, own, layers in zip(names, shapes, entries, stacked, strict=True):
        rule = next((rule for rule, pattern in compiled if pattern.search(name)), None)
        if rule is not None:
            used.add(rule)
        key = (shape.shape, own, layers, rule)
        if key not in placed:
            placed[key] = place(name, shape.shape, own, layers, rule, mesh, axes, stage, min_size)
        leaves.append(LeafLayout(name, shape.shape, shape.dtype, own, *placed[key]))
    unmatched = tuple(rule for rule, _ in compiled if rule not in used)
    decided = (tuple(leaves), structure, tuple(rules), unmatched, min_size)
    layout = Layout(mesh, stage, axes, cut_batch, *decided)
    _report(layout, strict)
    return layout


def place(
    path: str,
    shape: Shape,
    entries: Entries,
    stacked: int,
    rule: Rule | None,
    mesh: AnyMesh,
    axes: Axes,
    stage: int,
    min_size: int,
) -> tuple[Any, ...]:
    """Place a leaf: the fields of its `LeafLayout` from `axes` on; the path is for messages."""
    if rule is not None and rule.stacked is not None:
        stacked = rule.stacked
    parts = tuple(_mesh.num_devices(mesh, names) for names in entries)
    own_parts = _mesh.num_devices(mesh, [name for names in entries for name in names])
    taken = {name for names in entries for name in names} & set(axes)
    why = None
    if stage == 0:
        why = "whole: stage 0 partitions nothing"
    elif rule is not None and rule.whole:
        why = "whole: as a rule says"
    elif taken:
        why = f"as the user's spec says, which uses {', '.join(sorted(taken))} already"
    if why is not None:
        return (), None, shape, 1, own_parts, stacked, why
    wanted = rule.dim if rule is not None else None
    if wanted is not None:
        if not -len(shape) <= wanted < len(shape):
            raise ValueError(f"{rule} asks for a dim that leaf {path!r} {shape} does not have")
        wanted %= len(shape)
    num_shards = _mesh.num_devices(mesh, axes)
    choice = choose_dim(shape, parts, num_shards, stacked, min_size, wanted)
    if choice.dim is None:
        return (), None, shape, 1, own_parts, stacked, choice.reason
    cut = own_parts * num_shards
    return (
        axes, choice.dim, choice.stored_shape, num_shards, cut, stacked, choice.reason,
        parts[choice.dim],
    )  # fmt: skip


def _shape_of(name: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Give a leaf's shape and dtype, or raise a ValueError with its path."""
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf
    if isinstance(leaf, (bool, int, float, complex)):
        return jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    raise ValueError(
        f"leaf {name!r} of the parameters is a {type(leaf).__name__}, and arrays are expected; "
        "hand over only the arrays (equinox: eqx.filter(model, eqx.is_array); nnx: nnx.state)"
    )


def _broadcast(specs: PyTree, params: PyTree, structure: Any) -> list[P | None]:
    """Give every leaf its spec; `specs` may be a prefix of the parameters' tree."""
    if specs is None:
        return [None] * structure.num_leaves

    def is_spec(node: Any) -> bool:
        return node is None or isinstance(node, P)

    try:
        full = jax.tree.map(
            lambda spec, below: [spec] * jax.tree.structure(below).num_leaves,
            specs,
            params,
            is_leaf=is_spec,
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"specs do not have the structure of the parameters: {error}") from None
    flat = jax.tree.leaves(full, is_leaf=is_spec)
    for spec in flat:
        if not is_spec(spec):
            raise ValueError(f"specs hold a {type(spec).__name__}; PartitionSpecs are expected")
    return flat


def _user_entries(name: str, spec: P | None, shape: Shape, mesh: AnyMesh) -> Entries:
    """Check the user's spec of one leaf."""
    if spec is None:
        return ((),) * len(shape)
    try:
        entries = as_entries(spec, len(shape))
    except ValueError as error:
        raise ValueError(f"spec of leaf {name!r} {shape}: {error}") from None
    for dim, names in enumerate(entries):
        axes = _mesh.as_axes(names, mesh, f"leaf {name!r}: spec axis")
        parts = _mesh.num_devices(mesh, axes)
        if shape[dim] % parts:
            raise ValueError(
                f"leaf {name!r} {shape}: {parts} devices along {axes} do not divide dim {dim}"
            )
    return entries


def _report(layout: Layout, strict: bool) -> None:
    """Say which rules matched nothing; under `strict`, refuse them and leaves that stay whole."""
    unmatched = [rule.path for rule in layout.unmatched_rules]
    whole = [
        f"{leaf.path} {leaf.shape}: {leaf.reason}"
        for leaf in layout.leaves
        if leaf.reason.startswith(NO_DIM) and num_elements(leaf.shape) >= layout.min_size
    ]
    if strict and (whole or unmatched):
        lines = [*whole, *(f"rule {path!r} matched no leaf" for path in unmatched)]
        raise ValueError(
            f"strict: {len(lines)} refused; raise min_size, add a rule, or drop strict\n  "
            + "\n  ".join(lines)
        )
    if unmatched:
        warnings.warn(f"rules that matched no leaf: {unmatched}", stacklevel=3)
