"""One copy of a weight per device, so that its gradients are added up before devices sum them.

An embedding that is the head too has two gradients, that of the lookup and that of the product, and
compilers sum each over devices. Here the weight is broadcast to a copy per device, which moves
nothing, and both uses read the device's own:

    w:f32[512,64]    copies:f32[8,512,64], cut along dim 0    ids:i32[16,32] as [8,2,32]
    x = copies[ids]                                           each device its own, [8,2,32,64]

The transpose of the broadcast sums over devices, once and straight into shards. Below stage 3 that
is done for weights that are looked up and used again; at stage 3 each use gathers and reduces for
itself. A lookup whose gradient is reduced in phases reads copies at any stage: the partitioner may
gather the activations' gradients instead, or sum whole tables over all devices.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax._jaxpr import PLAIN_CALLS, REMATERIALISED, called, opened
from zerojax.collectives._boxed import GATHERED, Boxed, Opening
from zerojax.collectives._forms import constrain
from zerojax.collectives._gather import PerDevice, scatter, shard_spec
from zerojax.collectives._structural import keep_boxed
from zerojax.collectives._wide import bind_wide
from zerojax.layout import Layout


@functools.partial(jax.tree_util.register_dataclass, data_fields=["box", "copies"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Copied:
    """A box, and what it holds as one copy per device for the uses that take examples.

    Attributes:
        box: for any other use.
        copies: [devices along the batch axes, *shape of the box].
    """

    box: Boxed
    copies: jax.Array


def copied(box: Boxed, opening: Opening) -> Copied:
    """Open a fresh box into copies."""
    layout, dim, stored = opening.layout, box.dim, box.value
    devices = PerDevice(layout)
    batch = P(devices.axes)

    @jax.custom_vjp
    def copies(value: jax.Array) -> jax.Array:
        whole = opening.open_box(dataclasses.replace(box, value=value))
        whole = jnp.broadcast_to(whole, (layout.num_batch_parts, *whole.shape))
        return checkpoint_name(_per_device(whole, opening), GATHERED)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        if dim is None or not devices.scatters(dim, box.entries):
            zero = jnp.zeros((), cotangent.dtype)  # jnp.sum would add in fp32, and move that
            total = jax.lax.reduce(cotangent, zero, jax.lax.add, (0,))
            return (scatter(total, layout, box.entries, dim).astype(stored.dtype),)
        padding = -stored.shape[dim] % layout.num_shards
        widths = [(0, padding if d == dim else 0) for d in range(stored.ndim)]

        sum_over = functools.partial(devices.sum_over, dim=dim)

        def local(own: jax.Array) -> jax.Array:
            return sum_over(jnp.pad(own[0], widths))

        g = devices.run(local, (batch,), devices.spec(dim), cotangent)
        g = jax.lax.slice_in_dim(g, 0, stored.shape[dim], axis=dim)
        return (constrain(g, layout, shard_spec(layout, box.entries, dim)).astype(stored.dtype),)

    copies.defvjp(lambda value: (copies(value), None), backward)
    return Copied(box, copies(stored))


def copied_if_tied(box: Any, uses: list[Any], opening: Opening) -> Any:
    """Open a box that is looked up and used again, where uses need not gather; pass others on.

    Other weights of several uses are not copied: until the last of them, each device would hold the
    whole gradient, of a stack that is indexed in a loop for instance.
    """
    is_plain = isinstance(box, Boxed) and box.value.ndim > 1 and not any(box.entries)
    is_tied = len(uses) > 1 and any(map(_is_lookup, uses))
    return copied(box, opening) if is_plain and is_tied and not opening.gathers else box


def uses_of(program: Any, index: int) -> list[Any]:
    """List the equations that read an input of a program, in calls too."""
    jaxpr, _ = opened(program)
    var, enters = jaxpr.invars[index], PLAIN_CALLS | {REMATERIALISED}
    uses = [(eqn, i) for eqn in jaxpr.eqns for i, atom in enumerate(eqn.invars) if atom is var]
    inner = [uses_of(called(e), i) if e.primitive.name in enters else [e] for e, i in uses]
    return [eqn for found in inner for eqn in found]


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


def use_copies(eqn: Any, values: list[Any], opening: Opening) -> list[Any] | None:
    """Run an equation on each device's copy of a weight; None where it is not one of examples.

    Args:
        eqn: the equation.
        values: its inputs; at least one is `Copied`.
        opening: how boxes are opened.
    """
    place = next(i for i, v in enumerate(values) if isinstance(v, Copied))
    weight, others = values[place], [*values[:place], *values[place + 1 :]]
    if any(isinstance(v, Boxed | Copied) for v in others):
        return None

    def on_copy(copy: jax.Array, *others: Any) -> jax.Array:
        return bind_wide(eqn, [*others[:place], copy, *others[place:]])[0]

    if not any(map(jnp.ndim, others)):  # a transpose, a cast
        kept = keep_boxed(eqn, [v.box if v is weight else v for v in values], opening)
        if kept is None or len(kept) != 1 or not isinstance(kept[0], Boxed):
            return None
        return [Copied(kept[0], jax.vmap(lambda copy: on_copy(copy, *others))(weight.copies))]
    if not _takes_examples(eqn, place):
        return None
    rows, parts = others[0].shape[0], opening.layout.num_batch_parts
    if rows % parts:
        return None
    examples = others[0].reshape(parts, rows // parts, *others[0].shape[1:])
    out = jax.vmap(on_copy)(weight.copies, _per_device(examples, opening))
    out = out.reshape(rows, *out.shape[2:]).astype(eqn.outvars[0].aval.dtype)
    return [_per_device(out, opening)]


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


def _per_device(x: jax.Array, opening: Opening) -> jax.Array:
    return constrain(x, opening.layout, P(opening.layout.batch_axes))
