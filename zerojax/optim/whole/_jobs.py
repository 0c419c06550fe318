"""Whole matrices without gathering: each goes from its shards to one device, and back.

Every device has a part of every matrix and sends the part to the matrix's owner, which computes
and sends each device its part of the result: two all-to-alls. 12 matrices, 12 smaller, 8 devices:

    owner    0   1   2   3   4   5   6   7
    slot 1   a   a   a   a   a   a   a   a     one of the first kind for each
    slot 2   b   b   b   b   b   b   b   b
    slot 3   a   a   a   a   b   b   b   b     what is left shares a slot
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from zerojax._types import Axes, Shape
from zerojax.collectives.forms import constrain, on_devices
from zerojax.layout import Layout, as_spec

#: The scope that names these all-to-alls in profiles and in the text of programs.
OWNERS = "matrices_to_owners"


@dataclasses.dataclass(frozen=True)
class Spread:
    """How one row of a value is cut: [1009, 64] in 8 along dim 0, padded to [1016, 64]."""

    shape: Shape  # of the row
    dtype: Any  # of its elements
    # per mesh axis its name, its size and the dim that it cuts, in the order of the owners
    cuts: tuple[tuple[str, int, int], ...]

    @property
    def spec(self) -> P:
        entries = [tuple(a for a, _, dim in self.cuts if dim == d) for d in range(len(self.shape))]
        return as_spec(((), *entries))

    @property
    def parts(self) -> Shape:
        dims = range(len(self.shape))
        return tuple(math.prod(n for _, n, d in self.cuts if d == dim) for dim in dims)

    @property
    def local(self) -> Shape:
        return tuple(-(-size // n) for size, n in zip(self.shape, self.parts, strict=True))

    def pad(self, rows: jax.Array) -> jax.Array:
        more = [(0, -size % n) for size, n in zip(self.shape, self.parts, strict=True)]
        return jnp.pad(rows, [(0, 0), *more])

    def unpad(self, rows: jax.Array) -> jax.Array:
        return rows[(slice(None), *map(slice, self.shape))]

    def cut(self, rows: jax.Array) -> jax.Array:
        """Cut whole rows into each device's part: [rows, *shape] to [devices, rows, *local]."""
        x = self.pad(rows)
        for axis, (_, size, dim) in enumerate(self.cuts):
            at = axis + 1 + dim
            x = x.reshape(*x.shape[:at], size, -1, *x.shape[at + 1 :])
            x = jnp.moveaxis(x, at, axis)
        return x.reshape(-1, len(rows), *self.local)

    def join(self, parts: jax.Array) -> jax.Array:
        x = parts.reshape(*(size for _, size, _ in self.cuts), parts.shape[1], *self.local)
        for axis, (_, _, dim) in reversed([*enumerate(self.cuts)]):
            at = axis + 1 + dim
            x = jnp.moveaxis(x, axis, at)
            x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
        return self.unpad(x)


@dataclasses.dataclass(frozen=True)
class Job:
    """Matrices of one kind, on which the same is computed."""

    # `run(values, shared)` computes some rows whole
    run: Callable[[Sequence[jax.Array], Sequence[jax.Array]], Sequence[jax.Array]]
    ins: tuple[Spread, ...]  # how the values that move are cut
    outs: tuple[Spread, ...]  # how the results are
    values: tuple[jax.Array, ...]  # what moves, `[rows, *shape]` each
    shared: tuple[jax.Array, ...]  # what all rows need, and every device has

    @property
    def dtype(self) -> Any:
        return jnp.result_type(*(spread.dtype for spread in self.ins + self.outs))


@dataclasses.dataclass(frozen=True)
class _Part:
    job: int
    rows: slice
    each: int
    owners: slice


