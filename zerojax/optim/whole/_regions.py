"""Where an optimizer computes: the parts of its update that need whole matrices.

Of Muon's update of a leaf, the moments are computed where they are stored, element by element, and
the Newton-Schulz products need whole matrices. The equations from the first product to the last
are a *region*: its inputs go to the devices that own whole matrices, its results come back.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import _jaxpr
from zerojax._jaxpr import depending, variables
from zerojax._traced import Slice, Traced
from zerojax._tree import grouped
from zerojax._types import Axes, PyTree, Shape
from zerojax.layout import Layout, OptimizerLayout, as_entries
from zerojax.optim.whole._dims import SHARED, Dims, has_matrices
from zerojax.optim.whole._jobs import Job, Spread, compute_by_owners

#: Of operations that say sizes, the parameter that says them.
_SIZES = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}


def update_whole(
    traced: Traced, args: tuple[PyTree, ...], placed: OptimizerLayout, layout: Layout
) -> tuple[PyTree, PyTree]:
    """Run an update; what of it needs whole matrices runs on devices that own them.

    It is traced as `update(grads, state, params, extra)` of logical leaves, as shards.
    """
    if not layout.partitions("optimizer") or not has_matrices(traced.eqns):
        return traced.run(*args)
    values = _jaxpr.inputs_of(traced.program, jax.tree.leaves(args))
    regions = Regions(traced, placed, layout)
    return traced.out_tree.unflatten(regions.run(traced.eqns, values, traced.outputs))


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    owner: int  # the parameter whose update it is
    slice: Slice  # its equations, inputs and results
    dims: Dims  # the labels of all dims
    axes: Axes  # the mesh axes that cut the leaf, those of ZeRO last
    names: dict[int, Axes]  # the labels of dims that are cut, and the axes that cut them
    # the label along which rows are matrices of their own; None where the leaf is one
    rows: int | None
    # the inputs that are cut, or that rows differ in; the others are the same for all
    moved: tuple[Any, ...]

    @property
    def shared(self) -> tuple[Any, ...]:
        return tuple(var for var in self.slice.inputs if var not in self.moved)

    @property
    def num_rows(self) -> int:
        dim = self.row_dim(self.moved[0])
        return 1 if dim is None else self.moved[0].aval.shape[dim]

    def row_dim(self, var: Any) -> int | None:
        labels = self.dims.labels(var)
        return labels.index(self.rows) if self.rows in labels else None

    def row_shape(self, var: Any) -> Shape:
        return tuple(x for d, x in enumerate(var.aval.shape) if d != self.row_dim(var))

    def cuts(self, var: Any) -> list[int]:
        """Return the dim of a row that each axis cuts where the value lies, or else the longest."""
        labels = [label for label in self.dims.labels(var) if label != self.rows]
        shape = self.row_shape(var)
        longest = max(range(len(shape)), key=shape.__getitem__, default=0)
        names = [self.names.get(label, ()) for label in labels]
        return [next((d for d, own in enumerate(names) if x in own), longest) for x in self.axes]

    def run(self, moved: Sequence[jax.Array], shared: Sequence[jax.Array]) -> list[jax.Array]:
        """Compute the results of some rows from their inputs, rows first."""
        known = dict(zip(self.shared, shared, strict=True))

        def step(eqn: Any, values: list[Any]) -> list[Any]:
            name = eqn.primitive.name
            if name in _jaxpr.CALLS or name in ("scan", "cond"):
                return _jaxpr.run_bodies(eqn, values, functools.partial(_jaxpr.run, step=step))
            dim = self.row_dim(eqn.outvars[0]) if name in _SIZES else None
            if dim is not None:  # rows are others than those that it was traced with
                sizes = list(eqn.params[_SIZES[name]])
                sizes[dim] = len(moved[0])
                eqn = eqn.replace(params={**eqn.params, _SIZES[name]: tuple(sizes)})
            return _jaxpr.bind_here(eqn, values)

        def compute(*rows: jax.Array) -> list[jax.Array]:
            given = {**known, **dict(zip(self.moved, rows, strict=True))}
            return self.slice.run([given[var] for var in self.slice.inputs], step)

        if self.rows is None:
            return jax.vmap(compute)(*moved)
        ins, outs = ([self.row_dim(v) or 0 for v in x] for x in (self.moved, self.slice.outputs))
        out = compute(*(jnp.moveaxis(x, 0, dim) for x, dim in zip(moved, ins, strict=True)))
        return [jnp.moveaxis(x, dim, 0) for x, dim in zip(out, outs, strict=True)]


class Regions:
    """Finds what of an update needs whole matrices of leaves that are cut, and runs it.

    Example: of Muon's update of a stack `[12, 768, 3072]`, cut along dim 1, one region of 12 rows.
    """

    def __init__(self, traced: Traced, placed: OptimizerLayout, layout: Layout) -> None:
        """Read an update of logical leaves: gradients, state and maybe parameters, then others."""
        self._dims = Dims()
        labels: dict[int, tuple[int, ...]] = {}
        names: list[tuple[int, Axes]] = []
        numbers = {id(leaf): number for number, leaf in enumerate(layout.leaves)}
        updated = (*layout.leaves, *placed.leaves)
        has_params = len(traced.inputs) >= len(updated) + len(layout.leaves)
        ins = zip(traced.inputs, (*updated, *layout.leaves * has_params), strict=False)
        # An update that returns another structure than it was given is refused later on.
        for var, leaf in (*ins, *zip(traced.outputs, updated, strict=False)):
            if not variables([var]) or var.aval.shape != leaf.shape:
                continue
            own = labels.setdefault(id(leaf), self._dims.fresh(len(leaf.shape)))
            owner = numbers.get(id(leaf), leaf.parameter)
            self._dims.give(var, own, () if owner is None else (owner,))
            names += zip(own, as_entries(leaf.shard_spec, len(leaf.shape)), strict=True)
        self._dims.read(traced.eqns)
        self._layout = layout
        self._names = {self._dims.find(label): axes for label, axes in names[::-1] if axes}

    def run(self, eqns: Sequence[Any], values: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Run equations: those before the regions, these together, and those after them."""
        regions = self._find(eqns, outputs)
        own = {id(eqn) for region in regions for eqn in region.slice.eqns}
        rest = [eqn for eqn in eqns if id(eqn) not in own]
        late = depending(rest, [var for region in regions for var in region.slice.outputs])
        first = [eqn for eqn in rest if late.isdisjoint(eqn.outvars)]
        last = [eqn for eqn in rest if not late.isdisjoint(eqn.outvars)]
        made = [var for eqn in first for var in eqn.outvars]
        found = _jaxpr.run_equations(first, values, made, self._step)
        values = values | dict(zip(made, found, strict=True))
        values |= self._whole(regions, values)
        return _jaxpr.run_equations(last, values, outputs, self._step)

    def _step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name != "cond" or not self._dims.met(eqn):
            return _jaxpr.bind(eqn, values)

        def branch(program: Any, given: Sequence[Any]) -> list[Any]:
            jaxpr, _ = _jaxpr.opened(program)
            return self.run(jaxpr.eqns, _jaxpr.inputs_of(program, given), jaxpr.outvars)

        return _jaxpr.run_bodies(eqn, values, branch)

    def _whole(self, regions: Sequence[Region], values: dict[Any, Any]) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for axes, cut_alike in grouped(regions, lambda region: region.axes).items():
            groups = grouped(cut_alike, lambda region: self._kind(region, values))
            jobs = [self._job(alike, values) for alike in groups.values()]
            results = compute_by_owners(jobs, self._layout, axes)
            for alike, columns in zip(groups.values(), results, strict=True):
                first = 0
                for region in alike:
                    rows = slice(first, first + region.num_rows)
                    first = rows.stop
                    for var, x in zip(region.slice.outputs, columns, strict=True):
                        found[var] = _rows_back(x[rows], region, var)
        return found

    def _job(self, alike: Sequence[Region], values: dict[Any, Any]) -> Job:
        one = alike[0]
        rows = ([_rows_first(values[v], region, v) for v in region.moved] for region in alike)
        return Job(
            run=one.run,
            ins=tuple(self._spread(one, var) for var in one.moved),
            outs=tuple(self._spread(one, var) for var in one.slice.outputs),
            values=tuple(jnp.concatenate(column) for column in zip(*rows, strict=True)),
            shared=tuple(values[var] for var in one.shared),
        )

    def _spread(self, region: Region, var: Any) -> Spread:
        sizes, pairs = self._layout.mesh.shape, zip(region.axes, region.cuts(var), strict=True)
        cuts = tuple((axis, sizes[axis], dim) for axis, dim in pairs)
        return Spread(region.row_shape(var) or (1,), var.aval.dtype, cuts)

    def _kind(self, region: Region, values: dict[Any, Any]) -> Any:
        """Return what regions have in common whose rows may be computed together."""
        rows = [jax.ShapeDtypeStruct((1, *region.row_shape(v)), v.aval.dtype) for v in region.moved]
        shared = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in region.shared]
        traced = jax.make_jaxpr(region.run)(rows, shared)
        spreads = [self._spread(region, v) for v in (*region.moved, *region.slice.outputs)]
        same = [values[var] for var in region.shared]
        return str(traced), tuple(map(id, (*traced.consts, *same))), tuple(spreads)

    def _find(self, eqns: Sequence[Any], outputs: Sequence[Any]) -> list[Region]:
        """Return at most one region per parameter, of some equations and their results.

        An update that joins several leaves in its products is left as it is, and so is one whose
        products wait for those of another.
        """
        owned: dict[int, list[int]] = {}
        readers: dict[Any, set[int]] = {var: {len(eqns)} for var in variables(outputs)}
        for number, eqn in enumerate(eqns):
            for var in variables(eqn.invars):
                readers.setdefault(var, set()).add(number)
            for owner in self._owners(eqn):
                owned.setdefault(owner, []).append(number)
        found = []
        for owner, numbers in owned.items():
            between = self._between(eqns, numbers)
            met = set[int]().union(*(self._dims.met(eqns[n]) for n in between))
            cut = any({*self._names.get(label, ())} & {*self._layout.axis} for label in met)
            inner = (x.primitive.name for n in between for x in _jaxpr.with_inner(eqns[n]))
            cut = cut and "shard_map" not in inner  # the user's can't stand in that of the owners
            if cut and all(self._owners(eqns[n]) == {owner} for n in between):
                found += self._regions(owner, [eqns[n] for n in between], readers, {*between})
        late = depending(eqns, [var for region in found for var in region.slice.outputs])
        return [region for region in found if late.isdisjoint(region.slice.inputs)]

    def _owners(self, eqn: Any) -> set[int]:
        owners = self._dims.owners
        return {x for var in variables(eqn.invars) for x in owners.get(var, ())} - {SHARED}

    def _between(self, eqns: Sequence[Any], numbers: Sequence[int]) -> list[int]:
        seeds = [n for n in numbers if self._dims.met(eqns[n])]
        behind = depending([eqns[n] for n in numbers], [x for n in seeds for x in eqns[n].outvars])
        ahead, between = {var for n in seeds for var in variables(eqns[n].invars)}, set(seeds)
        for number in reversed(numbers):
            if not ahead.isdisjoint(eqns[number].outvars):
                ahead.update(variables(eqns[number].invars))
                if not behind.isdisjoint(variables(eqns[number].invars)):
                    between.add(number)
        return sorted(between)

    def _regions(
        self, owner: int, eqns: Sequence[Any], readers: dict[Any, set[int]], numbers: set[int]
    ) -> Iterator[Region]:
        made = [var for eqn in eqns for var in eqn.outvars]
        read = dict.fromkeys(var for eqn in eqns for var in variables(eqn.invars))
        inputs = tuple(var for var in read if var not in {*made})
        results = tuple(var for var in made if readers.get(var, numbers) - numbers)
        part = Slice(inputs, tuple(eqns), results)
        owned = [var for var in inputs if self._dims.owners.get(var, {SHARED}) - {SHARED}]
        rows = self._rows(part, owned)
        moved = [v for v in inputs if rows in self._dims.labels(v)] if rows is not None else owned
        dtypes = {var.aval.dtype for var in (*moved, *results)}
        # What moves together is moved in the widest dtype, which must hold them all.
        alike = len(dtypes) == 1 or all(jnp.issubdtype(x, jnp.floating) for x in dtypes)
        if moved and results and alike:
            entries = self._layout.leaves[owner].entries
            axes = (*(name for names in entries for name in names), *self._layout.axis)
            yield Region(owner, part, self._dims, axes, self._names, rows, tuple(moved))

    def _rows(self, part: Slice, owned: Sequence[Any]) -> int | None:
        """Return the label whose rows no equation mixes, of several the one of most rows."""
        moved = [var for var in owned if math.prod(var.aval.shape) > 1]
        if not moved:
            return None
        mixed, labels_of = self._dims.mixed(part.eqns), self._dims.labels
        found = set.intersection(*({*labels_of(v)} - mixed for v in (*moved, *part.outputs)))
        sizes: dict[int, set[int]] = {label: set() for label in found}
        for var in (*part.inputs, *(var for eqn in part.eqns for var in eqn.outvars)):
            labels = labels_of(var)
            for label, size in zip(labels, var.aval.shape, strict=True):
                if label in sizes:
                    sizes[label].add(size if labels.count(label) == 1 else 0)
        counts = {label: min(x) for label, x in sizes.items() if len(x) == 1 and min(x)}
        return max(counts, key=counts.__getitem__, default=None)


def _rows_first(x: jax.Array, region: Region, var: Any) -> jax.Array:
    dim = region.row_dim(var)
    x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
    return x.reshape(len(x), *(region.row_shape(var) or (1,)))


def _rows_back(x: jax.Array, region: Region, var: Any) -> jax.Array:
    dim = region.row_dim(var)
    x = x.reshape(len(x), *region.row_shape(var))
    return x[0] if dim is None else jnp.moveaxis(x, 0, dim)
