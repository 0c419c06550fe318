"""Which leaf of the layout a collective moves, told by the dims of its tensor. Pure."""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from zerojax._types import Shape
from zerojax.layout import Layout, LeafLayout

Key = tuple[int, ...]  # dims above 1, sorted

#: How much longer than a leaf's a dim may be by padding.
PADDING = 1 / 16

#: How much of a leaf a tensor is, the likeliest first.
FORMS = ("leaf", "layer", "half", "stage", "optimizer")


@dataclass(frozen=True)
class Match:
    """Name the leaves that a tensor may be, and how much of one it is."""

    # "leaf" (whole, or the part of it that the user's own axes leave), "layer" of a stack, "half",
    # "stage" (what a step of a staged gather or reduction moves), "optimizer" (a leaf of its state
    # with dims of its own), "joined" (shards of several leaves in a message), "" for an activation
    form: str
    leaves: tuple[int, ...]  # indices of the layout's leaves; several where they look the same
    key: Key  # the dims that were found, above 1 and sorted


UNMATCHED = Match("", (), ())


class Matcher:
    """Find the leaves that a tensor may be; dims may be permuted, split or merged.

    Of a stack [6, 1024, 4096] of layers, [6, 1024, 4096] is the "leaf", [4096, 1024] and [1, 1024,
    4096] are a "layer", and [1024, 2048] is a "half" of one.
    """

    def __init__(self, layout: Layout, others: Iterable[Shape] = ()) -> None:
        self._layout = layout
        self._match = functools.cache(self._first_match)
        self._others = [key_of(shape) for shape in others]
        counts = [(leaf.shape, n) for leaf in layout.leaves for n in range(1, leaf.num_sliced + 1)]
        heights = {size for shape, n in counts for size in (shape[n - 1], math.prod(shape[:n]))}
        #: how high the stacks are, and one less: a loop that gathers ahead is shorter
        self._heights = heights | {height - 1 for height in heights}

    def match(self, shape: Shape, trips: Sequence[int | None] = ()) -> Match:
        """Return what a tensor is, `UNMATCHED` where it is no part of a leaf.

        `trips` are the lengths of the loops that it moves in; in a loop as long as a stack of
        layers is high, a layer is likelier than a leaf that looks like one.
        """
        return self._match(key_of(shape), self._ordered(trips))

    def _first_match(self, key: Key, forms: Sequence[str]) -> Match:
        for fits in (operator.eq, regroups, pads):
            for form in forms:
                for other, match in self._forms[form].items():
                    if fits(key, other):
                        return match
        return UNMATCHED

    def _ordered(self, trips: Sequence[int | None]) -> tuple[str, ...]:
        return ("layer", "leaf", *FORMS[2:]) if self._heights.intersection(trips) else FORMS

    def match_longer(self, shape: Shape, trips: Sequence[int | None] = ()) -> Match:
        """Return the leaf whose dims a tensor has but for one, which is up to twice as long."""
        forms, found = (*self._ordered(trips)[:2], "stage"), [UNMATCHED]
        for match in (x for form in forms for x in self._forms[form].values()):
            longer, size = difference(key_of(shape), match.key)
            if size < longer <= 2 * size:
                found.append(match)
        return max(found, key=lambda match: math.prod(match.key))

    def joins(self, shape: Shape) -> bool:
        """Return whether dims are those of leaves or layers side by side, or stacked.

        [512, 1536] may be three of [512, 512], which a loss joins to multiply them at once.
        """
        key, sums = key_of(shape), dict[int, set[int]]()
        for match in (x for form in FORMS[:2] for x in self._forms[form].values()):
            rest = [*(Counter(key) - Counter(match.key)).elements()]
            if len(key) == len(match.key) + 1 and rest and rest[0] <= len(match.leaves):
                return True
            longer, size = difference(key, match.key)
            for _ in match.leaves if longer < 2**63 else ():
                found = sums.setdefault(longer, {0})
                found |= {x + size for x in found if x + size <= longer}
        return any(longer in found for longer, found in sums.items())

    @cached_property
    def _forms(self) -> dict[str, dict[Key, Match]]:
        leaves: dict[tuple[str, Key], list[int]] = {}
        same: dict[Any, list[int]] = {}  # thousands of leaves have a few dozen placements
        for index, leaf in enumerate(self._layout.leaves):
            placed = (leaf.shape, leaf.stored_shape, leaf.entries, leaf.dim, leaf.stacked)
            same.setdefault(placed, []).append(index)
        for indices in same.values():
            for form, shape in _forms(self._layout.leaves[indices[0]], self._layout):
                leaves.setdefault((form, key_of(shape)), []).extend(indices)
        for key in self._others:
            leaves.setdefault(("optimizer", key), [])
        forms: dict[str, dict[Key, Match]] = {form: {} for form in FORMS}
        for (form, key), indices in leaves.items():
            forms[form][key] = Match(form, tuple(dict.fromkeys(indices)), key)
        return forms


