"""One copy of a weight per device, so that its gradients are added up before devices sum them.

An embedding that is the head too has two gradients, that of the lookup and that of the product, and
compilers sum each over devices. Here each use reads a copy per device, which moves nothing but the
weight's own gather, and the gradients of all copies go to one array that nothing reads:

    w:f32[512,64]    sums:f32[8,512,64], zeros, cut along dim 0    ids:i32[16,32] as [8,2,32]
    x = copies(w, sums)[ids]                                   each device its own, [8,2,32,64]

The gradient of `sums` is what each device has added up. It is summed over devices once and straight
into shards. That is done for weights that are looked up and used again, and for five others:

- a loss of gradients (forces, a penalty, an equation's residual) multiplies by a weight along each
  of its dims, and each product would be summed over devices;
- a lookup whose gradient is reduced in phases, or whose shards are summed along further axes, as
  with hybrid sharding: the partitioner may gather the activations' gradients instead, or sum whole
  tables over all devices;
- each use of a padded weight: the partitioner sums over devices at once, and compilers make no
  reduce-scatter of a sum, a pad and a cut. What a device has added up is padded first;
- products with examples in all turns of a loop, as a recurrence has them, where the partitioner
  would sum over devices in each turn. The weight is gathered before the loop;
- what is computed of a weight and of constants and is larger, as the biases `[heads, n, n]` of a
  table of relative positions are: the partitioner would sum the gradient of the larger one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from zerojax import _jaxpr
from zerojax._primitives import primitives
from zerojax.collectives import forms
from zerojax.collectives.gathers._boxed import GATHERED, Boxed, Opening, pad_rows
from zerojax.collectives.gathers._structural import dims_after, keep_boxed, waits_elementwise
from zerojax.collectives.gathers._wide import bind_wide
from zerojax.layout import as_spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copied:
    """A weight of which uses that take examples read a copy per device."""

    box: Boxed  # for any other use
    origin: Boxed  # the parameter, and all equations between it and `box` as recorded ones
    # zeros whose gradient is that of the copies: [devices along the batch axes, *parameter's shape]
    sums: jax.Array
    # the parameter's copies, if they are gathered already; like `sums`, and linked to it
    whole: jax.Array | None = None

    def gathered(self, opening: Opening) -> "Copied":
        whole = checkpoint_name(self.copies(opening), GATHERED)
        origin = dataclasses.replace(self.origin, recorded=())
        return dataclasses.replace(self, origin=origin, whole=whole)

    def _broadcast(self, box: Boxed, opening: Opening) -> jax.Array:
        whole = opening.open_box(jax.tree.map(_without_gradient, box))
        whole = jnp.broadcast_to(whole, (len(self.sums), *whole.shape))
        return checkpoint_name(_one_each(whole, box, opening), GATHERED)

    def copies(self, opening: Opening) -> jax.Array:
        """Open the box for a use: [devices along the batch axes, *shape of the box].

        A weight that was cast to fewer bits is gathered in these. Any other is gathered as the
        parameter, so that compilers gather once for uses in a row.
        """

        def each(eqn: Any, given: list[Any]) -> list[Any]:
            avals = [x.aval for x in eqn.invars]
            axes = [0 if jnp.ndim(x) > y.ndim else None for x, y in zip(given, avals, strict=True)]
            bind = functools.partial(bind_wide, layout=opening.layout)
            return jax.vmap(lambda *given: bind(eqn, given), axes)(*given)

        if self.whole is not None:
            return self.origin.replayed(self.whole, each)
        whole = self._broadcast(dataclasses.replace(self.origin, recorded=()), opening)
        own = self.origin.replayed(_with_gradient_of(whole, self.sums), each)
        is_cast = self.box.value.dtype.itemsize < whole.dtype.itemsize
        return _with_gradient_of(self._broadcast(self.box, opening), own) if is_cast else own


@jax.custom_vjp
def _without_gradient(x: jax.Array) -> jax.Array:
    """Stop the gradient of `x`, but not that of a gradient: a Hessian's product reads `x` too."""
    return x


