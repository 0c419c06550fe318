"""What one operation does with values of single examples, and with those made of all."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from zerojax._jaxpr import is_elementwise, is_real
from zerojax._primitives import primitives
from zerojax.collectives.gradients._traces import Refused

#: Parameters that name dims along which an operation mixes elements: the first that it has.
_DIMS = ("axes", "axis", "dimension", "dimensions")
_TAKES = ("gather", "scatter", "scatter-add")
_SCALES, _SIGNS = primitives("scales"), primitives("signs")
#: What a pooled value may go through.
LINEAR = primitives("linear", "scales", "same", "places")
#: How a loss goes through its batch in parts.
IN_CHUNKS = (
    "for chunks cut what each example has, x.reshape(len(x), chunks, -1), or take examples alone: "
    "jax.vmap (of one reduction a step lax.map(f, batch) too, without batch_size)"
)
#: Of these the operands that they are not linear in: what chooses, and a matrix that is inverted.
_FIXED = {
    "select_n": range(1),
    "triangular_solve": range(1),
    **dict.fromkeys((*_TAKES, "select_and_scatter_add"), range(1, 2)),
    "dynamic_slice": range(1, 99),
    "dynamic_update_slice": range(2, 99),
    "ragged_dot_general": range(2, 99),
}


@dataclasses.dataclass(frozen=True)
class Value:
    # parts before examples in a dim that a reshape merged: 1 for [examples * tokens]; None: any
    outer: int | None = None
    degree: float = 0.0  # the power of the number of examples that it grows with
    pooled: bool = False  # whether it was made of all examples
    # whether it comes from a key of the batch, of which each device has its own
    fresh: bool = False
    # of an array of indices, the column that counts 0, 1, 2, ... examples; or None
    column: int | None = None
    zero: bool = False  # whether it is nothing but zeros


def result_of(
    eqn: Any, values: list[Value], dims: list[int | None], out: int | None, num_examples: int
) -> Value:
    """Return what is known of a result whose dim `out` counts examples; None has none."""
    name, params = eqn.primitive.name, eqn.params
    outer = _meet_outer(v.outer for v, dim in zip(values, dims, strict=True) if dim is not None)
    given = next((dim for dim in dims if dim is not None), None)
    if given is None and out is not None and eqn.outvars[0].aval.shape[out] == num_examples:
        outer = 1
    if name == "iota":
        return Value(outer, column=0 if params["dimension"] == out else None)
    if name in primitives("random"):
        key = dims[0] if name == "random_gamma" else given  # its other operand is no part of a key
        if key is None and not values[0].fresh:
            raise Refused(
                "its noise is of a key that is the same for each part of the batch (take a key "
                "from the batch, not marked Whole, or ask for one: loss_fn(params, batch, key))"
            )
        return Value(outer)
    column = _column(eqn, values)
    resizes = name == "reshape" and _size(eqn.invars[0], given) != _size(eqn.outvars[0], out)
    if column is not None and resizes:
        raise Refused("it computes with the place of examples in the batch")
    # Rows of examples are added to rows of what all share.
    if name == "scatter-add" and dims[0] is None and dims[2] is not None:
        if values[1].column is not None:
            raise Refused("it computes with the place of examples in the batch")
        return meet([values[0], Value(degree=values[2].degree + 1, pooled=True)])
    whole = name == "add" and not is_real(eqn.outvars[0])
    is_free = column is not None or name in _SIGNS
    degree = 0.0 if is_free else _degree("an index" if whole else name, values)
    if given is not None and _is_summed(eqn, dims):
        if not is_real(eqn.outvars[0]) and eqn.outvars[0].aval.dtype.itemsize < 4:
            raise Refused("it sums whole numbers of fewer than 32 bits, which may overflow")
        return Value(degree=degree + 1, pooled=True)
    if name in ("reshape", "squeeze") and outer is not None:
        outer = _reshaped(eqn, outer, given, out, num_examples)
    elif given is not None and resizes:
        raise Refused("it joins examples, or whether it does can't be told")
    elif outer and column is None and (joined := _joined(eqn, outer, dims)):
        outer = joined
    elif not _keeps(eqn, values, dims, out):
        raise Refused("it joins examples, or whether it does can't be told")
    pooled = any(value.pooled for value in values)
    rounded = name not in _SIGNS and any(map(is_real, eqn.invars))
    rounds = (pooled and given is None) or (degree and (rounded or name == "div"))
    if not is_real(eqn.outvars[0]) and rounds:
        raise Refused("it rounds what was made of all examples, or what their number divides")
    zero = name in LINEAR and all(value.zero for value in values)
    return Value(outer, degree, pooled, column=column, zero=zero)


def of_kernel(
    eqn: Any, values: list[Value], dims: list[int | None], outs: list[int | None], is_linear: bool
) -> Value:
    """Return what is known of the results of a Pallas kernel.

    Each step of its grid has one example, where that is the step's number along an axis: a block
    (1, 4, 128) of an array whose dim 0 counts examples, with an index map (i, j) -> (i, 0, j).
    """
    grid = eqn.params["grid_mapping"]
    # Every step sees all of what is prefetched, the lengths of sequences say.
    steps: set[int | None] = {None for dim in dims[: -grid.num_inputs] if dim is not None}
    for block, dim in zip(grid.block_mappings, [*dims[-grid.num_inputs :], *outs], strict=True):
        if dim is None:
            continue
        size, program = block.block_shape[dim], block.index_map_jaxpr.jaxpr
        is_one = getattr(size, "block_size", 1) == 1  # or squeezed
        index = program.outvars[dim]
        found = [n for n, x in enumerate(program.invars) if is_one and x is index]
        steps.add(found[0] if found else None)
    if None in (*steps, *outs) or len(steps) > 1:
        raise Refused("it joins examples, or whether it does can't be told")
    if any(value.pooled for value in values):
        raise Refused("it joins single examples with what was made of all")
    degrees = {value.degree for value in values if value.degree}
    if len(degrees) > is_linear:
        raise Refused("it computes with the number of examples, or with what that divides")
    outer = _meet_outer(v.outer for v, dim in zip(values, dims, strict=True) if dim is not None)
    return Value(outer, sum(degrees))


def _size(atom: Any, dim: int | None) -> int:
    return 0 if dim is None else atom.aval.shape[dim]


def _is_summed(eqn: Any, dims: list[int | None]) -> bool:
    name, params = eqn.primitive.name, eqn.params
    if name == "reduce_sum":
        return dims[0] in params["axes"]
    if name == "dot_general":
        return any(dim in c for dim, c in zip(dims, params["dimension_numbers"][0], strict=True))
    if name != "conv_general_dilated" or params["feature_group_count"] > 1:
        return False
    numbers = params["dimension_numbers"]  # the gradient of a filter takes examples for features
    return dims == [numbers.lhs_spec[1], numbers.rhs_spec[1]]


def check_operands(name: str, values: list[Value], *, of_examples: bool) -> None:
    """Refuse what no operation may do with pooled values, counts and positions."""
    pooled = [value for value in values if value.pooled]
    if pooled and of_examples:
        raise Refused("it joins single examples with what was made of all")
    if pooled and (name not in LINEAR or (len(pooled) > 1 and name in _SCALES)):
        raise Refused("it is not linear in what was made of all examples")
    fixed = [values[n] for n in _FIXED.get(name, ()) if n < len(values)]
    if (name == "div" and values[1].pooled) or any(value.pooled for value in fixed):
        raise Refused("it is not linear in what was made of all examples")
    by_sign = name in primitives("signs", "signed") and sum(not value.zero for value in values) == 1
    if not by_sign and any(value.degree for value in (fixed if name in LINEAR else values)):
        raise Refused("it computes with the number of examples, or with what that divides")
    picks = primitives("positions", "same", "places")
    if name not in picks and any(value.column is not None for value in values):
        raise Refused("it computes with the place of examples in the batch")


def _reshaped(eqn: Any, outer: int, given: int | None, out: int | None, num_examples: int) -> int:
    """Return the parts that are more major than examples: [2, 8, 3] as [16, 3] has 2."""
    is_turned = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    if given is None or out is None or is_turned:
        raise Refused("it joins examples, or whether it does can't be told")
    before = math.prod(eqn.invars[0].aval.shape[:given]) * outer
    shape = eqn.outvars[0].aval.shape
    after = math.prod(shape[:out])
    if before % after or shape[out] % (before // after * num_examples):
        raise Refused(f"it cuts the batch into parts of several examples ({IN_CHUNKS})")
    return before // after


def _joined(eqn: Any, outer: int, dims: list[int | None]) -> int:
    """Return the parts before examples: of two joined views 2, of `split` or `z[:n]` 1; else 0."""
    name, params = eqn.primitive.name, eqn.params
    if name == "concatenate" and {*dims} == {params["dimension"]}:
        sizes = {x.aval.shape[params["dimension"]] for x in eqn.invars}
        return outer * len(dims) if len(sizes) == 1 else 0
    if name == "split" and dims == [params["axis"]] and len({*params["sizes"]}) == 1:
        parts, rest = divmod(outer, len(params["sizes"]))
        return 0 if rest else parts
    if name == "slice" and params["strides"] is None and (dim := dims[0]) is not None:
        part = eqn.invars[0].aval.shape[dim] // outer
        start, limit = ends_of(eqn, dim)
        return 0 if start % part or limit % part else (limit - start) // part
    return 0


def ends_of(eqn: Any, dim: int) -> Sequence[int]:
    """Return where a `slice` or `split` cuts a dim; of others nothing."""
    name, params = eqn.primitive.name, eqn.params
    if name == "slice":
        return [params[key][dim] for key in ("start_indices", "limit_indices")]
    return params["sizes"] if name == "split" and params["axis"] == dim else ()


def meet(values: Sequence[Value]) -> Value:
    """Return what is known of a value that is one of several."""
    outer = _meet_outer(value.outer for value in values)
    degree = _degree("add", values)
    pooled = any(value.pooled for value in values)
    fresh = all(value.fresh for value in values)
    columns = {value.column for value in values}
    if len(columns) > 1:
        raise Refused("it computes with the place of examples in the batch")
    return Value(outer, degree, pooled, fresh, columns.pop(), all(value.zero for value in values))


def _meet_outer(given: Iterable[int | None]) -> int | None:
    found = {outer for outer in given if outer is not None}
    if len(found) > 1:
        raise Refused("it joins examples with others, in another order")
    return found.pop() if found else None


def _degree(name: str, values: Sequence[Value]) -> float:
    if name in _SCALES:
        return values[0].degree + (-1 if name == "div" else 1) * values[1].degree
    fixed = _FIXED.get(name, ())
    degrees = {v.degree for n, v in enumerate(values) if not v.zero and n not in fixed}
    if len(degrees) > 1:
        if name == "an index":  # counted from the end: select_n (i < 0) (i + n) i
            raise Refused("it picks examples by their number")
        raise Refused("it adds what grows with the number of examples to what does not")
    return degrees.pop() if degrees else 0.0


def _column(eqn: Any, values: list[Value]) -> int | None:
    """Return the column of a result that counts examples, if that is what an operand has.

    JAX makes of `logits[jnp.arange(4), labels]`:

        i = iota; b = lt i 0; c = add i 4; d = select_n b i c          counted from the end or not
        e = concatenate[dimension=1] d[:, None] labels[:, None]        column 0 of e
        f = gather logits e                                            picks of each example
    """
    name = eqn.primitive.name
    columns = [value.column for value in values]
    found = [n for n, column in enumerate(columns) if column is not None]
    if not found or (name in _TAKES and found == [1]) or (name == "lt" and values[1].zero):
        return None
    number, *others = found
    if name == "select_n" and len({*columns[1:]}) > 1:
        raise Refused("it picks examples by their number")
    if name == "concatenate" and not others:
        return sum((x.aval.shape[-1] for x in eqn.invars[:number]), start=columns[number] or 0)
    own = eqn.invars[number].aval.shape
    is_moved = name == "add" and getattr(eqn.invars[1 - number], "val", None) not in own
    if is_moved or name in (*_TAKES, "concatenate", "lt"):
        raise Refused("it computes with the place of examples in the batch")
    return columns[number]


def _keeps(eqn: Any, values: list[Value], dims: list[int | None], out: int | None) -> bool:
    """Whether examples stay apart in an operation, each in its place."""
    name, params, first = eqn.primitive.name, eqn.params, dims[0]
    if not any(dim is not None for dim in dims):
        is_copied = name == "tile" and _size(eqn.invars[0], out) == 1
        return out is None or name == "broadcast_in_dim" or is_copied
    if name in primitives("apart", "same", "places") or is_elementwise(eqn):
        return True
    if out is None:
        return False
    if name.startswith("dot_product_attention"):  # cuDNN's, of [B, T, N, H] or [B, N, T, H]
        return out == 0 and {*dims} <= {0, None}
    if name in primitives("named_dims"):
        mixed = next((params[key] for key in _DIMS if key in params), None)
        return not any(d in (mixed if isinstance(mixed, tuple) else (mixed,)) for d in dims)
    if name in primitives("last_dims"):
        num_mixed = len(params["fft_lengths"]) if name == "fft" else 2
        return first is not None and first < eqn.invars[0].aval.ndim - num_mixed
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return first in numbers[1][0]
    if name == "triangular_solve":
        # Of a x = b, each column of b is solved by itself; a is that of the example, or of all.
        last = eqn.invars[1].aval.ndim - 1
        mixed = last - 1 if params["left_side"] else last
        return dims[1] not in (None, mixed) and (first is None or first < last - 1)
    size = eqn.outvars[0].aval.shape[out]
    if name in primitives("cuts"):
        if name == "pad" and params["padding_config"][first] != (0, 0, 0):
            return False
        pairs = list(zip(eqn.invars, dims, strict=True))
        whole = name != "dynamic_update_slice" or dims[1] is not None
        return whole and all(d is None or x.aval.shape[d] == size for x, d in pairs)
    if name == "gather":
        return _picks(eqn, values[1], first, dims[1])
    if name.startswith("scatter"):
        numbers, column = params["dimension_numbers"], values[1].column
        if column is not None:
            picked = numbers.scatter_dims_to_operand_dims[column]
            is_own = picked == first and _size(eqn.invars[1], dims[1]) == _size(
                eqn.invars[0], first
            )
            is_one = is_own and first in numbers.inserted_window_dims
            return is_one and dims[1] is not None and dims[2] is not None
        if first is not None and dims[1] is None:
            return dims[2] is not None and first not in numbers.scatter_dims_to_operand_dims
        return first in numbers.operand_batching_dims
    if name == "conv_general_dilated":
        batch = params["dimension_numbers"].lhs_spec[0]
        return dims[1] is None and first == batch and params["batch_group_count"] == 1
    if name.startswith(("reduce_window", "select_and")):
        same = first == out and eqn.invars[0].aval.shape[first] == size
        return same and params["window_dimensions"][first] == 1
    return False


def _picks(eqn: Any, indices: Value, of: int | None, by: int | None) -> bool:
    """Whether a gather takes of each example, or of what all share by indices of each."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if of is None:
        return indices.column is None
    if by is None:
        return sizes[of] == eqn.invars[0].aval.shape[of]
    if indices.column is not None:  # of [examples * 2] its first half would be picked
        is_own = _size(eqn.invars[1], by) == _size(eqn.invars[0], of)
        return is_own and sizes[of] == 1 and numbers.start_index_map[indices.column] == of
    return of in numbers.operand_batching_dims