def key_of(shape: Shape) -> Key:
    return tuple(sorted(size for size in shape if size > 1))


def difference(key: Key, other: Key) -> tuple[int, int]:
    """Return the one dim that differs, of [192, 51200] and [160, 50257] the first; or infinite."""
    sides = (Counter(key) - Counter(other), Counter(other) - Counter(key))
    left, right = (sorted(side.elements()) for side in sides)
    pairs = [*zip(left, right, strict=False)] if len(left) == len(right) else []
    if len(pairs) > 1:
        pairs = [pair for pair in pairs if not pads(pair[:1], pair[1:])]
    return pairs[0] if len(pairs) == 1 else (2**63, 1)


def regroups(key: Key, of: Key) -> bool:
    """Return whether the dims of one can be multiplied together to give those of the other."""
    return math.prod(key) == math.prod(of) and (_joins(key, of) or _joins(of, key))


def _joins(parts: Key, wholes: Key) -> bool:
    if not wholes:
        return not parts
    for count in range(1, len(parts) + 1):
        for chosen in itertools.combinations(range(len(parts)), count):
            left = tuple(size for i, size in enumerate(parts) if i not in chosen)
            if math.prod(left) * wholes[0] == math.prod(parts) and _joins(left, wholes[1:]):
                return True
    return False


def pads(key: Key, of: Key) -> bool:
    """Return whether dims are others with a little padding: a TPU rounds shards up to its tiles."""
    return len(key) == len(of) and all(
        size <= longer <= size * (1 + PADDING) for longer, size in zip(key, of, strict=True)
    )


def _forms(leaf: LeafLayout, layout: Layout) -> Iterable[tuple[str, Shape]]:
    for shape in dict.fromkeys((leaf.shape, leaf.stored_shape)):
        whole = layout.local_shape(leaf, shape)
        pieces = [("leaf", whole)]
        pieces += [("layer", (1,) * i + whole[i:]) for i in range(1, leaf.num_sliced + 1)]
        for dim, size in enumerate(whole):
            if dim != leaf.dim and size >= 2:
                for half in (size // 2, size - size // 2):
                    pieces += [("half", (*whole[:dim], half, *whole[dim + 1 :]))]
        yield from pieces
        if leaf.dim is None:
            continue
        for form, piece in pieces:
            size = piece[leaf.dim]
            if leaf.dim and size % leaf.num_shards == 0:
                # A GPU gathers [3, 3, 256, 256], cut along dim 2, as [24, 3, 32, 256], shard after
                # shard, and transposes that.
                front = next(dim for dim in range(len(piece)) if piece[dim] > 1)
                tall = [*piece]
                tall[leaf.dim] //= leaf.num_shards
                tall[front] *= leaf.num_shards
                yield form, tuple(tall)
            for parts in range(2, leaf.num_shards + 1):
                if leaf.num_shards % parts == size % parts == 0:
                    yield "stage", (*piece[: leaf.dim], size // parts, *piece[leaf.dim + 1 :])