_without_gradient.defvjp(lambda x: (x, None), lambda _, g: (None,))


@jax.custom_vjp
def _with_gradient_of(values: jax.Array, other: jax.Array) -> jax.Array:
    return values


_with_gradient_of.defvjp(
    lambda values, other: (values, jnp.zeros((), other.dtype)),
    lambda like, g: (None, g.astype(like.dtype)),
)


def copied(box: Boxed, opening: Opening) -> Copied:
    layout, dim, like = opening.layout, box.dim, box.shape_alone
    stored, source = like.value, box.source.dtype
    dtype = opening.reduce_dtype if opening.widens(stored.dtype) else stored.dtype

    @jax.custom_vjp
    def sums(value: jax.Array) -> jax.Array:
        return _one_each(jnp.zeros((layout.num_batch_parts, *value.shape), dtype), like, opening)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        cotangent = pad_rows(cotangent, None if dim is None else dim + 1, opening.padding(like))
        g = forms.PerDevice(layout).sum_copies(cotangent, like)
        if dim is not None:
            g = jax.lax.slice_in_dim(g, 0, stored.shape[dim], axis=dim)
            g = forms.constrain(g, layout, forms.shard_spec(layout, like, "gradient"))
        return (g.astype(source),)

    sums.defvjp(lambda value: (sums(value), None), backward)
    return Copied(box, box, sums(box.source))


def copied_if_tied(box: Any, program: Any, index: int, opening: Opening) -> Any:
    """Let uses of some weights of a program read copies; pass other boxes on.

    These are looked up and used again, or multiplied along several of their dims, as in a loss of
    gradients: `x @ w` and its `g @ w.T`. Until the last use each device holds the whole gradient:
    where gradients are partitioned, other weights of several products are not copied.
    """
    if not isinstance(box, Boxed) or box.value.ndim < 2:
        return box
    uses = uses_of(program, index)
    # Many rows are looked up; one would be an index.
    lookups = [x for x, _ in uses if x.primitive.name == "gather" and x.invars[1].aval.ndim > 1]
    is_tied = bool(lookups) and len(uses) > 1
    # The dims of the weight along which products sum.
    sums = [
        tuple(eqn.params["dimension_numbers"][0][place])
        for eqn, place in uses
        if eqn.primitive.name == "dot_general"
    ]
    is_tied |= len({*sums} if opening.layout.partitions("gradient") else sums) > 1
    return copied(box, opening) if is_tied else box


def uses_of(program: Any, index: int, in_loops: bool = False) -> list[tuple[Any, int]]:
    """List the equations that read an input of a program, and as which operand of theirs.

    Calls are looked into, and behind casts; with `in_loops` scans too: what one slices by itself is
    no use, and what is the same in each of its turns is used where its body reads it.
    """
    jaxpr, _ = _jaxpr.opened(program)
    found, todo = [], _places(jaxpr, jaxpr.invars[index])
    for eqn, place in todo:
        name = eqn.primitive.name
        if name == "convert_element_type":
            todo += _places(jaxpr, eqn.outvars[0])
        elif name in _jaxpr.PLAIN_CALLS | {_jaxpr.REMATERIALISED}:
            found += uses_of(_jaxpr.called(eqn), place, in_loops)
        elif name == "scan" and in_loops:
            num_consts, num_carry = _jaxpr.scan_parts(eqn.params)
            if place < num_consts:
                found += uses_of(eqn.params["jaxpr"], place, in_loops)
            elif place < num_consts + num_carry:
                found.append((eqn, place))
        else:
            found.append((eqn, place))
    return found


def _places(jaxpr: Any, var: Any) -> list[tuple[Any, int]]:
    return [(eqn, i) for eqn in jaxpr.eqns for i, atom in enumerate(eqn.invars) if atom is var]


def is_used_in_turns(program: Any, index: int) -> bool:
    """Return whether the body of a scan reads an input that is the same in each of its turns."""
    outside = {id(eqn) for eqn, _ in uses_of(program, index)}
    return any(id(eqn) not in outside for eqn, _ in uses_of(program, index, in_loops=True))


