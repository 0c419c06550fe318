"""What each argument of a program is to ZeRO, and how large the layout wants its shard."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from zerojax._tree import path_ends
from zerojax._types import Kind, Shape
from zerojax.audit._program import Argument, Program
from zerojax.hlo import element_bits
from zerojax.layout import Layout, LeafLayout, optimizer_leaves

HeldKind = Literal["parameter", "master", "optimizer", "gradient", "copy", "batch", "other"]
STATES: tuple[HeldKind, ...] = ("parameter", "master", "optimizer", "gradient", "copy")

_MASTER = re.compile(r"(^|[/_])(master|fp32)", re.IGNORECASE)
_GRADIENT = re.compile(r"(^|[/_])(grad|acc_grad|accum)", re.IGNORECASE)
_PARAMETER = re.compile(r"(^|/)(params|parameters|weights|model)(/|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Hold one argument leaf and what it is."""

    argument: Argument  # the facts
    kind: HeldKind  # a copy is a further one of the parameters that a step updates: an average
    parameter: int | None = None  # index of the layout's leaf that it belongs to, None for none
    # shapes that one device's part may have by the layout, the likeliest first, if it says any
    shards: tuple[Shape, ...] = ()
    on_host: bool = False  # whether it lives in the host's memory

    @property
    def elements(self) -> int:
        return math.prod(self.argument.shape)


def classify(program: Program, layout: Layout, hosted: Collection[int] = ()) -> tuple[Held, ...]:
    """Return what every argument leaf is; `hosted` are numbers of those in the host's memory.

    Trees with the layout's paths and shapes are parameters, masters or gradients, told apart by
    name, else by dtype: of two the narrower is the parameters'. What lies within an optax state is
    the optimizer's. A further tree is a copy where the step returns as many. Other arguments are
    the batch, apart from what stands beside states.

        0/params/up        bf16[64,128]    parameter
        0/masters/up       f32[64,128]     master
        0/opt_state/0/mu/up  f32[64,128]   optimizer, of parameter "up"
        0/step             s32[]           other
        1                  f32[32,64]      batch
    """
    leaves = program.inputs
    kinds: list[HeldKind | None] = [None] * len(leaves)
    owners: list[int | None] = [None] * len(leaves)
    placed: list[tuple[LeafLayout, ...]] = [()] * len(leaves)
    paths = {leaf.path for leaf in leaves}
    for number, leaf in enumerate(leaves):
        if leaf.role == "optimizer":
            placed[number] = optimizer_leaves(leaf.path, leaf.shape, layout, paths)
            owners[number] = placed[number][0].parameter
            sums = owners[number] is not None and _GRADIENT.search(leaf.path)
            kinds[number] = "gradient" if sums else "optimizer"
    alike = find_trees(leaves, layout)
    trees = [tree for tree in alike if not any(kinds[number] for number in tree)]
    returned = max(len(find_trees(program.outputs, layout)) - len(alike) + len(trees), 1)
    if layout.leaves[0].path == ".":  # any array of its shape looks like it, a batch too
        trees = trees[:returned]
    tree_kinds = _tree_kinds(leaves, trees, layout, returned)
    for tree, kind in zip(trees, tree_kinds, strict=True):
        for index, number in enumerate(tree):
            kinds[number], owners[number] = kind, index
    states = {leaf.path.split("/")[0] for leaf, kind in zip(leaves, kinds, strict=True) if kind}
    held = []
    for leaf, kind, owner, found in zip(leaves, kinds, owners, placed, strict=True):
        if kind is None:
            kind = _rest(leaf, leaf.path.split("/")[0] in states, layout)
        shards = _shards(leaf, kind, owner, found, layout)
        on_host = bool(leaf.memory_kind) or leaf.number in hosted
        held.append(Held(argument=leaf, kind=kind, parameter=owner, shards=shards, on_host=on_host))
    return tuple(held)


def find_trees(leaves: Sequence[Argument], layout: Layout) -> list[list[int]]:
    """Return the numbers of the leaves of every tree like the layout's parameters.

    Others may stand between them: running means, and what draws noise, in an nnx model.
    """
    numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
    found = []
    for leaf in leaves:
        if (prefix := _prefix(leaf.path, layout.leaves[0].path)) is None:
            continue
        tree = []
        for own in layout.leaves:
            path = prefix if own.path == "." else f"{prefix}/{own.path}" if prefix else own.path
            number = numbers.get(path)
            if number is None or leaves[number].shape not in (own.shape, own.stored_shape):
                break
            tree.append(number)
        if len(tree) == len(layout.leaves):
            found.append(tree)
    return found


def _prefix(path: str, of: str) -> str | None:
    if of == ".":
        return path
    if path == of:
        return ""
    return path.removesuffix(f"/{of}") if path.endswith(f"/{of}") else None


