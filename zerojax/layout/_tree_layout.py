"""`TreeLayout`: where parameters live as data, and the questions that need nothing else."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import treedef_is_leaf

from zerojax._tree import leaves_like, named_tuples, parameter_ends
from zerojax._types import AnyMesh, Axes, Kind, PyTree, Shape, TreeDef, platform_of
from zerojax.hardware import Hardware, hardware_of
from zerojax.layout import _mesh
from zerojax.layout._leaf import Cut, Entries, LeafLayout, Rule, choose_cut
from zerojax.layout._stages import STAGES
from zerojax.layout._torus import Phases, fills_tiles, find_phases


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class TreeLayout:
    """The placement of parameters, gradients and batches over a mesh; see `Layout`."""

    mesh: AnyMesh
    stage: int
    axes: Mapping[Kind, Axes] = dataclasses.field(hash=False)
    batch_axes: Axes
    leaves: tuple[LeafLayout, ...]
    structure: TreeDef
    rules: tuple[Rule, ...]
    min_size: int
    has_options: bool = dataclasses.field(default=False, compare=False)

    @property
    def axis(self) -> Axes:
        """The mesh axes that ZeRO partitions over: all that optimizer states are cut along."""
        return self.axes["optimizer"]

    @cached_property
    def num_shards(self) -> int:
        """N: the parts that the axis cuts a leaf into."""
        return self.num_parts(self.axis)

    @property
    def num_batch_parts(self) -> int:
        """The parts that the batch axes cut a batch into."""
        return self.num_parts(self.batch_axes)

    @property
    def title(self) -> str:
        """The stage, the mesh and the number of parameters, in one line."""
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return (
            f"ZeRO stage {self.stage} over {self.over} on a mesh of {axes}; "
            f"{self.num_params:,} parameters"
        )

    @property
    def over(self) -> str:
        """The axis in words, and that of parameters where these are cut along a part of it."""
        whole, part = (" x ".join(axes) for axes in (self.axis, self.axes["parameter"]))
        parameters = self.partitions("parameter") and part != whole and f", parameters over {part}"
        return f"{whole} (N = {self.num_shards}){parameters or ''}"

    @property
    def groups(self) -> tuple[Axes, ...]:
        """The axis in the parts along which shards move one after the other.

        With parameters over "fsdp" and optimizer states over "fsdp" and "replica", a gradient is
        reduced along "fsdp" and its shards along "replica"; new parameters go the other way.
        """
        ends = sorted({len(axes) for axes in self.axes.values()})
        return tuple(self.axis[a:b] for a, b in zip((0, *ends), ends, strict=False))

    def num_parts(self, axes: Sequence[str]) -> int:
        """Count the parts that some axes of the mesh cut a dim into."""
        return _mesh.num_devices(self.mesh, axes)

    def cut(
        self, shape: Shape, entries: Entries, *, stacked: int = 0, wanted: int | None = None
    ) -> tuple[Cut | None, str]:
        """Choose how a leaf is cut; None where it stays whole; and say why. See `choose_cut`."""
        parts, asked = tuple(map(self.num_parts, entries)), {"stacked": stacked, "wanted": wanted}
        held: Any = {"min_size": self.min_size, "in_steps": self._reduces_in_steps}
        return choose_cut(shape, parts, self.num_shards, **held, **asked)

    @cached_property
    def _reduces_in_steps(self) -> bool:
        """Whether gradients are reduced along one axis, then another; a TPU has its phases."""
        is_tpu = not isinstance(self.mesh, AbstractMesh) and self.platform == "tpu"
        return not is_tpu and (len(self.groups) > 1 or self.num_batch_parts > self.num_shards)

    def placed(
        self,
        path: str,
        leaf: Any,
        reason: str,
        entries: Entries | None = None,
        cut: Cut | None = None,
        kinds: frozenset[Kind] = frozenset(),
        **fields: Any,
    ) -> LeafLayout:
        """Describe a leaf that is placed so; `leaf` has its shape and dtype."""
        entries = ((),) * len(leaf.shape) if entries is None else entries
        if cut is not None:
            axes = {kind: self.axes[kind] for kind in kinds}
            parts = {kind: self.num_parts(names) for kind, names in axes.items()}
            fields |= {"dim": cut.dim, "stored_size": cut.stored_size, "axes": axes, "parts": parts}
        fields |= {"entries": entries, "own_parts": math.prod(map(self.num_parts, entries))}
        return LeafLayout(path=path, shape=leaf.shape, dtype=leaf.dtype, reason=reason, **fields)

    def local_shape(self, leaf: LeafLayout, shape: Shape) -> Shape:
        """Return the part of a leaf that the user's own axes leave to a device."""
        parts = map(self.num_parts, leaf.entries)
        return tuple(math.ceil(size / part) for size, part in zip(shape, parts, strict=True))

    @cached_property
    def unmatched_rules(self) -> tuple[Rule, ...]:
        """The rules for parameters that match none."""
        rules = (rule for rule in self.rules if rule.kind == "parameter")
        return tuple(x for x in rules if not any(x.matches(leaf.path) for leaf in self.leaves))

    @property
    def num_params(self) -> int:
        """Psi: the number of logical parameters."""
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @cached_property
    def auto_mesh(self) -> AnyMesh:
        """The mesh with Auto axes, in which constraints are written."""
        return self.mesh.update(axis_types=(AxisType.Auto,) * len(self.mesh.axis_names))

    @cached_property
    def phases(self) -> Phases:
        """The phases in which leaves are gathered and gradients reduced."""
        return find_phases(self.mesh, *self.groups)

    @cached_property
    def by_sparse_cores(self) -> bool:
        """Whether SparseCores gather weights and scatter gradients in a train step of it."""
        has_them = self.hardware is not None and self.hardware.sparse_cores
        return has_them and self.partitions("optimizer")

    @cached_property
    def at_once(self) -> Phases:
        """One phase for each group of axes, as compiler options let gathers be."""
        return Phases(self.auto_mesh, self.groups)

    def phases_of(self, shape: Shape, dim: int | None, *, reduces: bool = False) -> Phases:
        """Return the phases in which a leaf is gathered, or its gradient reduced."""
        at_once = fills_tiles(shape, dim, self.num_shards) if self.by_sparse_cores else not reduces
        if not (self.has_options and self.platform == "tpu" and at_once):
            return self.phases
        is_split = reduces and dim != len(shape) - 1 and not self.at_once.scatters(shape[-1])
        return self.phases if is_split and self.phases.scatters(shape[-1]) else self.at_once

    @property
    def torus_note(self) -> str:
        """How a train step moves leaves over a whole torus; empty where that is nothing special."""
        phases = str(self.phases) if self.kinds else ""
        if not phases or not self.by_sparse_cores:
            is_cut = phases and self.phases.dims
            return f"{phases}; a train step gathers at once" if is_cut else phases
        cut = [leaf for leaf in self.leaves if leaf.dim is not None]
        whole = sum(fills_tiles(x.stored_shape, x.dim, self.num_shards) for x in cut)
        told = f"in a train step SparseCores gather and reduce {whole} of {len(cut)} leaves"
        rest = f"; of others, whose shards are no whole tiles, {phases}" if whole < len(cut) else ""
        return f"{told} over the whole torus at once{rest}"

    @property
    def devices(self) -> np.ndarray:
        """The devices of the mesh, in its shape; a ValueError where the mesh has none."""
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError(
                f"the layout's mesh {dict(self.mesh.shape)} is an AbstractMesh, which has no "
                "devices and serves to place, count and describe; to compile or audit a step, give "
                "make_layout a mesh of zerojax.make_mesh or zerojax.aot.topology_mesh (absent ones)"
            )
        return self.mesh.devices

    @property
    def platform(self) -> str:
        """The backend of the devices: "cpu", "gpu" or "tpu"; a ValueError without any."""
        return platform_of(self.devices.flat[0])

    @cached_property
    def hardware(self) -> Hardware | None:
        """What is known of the devices; None where the mesh has none, or others."""
        has_none = isinstance(self.mesh, AbstractMesh)
        return None if has_none else hardware_of(str(self.devices.flat[0].device_kind))

    @property
    def kinds(self) -> frozenset[Kind]:
        """The kinds of tensor that the stage partitions."""
        return STAGES[self.stage]

    def partitions(self, kind: Kind) -> bool:
        """Return whether the stage partitions a kind of tensor."""
        return kind in self.kinds

    def by_formula(self, kind: Kind, whole: float) -> int:
        """Return what a device holds of whole bytes by the stage's formula, whole / N."""
        return round(whole / (self.num_parts(self.axes[kind]) if self.partitions(kind) else 1))

    @cached_property
    def layers(self) -> tuple[tuple[LeafLayout, ...], ...]:
        """The leaves of each layer; those of no layer are left out.

        Stacks of one height are a layer: a slice of each. Another is what stands below a number in
        paths: `blocks/0/...`, or `UNet_0/layer_0/...` where there is a `layer_1` too.
        """
        layers: dict[Any, list[LeafLayout]] = {}
        starts = {start for leaf in self.leaves for start in _numbered(leaf.path)}
        alike = collections.Counter(place for _, place in starts)
        many = {x for x, place in starts if alike[place] > 1 or x.rpartition("/")[2].isdigit()}
        for leaf in self.leaves:
            named = (start for start, _ in _numbered(leaf.path) if start in many)
            if name := leaf.shape[: leaf.stacked] or next(named, None):
                layers.setdefault(name, []).append(leaf)
        return tuple(map(tuple, layers.values()))

    @property
    def layer_size(self) -> int:
        """The elements of the largest layer; of the largest leaf where there are no layers."""
        of = self.layers or ([leaf] for leaf in self.leaves)
        return max(sum(math.prod(x.shape[x.stacked :]) for x in one) for one in of)

    def owners(self, path: str, beside: Collection[str]) -> list[int]:
        """Return the parameters that a path may be of, the likeliest first; `.` ends every path."""
        ends = parameter_ends(path, self._numbers, beside) or ["."]
        return [self._numbers[end] for end in ends if end in self._numbers]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {leaf.path: number for number, leaf in enumerate(self.leaves)}

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
    def masters(self) -> PyTree:
        """Shardings of logical masters, and of what lies as they do: an average of the weights."""
        return self._shardings("master")

    @property
    def batch(self) -> NamedSharding:
        """Sharding of every leaf of a batch: its leading dim over the batch axes."""
        return self.sharding(P(self.batch_axes) if self.batch_axes else P())

    def stored(self, kind: Kind) -> PyTree:
        """Return the shardings of the stored leaves of a kind of tensor."""
        return self.map_leaves(lambda leaf: self.sharding(leaf.spec(kind)))

    def sharding(self, spec: P, ndim: int = 0) -> NamedSharding:
        """Place an array of `ndim` dims.

        With Explicit axes each dim has an entry, as in what a step returns: where they are spelled
        otherwise, jax compiles a second time.
        """
        if AxisType.Explicit in self.mesh.axis_types:
            spec = P(*spec, *[None] * (ndim - len(spec)))
        return NamedSharding(self.mesh, spec)

    def map_leaves(self, function: Callable[..., Any], *rest: PyTree) -> PyTree:
        """Map `function(leaf_layout, *values)` over the parameters' structure."""
        columns = [self.structure.flatten_up_to(tree) for tree in rest]
        return self.structure.unflatten(map(function, self.leaves, *columns))

    def flatten(
        self, tree: PyTree, what: str, *, within: bool = False, stored: bool = False
    ) -> list[Any]:
        """Return the leaves of a tree like the parameters, in the layout's order.

        It holds them, or padded ones if `stored`, maybe in other nodes (`leaves_like`), and if
        `within` other floating leaves too. `what` names the tree in errors.

        Raises:
            ValueError: a leaf is missing, too many or of another shape; it is named.
        """
        remedy = "make the layout from these parameters, or hand over what it was made from"
        try:
            leaves = leaves_like(tree, self.structure, within=within)
        except ValueError as error:
            if hasattr(tree, "params"):
                remedy = "hand over the parameters of this state, its `params`"
            elif treedef_is_leaf(jax.tree.structure(tree)):
                remedy = "hand over parameters (an init function with what it takes: (init, key))"
            if "MaskedNode" in named_tuples(tree).values():  # of optax.masked and multi_transform
                remedy = "wrap the outermost optimizer: sharded(optax.masked(tx, mask), layout)"
            raise ValueError(
                f"{what} do not have the structure that the layout was made from: {error}; {remedy}"
            ) from None
        for x, leaf in zip(leaves, self.leaves, strict=True):
            if jnp.shape(x) not in (leaf.shape, leaf.stored_shape if stored else leaf.shape):
                if jnp.shape(x) == leaf.stored_shape:
                    remedy = "it is stored padded, and zerojax.unpad returns the logical leaf"
                told = f"{what}: leaf {leaf.path!r} has shape {jnp.shape(x)} where the layout has"
                raise ValueError(f"{told} {leaf.shape}; {remedy}")
        return leaves

    def _shardings(self, kind: Kind) -> PyTree:
        specs = (x.whole_spec if x.is_padded else x.spec(kind) for x in self.leaves)
        placed = map(self.sharding, specs, (len(x.shape) for x in self.leaves))
        return self.structure.unflatten(placed)


def _numbered(path: str) -> list[tuple[str, str]]:
    """List the starts of a path that end in a number, each without it too: `layer_0`, `layer_`."""
    starts = (path[: x.end()] for x in re.finditer(r"[^/]*\d[^/]*(?=/)", path))
    return [(start, re.sub(r"\d+(?=[^/]*$)", "", start)) for start in starts]
