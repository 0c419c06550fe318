"""Joined gathers: neighbouring weights move in one message, where messages are what takes time.

Between processes on CPUs each gather is a message of gloo's, whose time hardly depends on its size.
A pass over a program that is differentiated already, whose calls are in place. Of

    a = GATHER w0; h1 = dot_general h0 a
    b = GATHER w1; h2 = dot_general h1 b

what each device holds of both is laid in one row, gathered, and cut apart again:

    r = GATHER (concatenate w0 w1); a = slice r; b = slice r
    h1 = dot_general h0 a; h2 = dot_general h1 b

A backward pass gathers again behind a barrier of all that it is given. The first shard of a group
comes out of its barrier; the others skip their own. What was used last in the forward pass
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

from zerojax._jaxpr import called, inputs_of, num_products, opened, run_equations, variables
from zerojax._tree import as_shapes, num_bytes
from zerojax.collectives.forms import CUT, constrain
from zerojax.collectives.passes._equations import Equations, Planted, is_barrier, is_gather
from zerojax.layout import Layout

#: The name of the scope in which shards are joined and gathered.
JOINED = "gather_joined"


class _Member(NamedTuple):
    eqn: Any
    start: Any  # what is there by then of what its shard is made of
    late: list[tuple[Any, Any]]  # the equations that make the shard of that, and their results
    weight: Any  # the parameter, and what is done to it
    size: int  # bytes


def joined(program: Any, layout: Layout, bound: int) -> Any:
    """Join the gathers of a program, in their order, up to `bound` bytes together."""
    flat = Equations(program)
    planted = _planted(flat, layout, bound) if bound else {}
    if not planted:
        return program
    made = {var for one in planted.values() for var in one.outvars}
    eqns = [
        planted.get(at, eqn)
        for at, eqn in enumerate(flat.eqns)
        if at in planted or made.isdisjoint(eqn.outvars)
    ]
    inputs = as_shapes([var.aval for var in flat.jaxpr.invars])
    return jax.make_jaxpr(lambda *args: flat.run(args, eqns))(*inputs)


def _planted(flat: Equations, layout: Layout, bound: int) -> dict[int, Planted]:
    """Find the gathers that may run together, by the place of the first, and those that need not.

    A shard that was gathered before is not gathered again; its one gather runs apart, or all that
    is gathered with it would stay in memory until the last use. What no product reads stays apart
    as well: XLA fuses its slice with elementwise operations, which the backward pass does again,
    and would keep all that was gathered with a bias for it.
    """
    eqns, places = flat.eqns, flat.places
    factors = {var for eqn in eqns if num_products(eqn) for var in variables(eqn.invars)}
    gathers = [at for at, eqn in enumerate(eqns) if _num_before(eqn)]
    paths = {at: flat.path_to(eqns[at].invars[0]) for at in gathers}
    paths = {at: (path, key) for at, (path, key) in paths.items() if path}
    times = Counter(key for _, key in paths.values())
    kept = _kept(eqns, paths, bound)
    held = {x.invars[0] for x in kept.values()}
    latest, groups = dict[Any, int](), dict[int, list[_Member]]()
    for at, (path, key) in paths.items():
        (var,), (out,) = eqns[at].invars, eqns[at].outvars
        size = num_bytes(var.aval.shape, var.aval.dtype)
        if size > bound or times[key] > 1 or at in kept:
            continue
        weight, barriers = key
        kind = var.aval.dtype, out in factors, not barriers, out in held
        start = latest.get(kind, at)
        group = groups.get(start, [])
        late = [x for x in path if places.get(x, -1) > start]
        is_held = any(member.weight == weight for member in group)
        if sum(member.size for member in group) + size > bound or late == path or is_held:
            start, late = at, []
        latest[kind] = start
        made = [(eqns[places[x]], x) for x in late[::-1]]
        member = _Member(eqns[at], path[len(late)], made, weight, size)
        groups.setdefault(start, []).append(member)
    for at, group in groups.items():
        if len(group) > 1:
            outvars = [member.eqn.outvars[0] for member in group]
            run = functools.partial(_gathered, group, layout)
            kept[at] = Planted(run, [x.start for x in group], outvars, eqns[at].source_info)
    return kept


def _kept(eqns: Sequence[Any], paths: dict[int, Any], bound: int) -> dict[int, Planted]:
    """Find the gathers that can use the result of an earlier one, by their place."""
    first, last, kept, done = dict[Any, Any](), dict[Any, int](), dict[int, Planted](), 0
    for at, (_, key) in paths.items():
        eqn, form = eqns[at], str(called(eqns[at]))
        shard, weight, (var,) = (key, form), (key[0], form), eqn.invars
        size = num_bytes(var.aval.shape, var.aval.dtype)
        is_near = weight in last and done - last[weight] <= bound
        made = first.get(shard, first[weight] if is_near else None)
        if made is None:
            first |= {weight: eqn.outvars, shard: eqn.outvars}
        else:
            kept[at] = Planted(list, made, eqn.outvars, eqn.source_info)
        done += 0 if is_near else size
        last[weight] = done - size
    return kept


def _num_before(eqn: Any) -> int:
    inner = called(eqn) if is_gather(eqn) and len(eqn.invars) == 1 else None
    names = [] if inner is None else [x.params.get("name") for x in opened(inner)[0].eqns]
    return names.index(CUT) + 1 if CUT in names else 0


def _gathered(group: Sequence[_Member], layout: Layout, values: list[Any]) -> list[Any]:
    axes, rows, rest = layout.axes["parameter"], [], []
    for member, value in zip(group, values, strict=True):
        x, after = _halves(member.eqn, functools.reduce(_made, member.late, value))
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
