"""Which leading dims of a leaf count layers: found in shapes, or in the traced loss.

A model that scans over its layers stacks their weights along a leading dim. Cutting that dim would
give whole layers to single devices: a layer's gradient would be reduced to one owner instead of
being reduce-scattered, and its weights broadcast from one instead of gathered from all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zerojax._jaxpr import bodies, called, run, scan_parts
from zerojax._tree import as_shapes, leaves_by_path, num_elements
from zerojax._types import LossFn, PyTree, Shape
from zerojax.layout._rule import Rule


class _Origin(NamedTuple):
    """The leaf that a value is, and how many scans have sliced it."""

    number: int
    depth: int


def stacked_from_shapes(shapes: Mapping[str, Shape]) -> list[int]:
    """Count the leading layer dims of each leaf, 0 or 1, from shapes by path alone.

    A subtree counts as stacked when all of its leaves share their leading size and vectors as well
    as matrices are among them, as in a stack of layers with norms or biases: `[L, D]` beside
    `[L, D, F]`. An unstacked layer does not look so, because its own vectors have one dim.
    """
    below: dict[str, list[Shape]] = {}
    for path, shape in shapes.items():
        for subtree in _subtrees(path):
            below.setdefault(subtree, []).append(shape)
    stacks = {subtree for subtree, found in below.items() if _is_stack(found)}
    return [int(not stacks.isdisjoint(_subtrees(path))) for path in shapes]


def _subtrees(path: str) -> list[str]:
    """Name the subtrees that a leaf is in: `a` and `a/b` of `a/b/c`."""
    names = path.split("/")
    return ["/".join(names[:count]) for count in range(1, len(names))]


def _is_stack(shapes: Sequence[Shape]) -> bool:
    ndims = [len(shape) for shape in shapes]
    if min(ndims) != 2 or max(ndims) == 2:
        return False
    sizes = {shape[0] for shape in shapes}
    return len(sizes) == 1 and max(sizes) > 1


def stacked_rules(loss_fn: LossFn, params: PyTree, batch: PyTree) -> tuple[Rule, ...]:
    """Return a rule for each leaf that the loss scans over, to pass to `make_layout(rules=)`.

    From shapes alone, `make_layout` can take a stack of layers for one large weight. The traced
    loss shows which leading dims a scan slices, or an index.

    Args:
        loss_fn: `loss_fn(params, batch)`; it is traced, not run. What it returns doesn't matter.
        params: arrays or shapes.
        batch: arrays or shapes.

    Returns:
        A rule like `Rule(path="^blocks/kernel$", stacked=1)` for each leaf that is sliced, and
        one that says of all others that they have no layer dims.
    """
    names = list(leaves_by_path(params))
    traced = jax.make_jaxpr(loss_fn)(as_shapes(params), as_shapes(batch))
    depths = [0] * len(names)
    rest = [None] * (len(traced.jaxpr.invars) - len(names))
    _follow(traced, [*(_Origin(number, 0) for number in range(len(names))), *rest], depths)
    scanned = (
        Rule(path=f"^{re.escape(name)}$", stacked=depth)
        for name, depth in zip(names, depths, strict=True)
        if depth
    )
    return (*scanned, Rule(path="", stacked=0))


def _follow(program: Any, args: Sequence[_Origin | None], depths: list[int]) -> list[Any]:
    """Follow leaves through calls and casts to the loops that slice them.

    With `w` leaf 0, `{ lambda w:f32[4,8,8] x. y = scan[jaxpr={lambda h wi. ...}] x w in (y,) }`
    slices it once: `wi:f32[8,8]` is leaf 0 at depth 1, and `depths` becomes `[1]`. So does
    `wi:f32[1,8,8] = dynamic_slice[slice_sizes=(1, 8, 8)] w i 0 0`.

    Args:
        program: what is looked through.
        args: its inputs, those that are leaves.
        depths: the largest number of times that each leaf is sliced; updated.

    Returns:
        Its results, those that are leaves.
    """

    def sliced(leaf: _Origin | None) -> _Origin | None:
        if leaf is None:
            return None
        depths[leaf.number] = max(depths[leaf.number], leaf.depth + 1)
        return _Origin(leaf.number, leaf.depth + 1)

    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        name, inner = eqn.primitive.name, called(eqn)
        leaves = [x if isinstance(x, _Origin) else None for x in values]
        nothing = [None] * len(eqn.outvars)
        if not any(leaves):
            return nothing
        if name in ("convert_element_type", "squeeze"):
            return leaves
        if name == "scan":
            first = sum(scan_parts(eqn.params))
            inside = [*leaves[:first], *map(sliced, leaves[first:])]
            _follow(eqn.params["jaxpr"], inside, depths)
        elif name == "while":
            _follow(eqn.params["body_jaxpr"], leaves[eqn.params["cond_nconsts"] :], depths)
        elif name == "cond":
            for branch in bodies(eqn):
                _follow(branch, leaves[1:], depths)
        elif inner is not None:
            return _follow(inner, leaves, depths)
        elif _takes_layer(eqn):
            return [sliced(leaves[0])]
        return nothing

    return run(program, args, step)


def _takes_layer(eqn: Any) -> bool:
    """Return whether an equation is `w[i]` of a stack of matrices, i a number, traced or not."""
    params, shape = eqn.params, eqn.invars[0].aval.shape
    match eqn.primitive.name:
        case "slice":
            ends = zip(params["start_indices"], params["limit_indices"], strict=True)
            taken = tuple(limit - start for start, limit in ends)
        case "dynamic_slice" | "gather":
            taken = tuple(params["slice_sizes"])
        case _:
            return False
    one = len(shape) > 2 and taken == (1, *shape[1:])
    return one and eqn.outvars[0].aval.size == num_elements(taken)  # not a batch of rows
