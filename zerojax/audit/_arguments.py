"""What each argument of a program is to ZeRO, and how large the layout wants its shard."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zerojax._types import Shape
from zerojax.audit._program import Argument, Program
from zerojax.hlo import element_bits
from zerojax.layout import Layout, LeafLayout, choose_dim
from zerojax.layout._mesh import num_devices

HeldKind = Literal["parameter", "master", "optimizer", "gradient", "batch", "other"]
KINDS: tuple[HeldKind, ...] = ("parameter", "master", "optimizer", "gradient", "batch", "other")
STATES: tuple[HeldKind, ...] = ("parameter", "master", "optimizer", "gradient")

_MASTER = re.compile(r"(^|[/_])(master|fp32)", re.IGNORECASE)
_GRADIENT = re.compile(r"(^|[/_])(grad|acc_grad|accum)", re.IGNORECASE)
_PARAMETER = re.compile(r"(^|/)(params|parameters|weights|model)(/|$)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Held:
    """Hold one argument leaf and what it is.

    Attributes:
        argument: the facts.
        kind: parameter, master, optimizer, gradient, batch or other.
        parameter: index of the layout's leaf that it belongs to, None for none.
        shards: shapes that one device's part may have by the layout, the likeliest first; empty
            where the layout says nothing of it.
    """

    argument: Argument
    kind: HeldKind
    parameter: int | None = None
    shards: tuple[Shape, ...] = ()

    @property
    def elements(self) -> int:
        """Count the elements of the whole leaf."""
        return math.prod(self.argument.shape)


def classify(program: Program, layout: Layout) -> tuple[Held, ...]:
    """Tell what every argument leaf is.

    Trees with the layout's paths and shapes are parameters, masters or gradients, told apart by
    name, else by dtype: of two the narrower is the parameters'. What lies within an optax state is
    the optimizer's. Other arguments are the batch, apart from what stands beside states.
    """
    leaves = program.inputs
    kinds: list[HeldKind | None] = [None] * len(leaves)
    owners: list[int | None] = [None] * len(leaves)
    paths = {own.path: index for index, own in enumerate(layout.leaves)}
    for number, leaf in enumerate(leaves):
        if leaf.role == "optimizer":
            owners[number] = _owner(leaf, paths, layout)
            sums = owners[number] is not None and _GRADIENT.search(leaf.path)
            kinds[number] = "gradient" if sums else "optimizer"
    starts = [
        start
        for start in find_trees(leaves, layout)
        if all(kind is None for kind in kinds[start : start + len(layout.leaves)])
    ]
    if layout.leaves[0].path == ".":  # any array of its shape looks like it, a batch too
        returned = len(find_trees(program.outputs, layout))
        returned -= sum(leaf.role == "optimizer" for leaf in leaves if _is_tree([leaf], layout))
        starts = starts[: max(returned, 1)]
    for start, kind in zip(starts, _tree_kinds(leaves, starts, layout), strict=True):
        for index in range(len(layout.leaves)):
            kinds[start + index], owners[start + index] = kind, index
    states = {leaf.path.split("/")[0] for leaf, kind in zip(leaves, kinds, strict=True) if kind}
    held = []
    for leaf, kind, owner in zip(leaves, kinds, owners, strict=True):
        if kind is None:
            kind = _rest(leaf, leaf.path.split("/")[0] in states, layout)
        shards = _shards(leaf, kind, owner, layout)
        held.append(Held(argument=leaf, kind=kind, parameter=owner, shards=shards))
    return tuple(held)


def find_trees(leaves: Sequence[Argument], layout: Layout) -> list[int]:
    """Give the index of the first leaf of every tree like the layout's parameters."""
    found, start, count = [], 0, len(layout.leaves)
    while start + count <= len(leaves):
        if _is_tree(leaves[start : start + count], layout):
            found.append(start)
            start += count
        else:
            start += 1
    return found


def _is_tree(leaves: Sequence[Argument], layout: Layout) -> bool:
    prefix: str | None = None
    for leaf, own in zip(leaves, layout.leaves, strict=True):
        if leaf.shape not in (own.shape, own.stored_shape):
            return False
        before = _prefix(leaf.path, own.path)
        if before is None or before != (prefix if prefix is not None else before):
            return False
        prefix = before
    return True


