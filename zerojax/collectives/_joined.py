"""Joined gathers: neighbouring weights move in one message, where messages are what takes time.

Between processes on CPUs each gather is a message of gloo's, whose time hardly depends on its size.
A pass over a program that is differentiated already, whose calls are in place. Of

    a = GATHER w0; h1 = dot_general h0 a
    b = GATHER w1; h2 = dot_general h1 b

what each device holds of both is laid in one row, gathered, and cut apart again:

    r = GATHER (concatenate w0 w1); a = slice r; b = slice r
    h1 = dot_general h0 a; h2 = dot_general h1 b

A backward pass gathers again behind a barrier of all that it is given. The first shard of a group
comes out of its barrier; those that join it pass by theirs. What was used last in the forward pass
is used first in the backward pass: within the bytes of a group it is kept, and not gathered again.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import bind, called, inputs_of, num_products, opened, run_equations, variables
from zerojax._tree import num_bytes
from zerojax.collectives._forms import CUT, constrain
from zerojax.collectives._order import Handed, is_barrier, is_gather, path_to
from zerojax.layout import Layout

#: The name of the scope in which shards are joined and gathered.
JOINED = "gather_joined"


class _Group(NamedTuple):
    gathers: list[Any]
    invars: list[Any]  # what is there by then of what their shards are made of
    late: list[list[tuple[Any, Any]]]  # equations that make shards of that, and their results
    outvars: list[Any]
    source_info: Any


def joined(program: Any, layout: Layout, bound: int) -> Any:
    """Join the gathers of a program, in their order, up to `bound` bytes together."""
    jaxpr, _ = opened(program)
    groups = _groups(jaxpr.eqns, bound) if bound else {}
    if not groups:
        return program
    made = {var for group in groups.values() for var in group.outvars}
    places = [at for at, x in enumerate(jaxpr.eqns) if at in groups or made.isdisjoint(x.outvars)]
    eqns = [groups.get(at, jaxpr.eqns[at]) for at in places]

    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if isinstance(eqn, _Group):
            return _gathered(eqn, values, layout)
        return values if isinstance(eqn, Handed) else bind(eqn, values)

    def again(*args: Any) -> list[Any]:
        return run_equations(eqns, inputs_of(program, args), jaxpr.outvars, step)

    inputs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in jaxpr.invars]
    return jax.make_jaxpr(again)(*inputs)


def _groups(eqns: Sequence[Any], bound: int) -> dict[int, _Group | Handed]:
    """Find the gathers that may run together, by the place of the first, and those that need not.

    A gather of the same shard as one before it is that one, which runs apart, or all that is
    gathered with it would wait for the last use. What no product reads stays apart as well: XLA
    fuses its slice with elementwise operations, which the backward pass does again, and would keep
    all that was gathered with a bias for it.
    """
    places = {var: at for at, eqn in enumerate(eqns) for var in eqn.outvars}
    factors = {var for eqn in eqns if num_products(eqn) for var in variables(eqn.invars)}
    gathers = [at for at, eqn in enumerate(eqns) if _num_before(eqn)]
    paths = {at: path_to(eqns[at].invars[0], eqns, places) for at in gathers}
    paths = {at: (path, key) for at, (path, key) in paths.items() if path}
    times = Counter(key for _, key in paths.values())
    kept = _kept(eqns, paths, bound)
    held = {x.invars[0] for x in kept.values()}
    starts, sizes, groups = dict[Any, int](), Counter[int](), dict[int, _Group]()
    weights = dict[int, set[Any]]()
    for at, (path, key) in paths.items():
        (var,), (out,) = eqns[at].invars, eqns[at].outvars
        size = num_bytes(var.aval.shape, var.aval.dtype)
        if size > bound or times[key] > 1 or at in kept:
            continue
        weight, barriers = key
        kind = var.aval.dtype, out in factors, not barriers, out in held
        start = starts.get(kind, at)
        late = [x for x in path if places.get(x, -1) > start]
        if sizes[start] + size > bound or late == path or weight in weights.get(start, ()):
            start, late = at, []
        starts[kind] = start
        sizes[start] += size
        weights.setdefault(start, set()).add(weight)
        group = groups.setdefault(start, _Group([], [], [], [], eqns[start].source_info))
        made = [(eqns[places[x]], x) for x in late[::-1]]
        for x, found in zip((eqns[at], path[len(late)], made, out), group[:4], strict=True):
            found.append(x)
    return kept | {at: group for at, group in groups.items() if len(group.gathers) > 1}


def _kept(eqns: Sequence[Any], paths: dict[int, Any], bound: int) -> dict[int, Handed]:
    """Find the gathers that can use the result of an earlier one, by their place.

    They can where both read the very same shard, or where at most `bound` bytes of weights
    were gathered since its last use, with its own.
    """
    first, last, kept, done = dict[Any, Any](), dict[Any, int](), dict[int, Handed](), 0
    for at, (_, key) in paths.items():
        eqn, form = eqns[at], str(called(eqns[at]))
        shard, weight, (var,) = (key, form), (key[0], form), eqn.invars
        size = num_bytes(var.aval.shape, var.aval.dtype)
        is_near = weight in last and done - last[weight] <= bound
        made = first.get(shard, first[weight] if is_near else None)
        if made is None:
            first |= {weight: eqn.outvars, shard: eqn.outvars}
        else:
            kept[at] = Handed(made, eqn.outvars, eqn.source_info)
        done += 0 if is_near else size
        last[weight] = done - size
    return kept


def _num_before(eqn: Any) -> int:
    inner = called(eqn) if is_gather(eqn) and len(eqn.invars) == 1 else None
    names = [] if inner is None else [x.params.get("name") for x in opened(inner)[0].eqns]
    return names.index(CUT) + 1 if CUT in names else 0


def _gathered(group: _Group, values: list[Any], layout: Layout) -> list[Any]:
    """Join shards, gather once, cut the result apart, and run the rest of each gather."""
    axes, rows, rest = layout.axes["parameter"], [], []
    for eqn, late, value in zip(group.gathers, group.late, values, strict=True):
        x, after = _halves(eqn, functools.reduce(_made, late, value))
        rest.append((x.shape, after))
        rows.append(constrain(x.reshape(layout.num_parts(axes), -1), layout, P(axes)))
    with jax.named_scope(JOINED):
        whole = constrain(jnp.concatenate(rows, axis=1), layout, P())
    ends = [*itertools.accumulate(x.shape[1] for x in rows)]
    parts = zip(jnp.split(whole, ends[:-1], axis=1), rest, strict=True)
    return [after(part.reshape(shape)) for part, (shape, after) in parts]


def _made(x: Any, how: tuple[Any, Any]) -> Any:
    eqn, var = how
    return x if is_barrier(eqn) else run_equations([eqn], {variables(eqn.invars)[0]: x}, [var])[0]


def _halves(eqn: Any, shard: Any) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    inner, at = opened(called(eqn))[0], _num_before(eqn)
    given, (name,) = inputs_of(called(eqn), [shard]), inner.eqns[at - 1].outvars
    (x,) = run_equations(inner.eqns[:at], given, [name])
    return x, lambda x: run_equations(inner.eqns[at:], given | {name: x}, inner.outvars)[0]
