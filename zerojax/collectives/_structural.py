"""Operations that a partitioned parameter goes through without the other devices' part."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from zerojax._jaxpr import bind
from zerojax.collectives._boxed import Boxed, Pending, cast

#: Elementwise operations that are safe in padding: finite there, and so are their derivatives.
LINEAR = frozenset("abs add add_any copy max min mul neg sign sub".split())

#: Elementwise operations that are done on shards when everything else in them is a scalar.
ELEMENTWISE = LINEAR.union(
    "cos div exp integer_pow log logistic pow rsqrt sin sqrt square tanh".split()
)

#: Operations that wait for the gather when they can't be done on shards, and are done again for
#: the backward pass; kept, their results would be whole weights.
DEFERRED = ELEMENTWISE.union(
    "broadcast_in_dim convert_element_type expand_dims reshape rev slice squeeze transpose".split()
)

#: The parameters that hold sizes of a result.
_SIZES = {"slice": "limit_indices", "dynamic_slice": "slice_sizes", "reshape": "new_sizes"}


def keep_boxed(eqn: Any, values: list[Any]) -> list[Any] | None:
    """Carry a box through one equation, or return None where it has to be opened.

    Of `b = transpose a; c = mul b 0.5; d = add c x`, a and b and c stay on shards; d, where x is an
    array, is a real use.

    Args:
        eqn: the equation.
        values: its inputs; at least one is `Boxed`.
    """
    if eqn.primitive.name == "optimization_barrier":
        out = bind(eqn, [v.value if isinstance(v, Boxed) else v for v in values])
        return [
            v.holding(x) if isinstance(v, Boxed) else x for v, x in zip(values, out, strict=True)
        ]
    boxes = [v for v in values if isinstance(v, Boxed)]
    if len(boxes) != 1:
        return None
    kept = None if boxes[0].pending else _on_shards(eqn, values, boxes[0])
    return _after_gather(eqn, values, boxes[0]) if kept is None else kept


def _on_shards(eqn: Any, values: list[Any], boxed: Boxed) -> list[Any] | None:
    """Run an equation on the stored value, if it treats all shards alike."""
    name, params = eqn.primitive.name, eqn.params
    arrays = [v.value if isinstance(v, Boxed) else v for v in values]
    if name == "convert_element_type":
        new = params["new_dtype"]
        both_float = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(boxed.dtype, jnp.floating)
        return [cast(boxed, new)] if both_float else None
    if name == "name":
        return [boxed]
    if name in ELEMENTWISE:
        if boxed.dtype != boxed.value.dtype or (boxed.is_padded and name not in LINEAR):
            return None
        if any(jnp.ndim(v) for v in values if not isinstance(v, Boxed)):
            return None
        (out,) = bind(eqn, arrays)
        return [boxed.holding(out)] if out.dtype == boxed.dtype else None
    dims = _dims_after(name, params, boxed.value.shape, boxed)
    if dims is None:
        return None
    outs = bind(_at_stored_size(eqn, boxed, dims), arrays)
    return [boxed.moved(out, dims) for out in outs]


def _after_gather(eqn: Any, values: list[Any], boxed: Boxed) -> list[Any] | None:
    """Let an equation wait until the box is opened, if it is cheap and else needs only scalars."""
    operands = tuple(None if isinstance(v, Boxed) else v for v in values)
    if eqn.primitive.name not in DEFERRED or any(jnp.ndim(v) for v in operands if v is not None):
        return None
    return [dataclasses.replace(boxed, pending=(*boxed.pending, Pending(eqn, operands)))]


def _dims_after(
    name: str, params: dict[str, Any], shape: tuple[int, ...], boxed: Boxed
) -> tuple[int | None, ...] | None:
    """Return the old dim that each dim of the result is; None where the partitioned dim is cut up.

    Of `[4, 8, 8]` with dim 1 partitioned, transposed by (0, 2, 1): (0, 2, 1). Reshaped to
    `[4, 8, 2, 4]`: (None, 1, None, None). Reshaped to `[32, 8]`: None.
    """
    held = {dim for dim, axes in enumerate(boxed.entries) if axes}
    if boxed.dim is not None:
        held.add(boxed.dim)
    logical = tuple(boxed.size if d == boxed.dim else n for d, n in enumerate(shape))
    same = tuple(range(len(shape)))
    if name == "transpose":
        return tuple(params["permutation"])
    if name == "squeeze":
        gone = {d % len(shape) for d in params["dimensions"]}
        return None if gone & held else tuple(d for d in same if d not in gone)
    if name == "slice":
        stride = params["strides"] or (1,) * len(shape)
        whole = all(
            params["start_indices"][d] == 0
            and params["limit_indices"][d] == logical[d]
            and stride[d] == 1
            for d in held
        )
        return same if whole else None
    if name == "dynamic_slice":
        return same if all(params["slice_sizes"][d] == logical[d] for d in held) else None
    if name == "split":
        return None if params["axis"] in held or boxed.is_padded else same
    if name == "reshape" and params["dimensions"] is None:
        return _dims_of_reshape(logical, params["new_sizes"], held)
    return None


def _dims_of_reshape(
    old: tuple[int, ...], new: tuple[int, ...], held: set[int]
) -> tuple[int | None, ...] | None:
    """Match the dims that must stay by their size and by the elements in front of them."""
    dims: list[int | None] = [None] * len(new)
    for dim in held:
        before = math.prod(old[:dim])
        for place, size in enumerate(new):
            if size == old[dim] and math.prod(new[:place]) == before and dims[place] is None:
                dims[place] = dim
                break
        else:
            return None
    return tuple(dims)


def _at_stored_size(eqn: Any, boxed: Boxed, dims: tuple[int | None, ...]) -> Any:
    """Return an equation that keeps the padding of the partitioned dim.

    With 1009 rows stored as 1016, `slice[start_indices=(0, 2) limit_indices=(1009, 3)]` ends at
    (1016, 3).
    """
    key = _SIZES.get(eqn.primitive.name)
    if key is None or boxed.dim is None:
        return eqn
    sizes = list(eqn.params[key])
    sizes[dims.index(boxed.dim)] = boxed.value.shape[boxed.dim]
    return eqn.replace(params={**eqn.params, key: tuple(sizes)})