def _prefix(path: str, of: str) -> str | None:
    """Give what stands before a parameter's path; None where the path is not of it."""
    if of == ".":
        return path
    if path == of:
        return ""
    return path.removesuffix(f"/{of}") if path.endswith(f"/{of}") else None


def _tree_kinds(
    leaves: Sequence[Argument], starts: Sequence[int], layout: Layout
) -> list[HeldKind]:
    """Tell parameters, masters and gradients apart, and from copies such as averages."""
    named: dict[int, HeldKind] = {}
    for start in starts:
        prefix = _prefix(leaves[start].path, layout.leaves[0].path) or ""
        if _GRADIENT.search(prefix):
            named[start] = "gradient"
        elif _MASTER.search(prefix):
            named[start] = "master"
        elif _PARAMETER.search(prefix) and "parameter" not in named.values():
            named[start] = "parameter"
    open_ = [start for start in starts if start not in named]
    bits = {start: _bits(leaves[start : start + len(layout.leaves)]) for start in starts}
    if open_ and "parameter" not in named.values():
        named[min(open_, key=lambda start: bits[start])] = "parameter"
    widest = max(open_, key=lambda start: bits[start], default=None)
    if widest is not None and widest not in named and "master" not in named.values():
        parameter = next(start for start, kind in named.items() if kind == "parameter")
        if bits[widest] > bits[parameter]:
            named[widest] = "master"
    return [named.get(start, "other") for start in starts]


def _bits(leaves: Sequence[Argument]) -> int:
    return max(item_bits(leaf.dtype) for leaf in leaves)


def item_bits(dtype: str) -> int:
    """Return the bits of one element; 32 where the dtype is not known."""
    return element_bits(dtype) or 32


def _owner(leaf: Argument, paths: dict[str, int], layout: Layout) -> int | None:
    """Give the parameter that a leaf of an optimizer's state belongs to, by the end of its path."""
    names = leaf.path.split("/")
    for start in range(len(names) + 1):
        index = paths.get("/".join(names[start:]) or ".")
        if index is not None and _relates(leaf.shape, layout.leaves[index]):
            return index
    return None


def _relates(shape: Shape, own: LeafLayout) -> bool:
    """Tell whether a shape is a parameter's, or has some of its dims added or removed."""
    if not shape:
        return False
    for of in {own.shape, own.stored_shape}:
        if shape == of or shape[len(shape) - len(of) :] == of:
            return True
        if len(shape) < len(of) and shape in itertools.combinations(of, len(shape)):
            return True
    return False


def _rest(leaf: Argument, is_beside_states: bool, layout: Layout) -> HeldKind:
    if not leaf.shape or leaf.dtype.startswith("key<"):
        return "other"
    cut = leaf.shard_shape and leaf.shard_shape[0] < leaf.shape[0]
    spec = f"{leaf.spec} "
    along = any(f"'{axis}'" in spec for axis in layout.batch_axes)
    return "batch" if (cut and along) or not is_beside_states else "other"


def _shards(leaf: Argument, kind: HeldKind, owner: int | None, layout: Layout) -> tuple[Shape, ...]:
    """List the shapes that a device's part may have by the layout."""
    if kind not in STATES:
        return ()
    if owner is None:
        return () if kind != "optimizer" else (_by_own_shape(leaf.shape, layout),)
    own = layout.leaves[owner]
    if leaf.shape in (own.shape, own.stored_shape):
        partitioned = layout.partitions("parameter" if kind == "parameter" else "optimizer")
        # A parameter that no dim divides stays whole in a loop of the user's own.
        whole_by_layout = kind == "parameter" and own.is_padded and leaf.shape == own.shape
        return (_shard(own, leaf.shape, layout, partitioned and not whole_by_layout),)
    return tuple(_related(leaf.shape, own, layout))


