"""Padding: rows that a compiler adds to what it moves, and what moves them back. Pure.

libtpu pads a reduce-scatter whose shards are an awkward number of rows: 1600 rows over 8 devices
become 8 x 216. Then a shard lies up to 7 x 16 rows from where it belongs, and a permute of that
many rows brings the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from zerojax.audit._match import Key, Matcher, difference, key_of
from zerojax.audit._traffic import Move

#: How much longer a scattered dim may be than a leaf's, where no permute tells that it is padded.
LONGER = 1 / 6


def find_padding(moves: Sequence[Move], matcher: Matcher) -> tuple[Move, ...]:
    """Return the same moves with `padding`, and padded scatters and their permutes with a leaf."""
    permutes = [move for move in moves if _is_permute(move)]
    told = [_measure(move, matcher, permutes) for move in moves]
    padded = [move for move in told if move.role == "scatter" and move.padding]
    return tuple(_follow(move, padded) if _is_permute(move) else move for move in told)


def _measure(move: Move, matcher: Matcher, permutes: Sequence[Move]) -> Move:
    """Count how much of a move is padding."""
    match = move.match
    if not match.form and move.role == "scatter" and move.is_ours:
        longer = matcher.match_longer(move.record.shape, move.record.trips)
        if longer.form and _is_padded(move, longer.key, permutes):
            match = longer
    if not match.form:
        return move
    share = 1 - math.prod(match.key) / max(move.record.elements, 1)
    return dataclasses.replace(
        move, match=match, padding=share * move.judged, judged=(1 - share) * move.judged
    )


def _is_padded(move: Move, of: Key, permutes: Sequence[Move]) -> bool:
    """Return whether a scatter is a leaf's, by its size or by the permute that belongs to it."""
    longer, size = difference(key_of(move.record.shape), of)
    if longer <= size * (1 + LONGER):
        return True
    rows = _displaced(move, of)
    wanted = key_of((*(Counter(of) - Counter([size])).elements(), rows))
    return any(
        key_of(one.record.shape) == wanted and one.record.trips == move.record.trips
        for one in permutes
    )


def _follow(move: Move, padded: Sequence[Move]) -> Move:
    """Return whether a permute moves a part of a shard of a padded scatter."""
    key = key_of(move.record.shape)
    for scatter in padded:
        whole = key_of(scatter.record.shape)
        rows, size = difference(key, whole)
        most = max(size // scatter.record.group_size, _displaced(scatter, scatter.match.key))
        if (
            rows <= most
            and move.record.trips == scatter.record.trips
            and move.axes == scatter.axes
            and len(key) == len(whole)
        ):
            return dataclasses.replace(move, match=scatter.match, padding=move.judged, judged=0.0)
    return move


def _displaced(move: Move, of: Key) -> int:
    """Count the rows by which the last shard of a padded scatter lies from its place."""
    longer, size = difference(key_of(move.record.shape), of)
    if longer > 2 * size:
        return 0
    return (longer - size) // move.record.group_size * (move.record.group_size - 1)


def _is_permute(move: Move) -> bool:
    return move.is_ours and move.role == "shuffle" and move.record.op == "collective-permute"