def compute_by_owners(jobs: Sequence[Job], layout: Layout, axes: Axes) -> list[list[jax.Array]]:
    """Compute each job's rows, `[rows, *shape]`, on devices along some axes that own them whole."""
    count, mesh = layout.num_parts(axes), layout.auto_mesh

    def body(values: list[list[jax.Array]], shared: list[list[jax.Array]]) -> list[list[jax.Array]]:
        sent = [_flat(xs, job.dtype) for xs, job in zip(values, jobs, strict=True)]
        found: list[list[jax.Array]] = [[] for _ in jobs]
        for slot in _slots(jobs, count):
            width = [p.each * _width(jobs[p.job].ins) for p in slot]
            parts = [sent[p.job][p.rows].reshape(-1, n) for p, n in zip(slot, width, strict=True)]
            x = jnp.concatenate([jnp.pad(x, [(0, 0), (0, max(width) - x.shape[1])]) for x in parts])
            x = jnp.pad(x, [(0, count - len(x)), (0, 0)])
            if not isinstance(mesh, AbstractMesh) and layout.platform == "cpu":
                x = jax.lax.optimization_barrier(x)  # XLA splits it into rows, and may fail
            done = _swapped(_computed(_swapped(x, axes), slot, jobs, shared, axes), axes)
            for p in slot:
                width = _width(jobs[p.job].outs)
                found[p.job].append(done[p.owners, : p.each * width].reshape(-1, width))
        return [_unflat(jnp.concatenate(xs), job.outs) for job, xs in zip(jobs, found, strict=True)]

    ins, outs = [[s.spec for s in x.ins] for x in jobs], [[s.spec for s in x.outs] for x in jobs]
    placed = [
        [constrain(s.pad(x), layout, s.spec) for s, x in zip(job.ins, job.values, strict=True)]
        for job in jobs
    ]
    how: Any = {"in_specs": (ins, P()), "out_specs": outs, "check_vma": False}
    out = on_devices(mesh, body, placed, [list(job.shared) for job in jobs], **how)
    pairs = zip(jobs, out, strict=True)
    return [[s.unpad(x) for s, x in zip(job.outs, xs, strict=True)] for job, xs in pairs]


def _slots(jobs: Sequence[Job], num_owners: int) -> list[list[_Part]]:
    """Share rows out: as many as divide to every device, the rest to some, heavy ones first."""
    slots: list[list[_Part]] = []
    rests: list[list[_Part]] = []

    for number in sorted(range(len(jobs)), key=lambda n: -_width(jobs[n].ins)):
        each, rest = divmod(len(jobs[number].values[0]), num_owners)
        first = each * num_owners
        if each:
            slots.append([_Part(number, slice(0, first), each, slice(0, num_owners))])
        if rest:
            for slot in rests:
                at = slot[-1].owners.stop
                if at + rest <= num_owners and jobs[slot[0].job].dtype == jobs[number].dtype:
                    break
            else:
                at, slot = 0, list[_Part]()
                rests.append(slot)
            slot.append(_Part(number, slice(first, first + rest), 1, slice(at, at + rest)))
    return slots + rests


def _computed(
    x: jax.Array,
    slot: Sequence[_Part],
    jobs: Sequence[Job],
    shared: Sequence[Sequence[jax.Array]],
    axes: Axes,
) -> jax.Array:
    """Compute a device's own rows, which depend on the device: [devices, elements] of each."""
    count = len(x)
    width = max(p.each * _width(jobs[p.job].outs) for p in slot)

    def branch(part: _Part) -> Callable[[jax.Array], jax.Array]:
        job, each = jobs[part.job], part.each

        def run(x: jax.Array) -> jax.Array:
            parts = x[:, : each * _width(job.ins)].reshape(count * each, -1)
            rows = [
                s.join(v.reshape(count, each, *s.local))
                for s, v in zip(job.ins, _unflat(parts, job.ins), strict=True)
            ]
            out = zip(job.outs, job.run(rows, shared[part.job]), strict=True)
            parts = [s.cut(y).reshape(count * each, *s.local) for s, y in out]
            y = _flat(parts, job.dtype).reshape(count, -1)
            return jnp.pad(y, [(0, 0), (0, width - y.shape[1])])

        return run

    owners = [n for n, part in enumerate(slot) for _ in range(count)[part.owners]]
    if owners == [0] * count:
        return branch(slot[0])(x)
    own = jnp.asarray(owners + [len(slot)] * (count - len(owners)))[jax.lax.axis_index(axes)]
    branches = [*map(branch, slot), lambda x: jnp.zeros((count, width), x.dtype)]
    return jax.lax.switch(own, branches, x)


def _swapped(x: jax.Array, axes: Axes) -> jax.Array:
    with jax.named_scope(OWNERS):
        return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)


def _width(spreads: Sequence[Spread]) -> int:
    return sum(math.prod(spread.local) for spread in spreads)


def _flat(arrays: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.concatenate([x.reshape(len(x), -1).astype(dtype) for x in arrays], 1)


def _unflat(rows: jax.Array, spreads: Sequence[Spread]) -> list[jax.Array]:
    found, at = [], 0
    for spread in spreads:
        size = math.prod(spread.local)
        found.append(rows[:, at : at + size].reshape(len(rows), *spread.local).astype(spread.dtype))
        at += size
    return found