def _shard(own: LeafLayout, shape: Shape, layout: Layout, partitioned: bool) -> Shape:
    parts = [num_devices(layout.mesh, names) for names in own.entries]
    if partitioned and own.dim is not None:
        parts[own.dim] *= own.num_shards
    return tuple(math.ceil(size / part) for size, part in zip(shape, parts, strict=True))


def _related(shape: Shape, own: LeafLayout, layout: Layout) -> list[Shape]:
    """List placements of a leaf with dims added to, or removed from, its parameter's."""
    extra = len(shape) - len(own.shape)
    if extra > 0:
        rest = _shard(own, shape[extra:], layout, layout.partitions("optimizer"))
        return [(*shape[:extra], *rest)]
    found = []
    for kept in itertools.combinations(range(len(own.shape)), len(shape)):
        if any(shape[at] not in (own.shape[d], own.stored_shape[d]) for at, d in enumerate(kept)):
            continue
        entries = tuple(own.entries[d] for d in kept)
        parts = tuple(num_devices(layout.mesh, names) for names in entries)
        if own.dim in kept and layout.partitions("optimizer"):
            dim = kept.index(own.dim)
            parts = (*parts[:dim], parts[dim] * own.num_shards, *parts[dim + 1 :])
        elif layout.partitions("optimizer") and own.dim is not None:
            choice = choose_dim(shape, parts, layout.num_shards, 0, layout.min_size)
            if choice.dim is not None:
                more = parts[choice.dim] * layout.num_shards
                parts = (*parts[: choice.dim], more, *parts[choice.dim + 1 :])
        found.append(tuple(math.ceil(s / p) for s, p in zip(shape, parts, strict=True)))
    return list(dict.fromkeys(found))


def _by_own_shape(shape: Shape, layout: Layout) -> Shape:
    if layout.stage == 0:
        return shape
    ones = (1,) * len(shape)
    choice = choose_dim(shape, ones, layout.num_shards, 0, layout.min_size)
    if choice.dim is None:
        return shape
    cut = math.ceil(shape[choice.dim] / layout.num_shards)
    return (*shape[: choice.dim], cut, *shape[choice.dim + 1 :])


def pairs(program: Program, held: Sequence[Held]) -> list[tuple[Held, Argument]]:
    """Pair every state argument with the result that takes its place in the next step.

    An argument's states are found among the results by their relative paths and shapes; the
    outermost tree is preferred, then one of the same dtypes, then one at the same position.
    """
    groups: dict[str, list[Held]] = {}
    for one in held:
        groups.setdefault(one.argument.path.split("/")[0], []).append(one)
    taken: set[int] = set()
    found: list[tuple[Held, Argument]] = []
    for name, group in groups.items():
        if not any(one.kind in STATES for one in group):
            continue
        relative = [(_below(one.argument.path, name), one.argument.shape) for one in group]
        best: tuple[tuple[int, bool, bool], int] | None = None
        for start in range(len(program.outputs) - len(group) + 1):
            run = program.outputs[start : start + len(group)]
            prefix = _run_prefix(relative, run)
            if prefix is None or any(start + i in taken for i in range(len(group))):
                continue
            same = all(a.argument.dtype == b.dtype for a, b in zip(group, run, strict=True))
            # The moments of an optimizer look like its parameters, and lie deeper.
            rank = (-prefix.count("/") if prefix else 1, same, prefix == name)
            if best is None or rank > best[0]:
                best = (rank, start)
        if best is not None:
            taken |= {best[1] + i for i in range(len(group))}
            run = program.outputs[best[1] : best[1] + len(group)]
            found += list(zip(group, run, strict=True))
    return found


def _below(path: str, name: str) -> str:
    return path.removeprefix(name).removeprefix("/")


def _run_prefix(relative: Sequence[tuple[str, Shape]], run: Sequence[Argument]) -> str | None:
    """Give what stands before the paths of results that have the given relative paths, or None."""
    prefix: str | None = None
    for (path, shape), leaf in zip(relative, run, strict=True):
        if leaf.shape != shape:
            return None
        before = leaf.path if not path else _prefix(leaf.path, path)
        if before is None or (prefix is not None and before != prefix):
            return None
        prefix = before
    return prefix
