"""Operations that a boxed parameter goes through without the other devices' part.

A box's value is a whole array in global view that happens to be cut, so every operation on it is
right whatever it is; the rules here say which of them need no other device's part.

| equation                                        | where                                     |
| ----------------------------------------------- | ----------------------------------------- |
| elementwise, all operands alike or scalars      | on shards; recorded where it widens       |
| moves elements, and keeps the cut dims          | on shards                                 |
| reduces, or makes a scalar of boxes             | on shards; what it sums over devices is   |
|                                                 | small, and no box any more                |
| cheap, of boxes and scalars                     | recorded                                  |
| any other                                       | opens                                     |
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import bind, called, is_elementwise, opened, with_inner
from zerojax._primitives import primitives
from zerojax.collectives.gathers._boxed import Boxed, Opening

_MOVES, _REARRANGES = primitives("moves"), primitives("rearranges")
#: Old dim of each dim of a result, None for a new one.
_Dims = tuple[int | None, ...]


def keep_boxed(eqn: Any, values: list[Any], opening: Opening) -> list[Any] | None:
    """Carry boxes through one equation, or return None where they have to be opened.

    Of `b = transpose a; c = mul b 0.5; d = add c x`, a and b and c stay on shards; d, where x is an
    array, is a real use. At least one of the inputs is `Boxed`.
    """
    if eqn.primitive.name in _MOVES:
        values = [rules_settled(v, opening) for v in values]
    if eqn.primitive.name == "optimization_barrier":
        return list(jax.lax.optimization_barrier(values))
    if not eqn.outvars:  # jax.debug.print
        return None
    boxes = sorted((v for v in values if isinstance(v, Boxed)), key=lambda box: -box.value.size)
    if len(boxes) > 1:
        # Scalars are opened, so that what they scale stays boxed; and so are vectors below stage 3,
        # or that are cut along another dim. Otherwise `g * v / norm(v)` would open `v` with `g`,
        # and read the whole gradient of `v` for that of `g`.
        small, largest = 1, boxes[0]
        apart = not opening.gathers or not all(_lies_as(largest, box) for box in boxes)
        if _is_alike(eqn) and apart and not opening.widens(largest.dtype):
            small = max(largest.value.size // opening.layout.num_shards, 1)
        opens = (isinstance(v, Boxed) and v.value.size <= small for v in values)
        values = [opening.opened(v) if x else v for v, x in zip(values, opens, strict=True)]
        boxes = [box for box in boxes if box.value.size > small]
    if not boxes:
        return bind(eqn, values)
    kept = _on_shards(eqn, values, boxes, opening)
    return _recorded(eqn, values, boxes) if kept is None else kept


def waits_elementwise(boxed: Boxed) -> bool:
    """Whether all that was recorded is elementwise, so that it can run on shards and on slices."""
    if not all(is_elementwise(waiting.eqn) for waiting in boxed.recorded):
        return False
    others = (x for waiting in boxed.recorded for x in waiting.operands if x is not None)
    return not any(isinstance(x, Boxed) or jnp.ndim(x) for x in others)


def rules_settled(value: Any, opening: Opening) -> Any:
    """Run on the shards of a box a rule of `jax.custom_jvp` that waits: it counts on the shape.

    `jax.nn.relu` is one. What it makes of a weight that was widened is gathered wide.
    """
    if not isinstance(value, Boxed) or not waits_elementwise(value):
        return value
    waiting = (x for one in value.recorded for x in with_inner(one.eqn))
    if all(x.primitive.name != "custom_jvp_call" for x in waiting):
        return value
    (done,) = opening.settled([value])
    return opening.placed(dataclasses.replace(value, value=done, recorded=(), wide=None))


def is_slice(eqn: Any) -> bool:
    """Whether an equation takes slices of its first operand; a lookup of examples takes rows.

    `w[jnp.stack([i, i + 1])]` takes two of `[24, 1024, 4096]`, which leaves two dims of each.
    """
    if eqn.primitive.name != "gather":
        return eqn.primitive.name in ("slice", "dynamic_slice")
    numbers, (table, indices) = eqn.params["dimension_numbers"], (x.aval for x in eqn.invars)
    is_part = len(numbers.offset_dims) > 1 and eqn.outvars[0].aval.size <= table.size
    return not numbers.operand_batching_dims and (is_part or indices.ndim == 1)


def _on_shards(
    eqn: Any, values: list[Any], boxes: list[Boxed], opening: Opening
) -> list[Any] | None:
    first = boxes[0]
    others = [v for v in values if not isinstance(v, Boxed)]
    if not all(_lies_as(first, b) for b in boxes):
        return None
    result = eqn.outvars[0].aval
    if _is_alike(eqn) and first.value.shape == result.shape:
        widens = result.dtype.itemsize > first.value.dtype.itemsize
        is_alone = len(boxes) == 1 and not any(map(jnp.ndim, others))
        if is_alone and (widens or first.recorded):
            return None
        operands, like = opening.settled(values), dataclasses.replace(first, recorded=(), wide=None)
        run, is_rule = functools.partial(bind, eqn), eqn.primitive.name == "custom_vjp_call"
        # tanh keeps its result: that would lie cut. A CPU would gather those of penalties instead.
        again = is_alone and not opening.gathers and opening.layout.platform != "cpu"
        if not (is_alone or is_rule):  # a rule counts on shapes
            operands = [opening.uncut(x, like) for x in operands]
        (out,) = (jax.checkpoint(run, prevent_cse=False) if again and not is_rule else run)(
            operands
        )
        out = opening.uncut(out, like) if again or not is_alone else out
        return [opening.placed(dataclasses.replace(like, value=out))]
    if not others and all(var.aval.shape == () for var in eqn.outvars):
        return bind(eqn, opening.settled(values))
    dims = dims_after(eqn, first, opening)
    if dims is None:
        return None
    if eqn.primitive.name not in _MOVES:
        outs, recorded = bind(eqn, opening.settled(values)), ()
    else:
        outs, recorded = bind(eqn, [first.value, *others]), first.recorded
    if not first.held <= set(dims):
        return outs
    first = dataclasses.replace(first, recorded=recorded)
    boxes = [first.moved(out, dims) for out in outs]
    if first.wide is not None and eqn.primitive.name in _REARRANGES:
        boxes = [dataclasses.replace(boxes[0], wide=bind(eqn, [first.wide, *others])[0])]
    return [*map(opening.placed, boxes)]


def _is_alike(eqn: Any) -> bool:
    """Whether an equation is elementwise; of a rule of the user's own for gradients, its forward.

    As in quantisation with a learned step: what its backward rule sums is small on shards.
    """
    if eqn.primitive.name != "custom_vjp_call" or len(eqn.outvars) > 1:
        return is_elementwise(eqn)
    return all(map(_is_alike, opened(called(eqn))[0].eqns))


def _lies_as(one: Boxed, other: Boxed) -> bool:
    """Whether two boxes are cut alike, and what was recorded for the second can run on shards.

    `[128, 1]` lies as `[128, 64]` where both are cut along dim 0: a norm of each row, for instance.
    """
    alike = (one.entries, one.dim) == (other.entries, other.dim)
    if not alike or one.value.ndim != other.value.ndim or not waits_elementwise(other):
        return False
    sizes = enumerate(zip(one.value.shape, other.value.shape, strict=True))
    return all(a == b or (b == 1 and d not in one.held) for d, (a, b) in sizes)


def _recorded(eqn: Any, values: list[Any], boxes: list[Boxed]) -> list[Any] | None:
    """Let an equation wait until its boxes are opened, if it is cheap and needs nothing larger.

    A mask or a constant of the weight's shape may wait with it: of `select_n mask w zeros`, `zeros`
    is no box. Activations that a weight is broadcast to may not.
    """
    has_arrays = any(jnp.ndim(v) for v in values if not isinstance(v, Boxed))
    if len(eqn.outvars) > 1:
        return None
    if is_elementwise(eqn):
        pairs = zip(eqn.invars, values, strict=True)
        whole = {x.aval.shape for x, v in pairs if isinstance(v, Boxed)}
        if has_arrays and eqn.outvars[0].aval.shape not in whole:
            return None
    elif has_arrays or eqn.primitive.name not in primitives("moves", "joins"):
        return None
    return [boxes[0].record(eqn, [None if v is boxes[0] else v for v in values])]


def dims_after(eqn: Any, boxed: Boxed, opening: Opening) -> _Dims | None:
    """Return the old dim that each dim of the result is; None where a cut dim is cut up.

    Of `[4, 8, 8]` with dim 1 partitioned, transposed by (0, 2, 1): (0, 2, 1). Reshaped to
    `[4, 8, 2, 4]`: (None, 1, None, None). Summed over dim 1: (0, 2).
    """
    name, params = eqn.primitive.name, eqn.params
    old, new = boxed.value.shape, eqn.outvars[0].aval.shape
    same, held = tuple(range(len(old))), boxed.held
    # Layers of a stack that a model uses several times each; [1, 64, 32] is one for all examples.
    is_stack = len(old) > 2 and 0 not in held and old[0] > 1
    is_stack = is_stack and math.prod(new) <= 8 * math.prod(old)  # what examples repeat is larger
    if name == "transpose":
        return tuple(params["permutation"])
    if name == "stack":
        return (*same[: params["axis"]], None, *same[params["axis"] :])
    if name == "tile" and not is_stack:
        return None
    if name in ("concatenate", "dynamic_slice", "pad", "slice", "split", "tile"):
        return same if all(new[d] == old[d] for d in held) else None
    if name == "rev":
        return None if held & set(params["dimensions"]) else same
    if name == "squeeze":
        return tuple(d for d in same if d not in params["dimensions"])
    if name in primitives("reductions"):
        return tuple(d for d in same if d not in params["axes"])
    if name == "broadcast_in_dim" and (math.prod(new) == math.prod(old) or is_stack):
        places = params["broadcast_dimensions"]
        return tuple(places.index(d) if d in places else None for d in range(len(new)))
    if name == "reshape" and params["dimensions"] is None:
        return _dims_of_reshape(old, new, {d: opening.num_parts(boxed, d) for d in held})
    if name == "gather" and (is_slice(eqn) or is_stack):
        numbers = params["dimension_numbers"]
        whole = all(params["slice_sizes"][d] == old[d] for d in held)
        left = (d for d in same if d not in numbers.collapsed_slice_dims)
        dims = tuple(next(left) if d in numbers.offset_dims else None for d in range(len(new)))
        return dims if whole and held <= set(dims) else None
    return None


def _dims_of_reshape(old: tuple[int, ...], new: tuple[int, ...], parts: Any) -> _Dims | None:
    """Match each cut dim with the new one that has as many elements in front of it.

    Both are cut into the same runs of elements if their sizes are equal, or if the parts divide
    both: `[2, 16, 4]` whose 16 is cut in 8 may become `[2, 64]`, whose 64 is.
    """
    dims: list[int | None] = [None] * len(new)
    for dim, num_parts in parts.items():
        before = math.prod(old[:dim])
        for place, size in enumerate(new):
            fits = size == old[dim] or (size % num_parts == 0 and old[dim] % num_parts == 0)
            if fits and math.prod(new[:place]) == before and dims[place] is None:
                dims[place] = dim
                break
        else:
            return None
    return tuple(dims)