def _tree_kinds(
    leaves: Sequence[Argument], trees: Sequence[Sequence[int]], layout: Layout, returned: int
) -> list[HeldKind]:
    """Return which trees are parameters, masters, gradients and copies.

    Those are `returned`: of more trees the last are of the batch, a reference say.
    """
    named: dict[int, HeldKind] = {}
    starts = [tree[0] for tree in trees]
    # What is given away comes back; a reference may stand before it.
    own = sorted(starts, key=lambda start: not leaves[start].donated)[:returned]
    for start in starts:
        prefix = _prefix(leaves[start].path, layout.leaves[0].path) or ""
        if _GRADIENT.search(prefix):
            named[start] = "gradient"
        elif _MASTER.search(prefix):
            named[start] = "master"
        elif _PARAMETER.search(prefix) and start in own and "parameter" not in named.values():
            named[start] = "parameter"
    open_ = [start for start in own if start not in named]
    bits = {tree[0]: max(item_bits(leaves[number].dtype) for number in tree) for tree in trees}
    if open_ and "parameter" not in named.values():
        rank = {
            tree[0]: sum(
                leaves[n].shard_shape not in _shards(leaves[n], "parameter", index, (), layout)
                for index, n in enumerate(tree)
            )
            for tree in trees
        }
        named[min(open_, key=lambda start: (bits[start], rank[start]))] = "parameter"
    widest = max(open_, key=lambda start: bits[start], default=None)
    if widest is not None and widest not in named and "master" not in named.values():
        parameter = next(start for start, kind in named.items() if kind == "parameter")
        if bits[widest] > bits[parameter]:
            named[widest] = "master"
    return [named.get(start, "copy" if start in own else "other") for start in starts]


def item_bits(dtype: str) -> int:
    """Return the bits of one element; 32 where the dtype is not known."""
    return element_bits(dtype) or 32


def _rest(leaf: Argument, is_beside_states: bool, layout: Layout) -> HeldKind:
    if not leaf.shape or leaf.dtype.startswith("key<") or "model_state" in leaf.path.split("/"):
        return "other"
    cut = leaf.shard_shape and leaf.shard_shape[0] < leaf.shape[0]
    spec = f"{leaf.spec} "
    along = any(f"'{axis}'" in spec for axis in layout.batch_axes)
    return "batch" if (cut and along) or not is_beside_states else "other"


def _shards(
    leaf: Argument, kind: HeldKind, owner: int | None, placed: Sequence[LeafLayout], layout: Layout
) -> tuple[Shape, ...]:
    own = None if owner is None or kind == "other" else layout.leaves[owner]
    if own is not None and leaf.shape in (own.shape, own.stored_shape):
        # One that no dim divides stays whole in a loop of the user's own.
        is_whole = kind in ("parameter", "copy") and own.is_padded and leaf.shape == own.shape
        if is_whole or not layout.partitions("parameter" if kind == "parameter" else "optimizer"):
            return (layout.local_shape(own, leaf.shape),)
        kinds: Any = ("optimizer", "parameter") if kind == "copy" else (kind,)
        kinds = kinds if layout.partitions("parameter") else kinds[:1]
        return tuple(shard_of(own, leaf.shape, layout, name) for name in kinds)
    return tuple(dict.fromkeys(shard_of(x, x.stored_shape, layout) for x in placed))


def shard_of(own: LeafLayout, shape: Shape, layout: Layout, kind: Kind = "optimizer") -> Shape:
    """Return one device's part of a leaf that is partitioned, in a shape of it."""
    local = layout.local_shape(own, shape)
    if own.dim is None:
        return local
    parts = layout.num_parts(layout.axes[kind])
    return (*local[: own.dim], math.ceil(local[own.dim] / parts), *local[own.dim + 1 :])


def returned_of(arguments: Iterable[Argument], results: Iterable[Argument]) -> dict[str, Argument]:
    """Find, by paths of arguments, the results that take their places in the next step.

    A result has the argument's shape, and its path within the function's argument: `0/params/w` is
    returned as that, or as `params/w` where the state is the one result, or `1/params/w`; nnx.jit
    returns `0/0/params/w`. The outermost is meant: of `step(params, state, x) -> (params, state)`
    `0/up` is returned as `0/up`, not `1/0/mu/up`. Of several it is one of the same dtype, that no
    other argument has, of the same placement, at the same position.
    """
    by_end: dict[tuple[str, Shape], list[Argument]] = {}
    for new in results:
        for end in {*path_ends(new.path), "."}:
            by_end.setdefault((end, new.shape), []).append(new)
    found: dict[str, Argument] = {}
    taken: set[str] = set()
    # What is given away comes back; a reference may stand before it.
    for old in sorted(arguments, key=lambda leaf: not leaf.donated):

        def rank(new: Argument, old: Argument = old) -> tuple[int, bool, bool, bool, bool]:
            is_free, stays = new.path not in taken, new.placement == old.placement
            depth, same = new.path.count("/"), new.dtype == old.dtype
            return -depth, same, is_free, stays, new.path == old.path

        if alike := by_end.get((old.path.partition("/")[2] or ".", old.shape)):
            found[old.path] = max(alike, key=rank)
            taken.add(found[old.path].path)
    return found