def meets_examples(program: Any, index: int, parts: int, from_batch: set[Any]) -> bool:
    """Return whether a program uses an input only where use_copies can, in calls too."""
    jaxpr, _ = _jaxpr.opened(program)

    def only(var: Any) -> bool:
        places = _places(jaxpr, var)
        return bool(places) and var not in jaxpr.outvars and all(fits(*place) for place in places)

    def fits(eqn: Any, place: int) -> bool:
        name = eqn.primitive.name
        is_fixed = from_batch.isdisjoint(_jaxpr.variables(eqn.invars))
        others = [*eqn.invars[:place], *eqn.invars[place + 1 :]]
        is_alone = not any(x.aval.ndim for x in others) and _jaxpr.is_elementwise(eqn)
        if is_fixed and (is_alone or name in primitives("enlarge", "moved")):  # exp(w), or 2 * w
            return only(eqn.outvars[0])
        if name in _jaxpr.PLAIN_CALLS | {_jaxpr.REMATERIALISED}:
            return meets_examples(_jaxpr.called(eqn), place, parts, from_batch)
        dims = _example_dims(eqn, place)
        return dims is not None and eqn.invars[1 - place].aval.shape[dims[0]] % parts == 0

    return only(jaxpr.invars[index])


def is_enlarged(eqn: Any, values: list[Any], opening: Opening) -> bool:
    """Return whether a lookup or product of a box with constants is larger than the box."""
    boxes = [v for v in values if isinstance(v, Boxed)]
    if eqn.primitive.name not in primitives("enlarge") or len(boxes) != 1:
        return False
    (box,) = boxes
    # But layers of a stack that are taken several times each stay shards.
    is_larger = eqn.outvars[0].aval.size > box.value.size and dims_after(eqn, box, opening) is None
    is_alone = not any(isinstance(v, Copied) for v in values) and waits_elementwise(box)
    return is_larger and is_alone and box.value.ndim > 1 and opening.layout.num_batch_parts > 1


def use_own_copies(eqn: Any, values: list[Any], opening: Opening) -> list[Any] | None:
    """Run an equation on copies that it alone reads; None where it needs none, or can't.

    A lookup whose gradient is reduced in phases needs them, any use of a weight whose minor dim is
    cut, which the partitioner would gather between phases, and of one that is padded, or whose
    gradient is. Where the user cuts the padded dim too, padding would move rows between devices.

        [1009, 64] over 8 along dim 0      padded: copies' gradients are made [8, 1016, 64] first
        [1024, 64] over a torus, x then y  of a lookup in phases: copies; of a product: none
        [64, 1024] the same, along dim 1   the minor dim in phases: copies for a product too
    """
    box = next(v for v in values if isinstance(v, Boxed))
    if box.dim is None or not waits_elementwise(box):
        return None
    layout, shape, own = opening.layout, box.value.shape, box.entries[box.dim]
    is_padded = not own and opening.padding(box) > 0
    phases = layout.phases_of(shape, box.dim, reduces=True)
    is_phased = len(phases.axes) > 1 and not forms.scatters_at_once(shape, box.dim, layout)
    is_gathered = phases.dims and box.dim == len(shape) - 1 > 0
    if not {*layout.batch_axes} <= {*layout.axes["gradient"]}:  # with hybrid sharding
        # Of fewer elements XLA gathers what lookups give back, which moves less.
        parts = layout.num_parts(layout.axes["gradient"])
        is_phased |= eqn.outvars[0].aval.size * parts > box.value.size * (parts - 1)
    is_phased &= bool(is_gathered) or eqn.primitive.name == "gather"
    is_phased |= forms.scattered_shape(shape, box.dim, layout) != shape
    if not is_padded and not (is_phased and forms.PerDevice(layout).dim_of(box) is not None):
        return None
    opening = opening.widened(box)
    return use_copies(eqn, [copied(v, opening) if v is box else v for v in values], opening)


