"""`update_whole`: the regions of an update as jobs of owners."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import bind, depending, inputs_of, opened, run_bodies, run_equations
from zerojax._traced import Traced
from zerojax._tree import grouped
from zerojax._types import PyTree
from zerojax.layout import Layout, OptimizerLayout
from zerojax.optim.whole._dims import has_matrices
from zerojax.optim.whole._jobs import Job, Spread, compute_by_owners
from zerojax.optim.whole._regions import Region, Regions


def update_whole(
    traced: Traced, args: tuple[PyTree, ...], placed: OptimizerLayout, layout: Layout
) -> tuple[PyTree, PyTree]:
    """Run an update; what of it needs whole matrices runs on devices that own them.

    It is traced as `update(grads, state, params, extra)` of logical leaves, as shards.
    """
    if not layout.partitions("optimizer") or not has_matrices(traced.eqns):
        return traced.run(*args)
    runner = _Runner(Regions(traced, placed, layout), layout)
    values = inputs_of(traced.program, jax.tree.leaves(args))
    return traced.out_tree.unflatten(runner.run(traced.eqns, values, traced.outputs))


class _Runner:
    def __init__(self, regions: Regions, layout: Layout) -> None:
        self._regions, self._layout = regions, layout

    def run(self, eqns: Sequence[Any], values: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Run equations: those before the regions, these together, and those after them."""
        regions = self._regions.find(eqns, outputs)
        own = {id(eqn) for region in regions for eqn in region.slice.eqns}
        rest = [eqn for eqn in eqns if id(eqn) not in own]
        late = depending(rest, [var for region in regions for var in region.slice.outputs])
        first = [eqn for eqn in rest if late.isdisjoint(eqn.outvars)]
        last = [eqn for eqn in rest if not late.isdisjoint(eqn.outvars)]
        made = [var for eqn in first for var in eqn.outvars]
        found = run_equations(first, values, made, self._step)
        values = values | dict(zip(made, found, strict=True))
        values |= self._whole(regions, values)
        return run_equations(last, values, outputs, self._step)

    def _step(self, eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name != "cond" or not self._regions.dims.met(eqn):
            return bind(eqn, values)

        def branch(program: Any, given: Sequence[Any]) -> list[Any]:
            jaxpr, _ = opened(program)
            return self.run(jaxpr.eqns, inputs_of(program, given), jaxpr.outvars)

        return run_bodies(eqn, values, branch)

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


def _rows_first(x: jax.Array, region: Region, var: Any) -> jax.Array:
    dim = region.row_dim(var)
    x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
    return x.reshape(len(x), *(region.row_shape(var) or (1,)))


def _rows_back(x: jax.Array, region: Region, var: Any) -> jax.Array:
    dim = region.row_dim(var)
    x = x.reshape(len(x), *region.row_shape(var))
    return x[0] if dim is None else jnp.moveaxis(x, 0, dim)
