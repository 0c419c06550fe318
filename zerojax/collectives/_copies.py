"""One copy of a weight per device, so that its gradients are added up before devices sum them.

An embedding that is the head too has two gradients, that of the lookup and that of the product, and
compilers sum each over devices. Here each use reads a copy per device, which moves nothing but the
weight's own gather, and the gradients of all copies go to one array that nothing reads:

    w:f32[512,64]    sums:f32[8,512,64], zeros, cut along dim 0    ids:i32[16,32] as [8,2,32]
    x = copies(w, sums)[ids]                                   each device its own, [8,2,32,64]

The gradient of `sums` is what each device has added up. It is summed over devices once and straight
into shards. That is done for weights that are looked up and used again, and for a lookup whose
gradient is reduced in phases: the partitioner may gather the activations' gradients instead, or sum
whole tables over all devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import PLAIN_CALLS, REMATERIALISED, called, opened, scan_parts
from zerojax.collectives._boxed import GATHERED, Boxed, Opening
from zerojax.collectives._forms import constrain
from zerojax.collectives._gather import PerDevice, scatter, shard_spec
from zerojax.collectives._structural import keep_boxed
from zerojax.collectives._wide import bind_wide
from zerojax.layout import Layout, as_spec


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["box", "origin", "sums"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Copied:
    """A weight of which uses that take examples read a copy per device.

    Attributes:
        box: for any other use.
        origin: the parameter, and all equations between it and `box` as recorded ones.
        sums: zeros whose gradient is that of the copies: [devices along the batch axes, *shape of
            the parameter].
    """

    box: Boxed
    origin: Boxed
    sums: jax.Array

    def copies(self, opening: Opening) -> jax.Array:
        """Open the box for a use: [devices along the batch axes, *shape of the box].

        What was cast to fewer bits moves in them; all else as the parameter, so that compilers
        gather once for uses that follow on each other.
        """

        def broadcast(box: Boxed) -> jax.Array:
            whole = opening.open_box(jax.lax.stop_gradient(box))
            whole = jnp.broadcast_to(whole, (len(self.sums), *whole.shape))
            return checkpoint_name(_per_device(whole, opening, as_spec(box.entries)), GATHERED)

        def each(eqn: Any, operands: list[Any]) -> list[Any]:
            axes = [0 if jnp.ndim(x) else None for x in operands]
            return jax.vmap(lambda *operands: bind_wide(eqn, operands), axes)(*operands)

        parameter = dataclasses.replace(self.origin, recorded=())
        own = self.origin.replayed(_with_gradient_of(broadcast(parameter), self.sums), each)
        is_cast = self.box.value.dtype.itemsize < parameter.value.dtype.itemsize
        return _with_gradient_of(broadcast(self.box), own) if is_cast else own


@jax.custom_vjp
def _with_gradient_of(values: jax.Array, other: jax.Array) -> jax.Array:
    """Return values whose gradient goes to another array of their shape."""
    return values


_with_gradient_of.defvjp(
    lambda values, other: (values, jnp.zeros((), other.dtype)),
    lambda like, g: (None, g.astype(like.dtype)),
)


def copied(box: Boxed, opening: Opening) -> Copied:
    """Let uses of a fresh box read copies."""
    layout, dim, stored = opening.layout, box.dim, box.value
    devices, batch = PerDevice(layout), P(PerDevice(layout).axes)
    dtype = opening.reduce_dtype if opening.widens(stored.dtype) else stored.dtype

    @jax.custom_vjp
    def sums(value: jax.Array) -> jax.Array:
        zeros = jnp.zeros((layout.num_batch_parts, *value.shape), dtype)
        return _per_device(zeros, opening, as_spec(box.entries))

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        if dim is None or not devices.scatters(dim, box.entries):
            zero = jnp.zeros((), cotangent.dtype)  # jnp.sum would add in fp32, and move that
            total = jax.lax.reduce(cotangent, zero, jax.lax.add, (0,))
            return (scatter(total, layout, box.entries, dim).astype(stored.dtype),)
        sum_over = functools.partial(devices.sum_over, dim=dim)
        padding = -stored.shape[dim] % layout.num_shards
        widths = [(0, padding if d == dim else 0) for d in range(stored.ndim)]

        def local(own: jax.Array) -> jax.Array:
            return sum_over(jnp.pad(own[0], widths))

        g = devices.run(local, (batch,), devices.spec(dim), cotangent)
        g = jax.lax.slice_in_dim(g, 0, stored.shape[dim], axis=dim)
        spec = shard_spec(layout, box.entries, dim, "gradient")
        return (constrain(g, layout, spec).astype(stored.dtype),)

    sums.defvjp(lambda value: (sums(value), None), backward)
    return Copied(box, box, sums(stored))


def copied_if_tied(box: Any, uses: list[Any], opening: Opening) -> Any:
    """Let uses of a weight that is looked up and used again read copies; pass other boxes on.

    Other weights of several uses are not copied: until the last of them, each device would hold the
    whole gradient, of a stack that is indexed in a loop for instance.
    """
    is_plain = isinstance(box, Boxed) and box.value.ndim > 1
    is_tied = len(uses) > 1 and any(map(_is_lookup, uses))
    return copied(box, opening) if is_plain and is_tied else box


def uses_of(program: Any, index: int, in_loops: bool = False) -> list[Any]:
    """List the equations that read an input of a program, in calls too.

    With `in_loops` a scan is looked into, too: what it slices by itself is no use, and what is the
    same in each of its turns is used where its body reads it.
    """
    jaxpr, _ = opened(program)
    var = jaxpr.invars[index]
    places = [(eqn, i) for eqn in jaxpr.eqns for i, atom in enumerate(eqn.invars) if atom is var]
    found = []
    for eqn, place in places:
        if eqn.primitive.name in PLAIN_CALLS | {REMATERIALISED}:
            found += uses_of(called(eqn), place, in_loops)
        elif eqn.primitive.name == "scan" and in_loops:
            num_consts, num_carry = scan_parts(eqn.params)
            if place < num_consts:
                found += uses_of(eqn.params["jaxpr"], place, in_loops)
            elif place < num_consts + num_carry:
                found.append(eqn)
        else:
            found.append(eqn)
    return found


def _is_lookup(eqn: Any) -> bool:
    """Whether an equation looks up rows of its first operand: many, or it would be an index."""
    return eqn.primitive.name == "gather" and eqn.invars[1].aval.ndim > 1


def is_phased_lookup(eqn: Any, values: list[Any], layout: Layout) -> bool:
    """Whether an equation looks rows of a box up whose gradient is reduced in several phases."""
    table = values[0]
    return (
        eqn.primitive.name == "gather"
        and isinstance(table, Boxed)
        and table.dim is not None
        and not table.recorded
        and layout.phases.reduces(table.value.shape, table.dim)
        and PerDevice(layout).scatters(table.dim, table.entries)
    )


def use_copies(
    eqn: Any, values: list[Any], opening: Opening, again: Callable[..., Any] = lambda use: use
) -> list[Any] | None:
    """Run an equation on each device's copy of a weight; None where it is not one of examples.

    Args:
        eqn: the equation.
        values: its inputs; at least one is `Copied`.
        opening: how boxes are opened.
        again: makes a use gather again for its backward pass.
    """
    place = next(i for i, v in enumerate(values) if isinstance(v, Copied))
    weight, others = values[place], [*values[:place], *values[place + 1 :]]
    if any(isinstance(v, Boxed | Copied) for v in others):
        return None
    if not any(map(jnp.ndim, others)):  # a transpose, a cast
        kept = keep_boxed(eqn, [v.box if v is weight else v for v in values], opening)
        if kept is None or len(kept) != 1 or not isinstance(kept[0], Boxed):
            return None
        operands = [*others[:place], None, *others[place:]]
        return [Copied(kept[0], weight.origin.record(eqn, operands), weight.sums)]
    if not _takes_examples(eqn, place):
        return None
    rows, parts = others[0].shape[0], opening.layout.num_batch_parts
    if rows % parts:
        return None

    def on_copy(copy: jax.Array, examples: jax.Array) -> jax.Array:
        return bind_wide(eqn, [examples, copy] if place else [copy, examples])[0]

    def use(weight: Copied, examples: jax.Array) -> jax.Array:
        examples = examples.reshape(parts, rows // parts, *examples.shape[1:])
        out = jax.vmap(on_copy)(weight.copies(opening), _per_device(examples, opening))
        return out.reshape(rows, *out.shape[2:]).astype(eqn.outvars[0].aval.dtype)

    return [_per_device(again(use)(weight, others[0]), opening)]


def _takes_examples(eqn: Any, place: int) -> bool:
    """Whether an equation looks up rows or multiplies them, and keeps their dim 0 in front."""
    if len(eqn.invars) != 2 or eqn.invars[1 - place].aval.ndim < 2:
        return False
    if eqn.primitive.name == "gather":
        numbers = eqn.params["dimension_numbers"]
        return place == 0 and 0 not in numbers.offset_dims and not numbers.operand_batching_dims
    if eqn.primitive.name == "dot_general":
        (summed, _), (batch, _) = eqn.params["dimension_numbers"]
        return place == 1 and 0 not in summed and not batch
    return False


def _per_device(x: jax.Array, opening: Opening, rest: Iterable[Any] | None = None) -> jax.Array:
    """Cut dim 0 over devices; the other dims as `rest` says, else as the partitioner has them."""
    rest = [P.UNCONSTRAINED] * (x.ndim - 1) if rest is None else rest
    return constrain(x, opening.layout, P(opening.layout.batch_axes, *rest))