def use_copies(
    eqn: Any,
    values: list[Any],
    opening: Opening,
    is_fixed: bool = False,
    again: Callable[..., Any] = lambda use: use,
) -> list[Any] | None:
    """Run an equation on each device's copy of a weight; None where it is not one of examples."""
    place = next(i for i, v in enumerate(values) if isinstance(v, Copied))
    weight, others = values[place], [*values[:place], *values[place + 1 :]]
    if any(isinstance(v, Boxed | Copied) for v in others):
        return None
    operands = [*others[:place], None, *others[place:]]
    is_cheap = eqn.primitive.name in primitives("enlarge") or _jaxpr.is_elementwise(eqn)
    if is_fixed and is_cheap and any(map(jnp.ndim, others)):  # relative positions, a mask
        box, origin = (x.record(eqn, operands) for x in (weight.box, weight.origin))
        return [dataclasses.replace(weight, box=box, origin=origin)]
    if not any(map(jnp.ndim, others)):  # a transpose, a cast
        kept = keep_boxed(eqn, [v.box if v is weight else v for v in values], opening)
        if kept is None or len(kept) != 1 or not isinstance(kept[0], Boxed):
            return None
        origin = weight.origin.record(eqn, operands)
        return [dataclasses.replace(weight, box=kept[0], origin=origin)]
    dims = _example_dims(eqn, place)
    parts = opening.layout.num_batch_parts
    if dims is None or others[0].shape[dims[0]] % parts:
        return None
    at, dim = dims

    def on_copy(copy: jax.Array, examples: jax.Array) -> jax.Array:
        return bind_wide(eqn, [examples, copy] if place else [copy, examples], opening.layout)[0]

    def use(weight: Copied, examples: jax.Array) -> jax.Array:
        result = eqn.outvars[0].aval
        shape = examples.shape
        examples = examples.reshape(*shape[:at], parts, shape[at] // parts, *shape[at + 1 :])
        mapped = jax.vmap(on_copy, in_axes=(0, at), out_axes=dim)
        out = mapped(weight.copies(opening), _per_device(examples, opening, at))
        return out.reshape(result.shape).astype(result.dtype)

    return [_per_device(again(use)(weight, others[0]), opening, dim)]


def _example_dims(eqn: Any, place: int) -> tuple[int, int] | None:
    """Return the dim of examples in the other operand and in the result of a lookup or product."""
    if len(eqn.invars) != 2 or eqn.invars[1 - place].aval.ndim < 2:
        return None
    weight, other = eqn.invars[place].aval, eqn.invars[1 - place].aval
    numbers = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "gather":
        takes = place == 0 and 0 not in numbers.offset_dims and not numbers.operand_batching_dims
        return (0, 0) if takes else None
    if eqn.primitive.name == "dot_general":
        shared = [(*summed, *batch) for summed, batch in zip(*numbers, strict=True)]
        free = [dim for dim in range(other.ndim) if dim not in shared[1 - place]]
        before = len(numbers[1][0]) + (0 if place else weight.ndim - len(shared[0]))
        return (free[0], before) if free else None
    if _jaxpr.is_elementwise(eqn) and weight.ndim == other.ndim:
        # [1, heads, n, n] on [examples, heads, n, n]
        longer = [dim for dim, size in enumerate(weight.shape) if size < other.shape[dim]]
        return (longer[0], longer[0]) if longer else None
    return None


def _one_each(copies: jax.Array, box: Boxed, opening: Opening) -> jax.Array:
    layout = opening.layout
    return forms.constrain(copies, layout, P(layout.batch_axes, *as_spec(box.entries)))


def _per_device(x: jax.Array, opening: Opening, dim: int = 0) -> jax.Array:
    """Cut a dim over devices; the others are as the partitioner has them."""
    spec: list[Any] = [P.UNCONSTRAINED] * x.ndim
    spec[dim] = opening.layout.batch_axes
    return forms.constrain(x, opening.layout, P(*spec))
