"""Check of the peak: how many layers' weights and gradients are whole at one time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from zerojax.audit._evidence import Evidence, Problem, describe_move, hint
from zerojax.audit._traffic import Move
from zerojax.audit.checks._gather import gathers_by_leaf
from zerojax.collectives import BUCKET
from zerojax.hlo import most_alive, source_of
from zerojax.layout import LeafLayout

#: How many times the layers that a recipe asks for may be whole at one time.
SLACK = 2


def check_peak(evidence: Evidence) -> Iterator[Problem]:
    """Check that no more layers are whole at one time than the stage and the recipe ask for.

    Beside its activations a step needs the states, the gradients of a layer or of a bucket and, at
    stage 3, the weights of a layer and of what is gathered ahead. How large the activations are is
    not known, so weights are counted from their gathers to their last uses, and gradients from
    where they are made to their reductions. Twice the layers are let pass, for compilers gather
    early and reduce late, and the two largest leaves outside of layers: a model has an embedding at
    either end. A CPU is not judged: its compiler drops the barriers that order a list's layers.

    Of 12 layers of 14 MB between embeddings of 50 MB, one layer ahead, 156 MB of weights
    (2 * 2 * 14 + 2 * 50) are let pass, and 128 MB of gradients (2 * 14 + 2 * 50), or a bucket.
    """
    layout, recipe = evidence.layout, evidence.recipe
    if evidence.program.platform == "cpu" or not layout.layers:
        return
    if layout.partitions("parameter"):
        found = [move for moves in gathers_by_leaf(evidence).values() for move in moves]
        ahead = recipe.lookahead(layout.kinds, evidence.program.platform)
        then = "" if ahead else ", or set Recipe(prefetch=1)"
        yield from _beyond(evidence, found, 1 + ahead, f"scan over the layers{then}")
    if layout.partitions("gradient"):
        reduces = ("scatter", "sliced", "reduce")
        found = [move for move in evidence.large if move.role in reduces and move.match.leaves]
        yield from _beyond(
            evidence, found, 1, "scan over the layers, or lower Recipe(bucket_bytes=)"
        )


def _beyond(
    evidence: Evidence, moves: Sequence[Move], layers: float, remedy: str
) -> Iterator[Problem]:
    """Compare what is whole at one time, in bytes, with the layers that are asked for."""
    gathers, sizes = all(move.role == "gather" for move in moves), Counter[tuple[str, str]]()
    for move in moves:
        record = move.record
        name = record.name if gathers else source_of(evidence.module, record)
        sizes[record.computation, name] += record.elements * record.item_bits // 8
    if not sizes:
        return
    largest = max(moves, key=lambda move: move.record.elements)
    layer, other = (size * largest.record.item_bits // 8 for size in _largest(evidence))
    least = 0 if gathers else evidence.recipe.bucket_bytes or BUCKET
    alive = most_alive(evidence.module, sizes)
    if alive <= SLACK * max(layers * layer, least) + other:
        return
    what = "weights" if gathers else "gradients"
    tie = "tie each layer's weights to its input with an optimization_barrier"
    yield Problem(
        where=f"{len(sizes)} {'gathers' if gathers else 'reductions'}; the largest, of "
        f"{evidence.leaf_names(largest)}: {describe_move(largest)}",
        expected=f"{what} of {layers:g} layer(s) of {layer:,} B whole at one time, beside "
        f"{other:,} B outside of layers",
        seen=f"{alive:,} B of {what} at one time, {(alive - other) / layer:.1f} layers",
        remedy=remedy
        if "make_train_step" in evidence.tools
        else f"scan over the layers, or {tie}{hint(evidence, 'make_train_step')}",
    )


def _largest(evidence: Evidence) -> tuple[int, int]:
    """Count the elements of the largest layer, and of the two largest leaves of no layer."""
    layout = evidence.layout

    def size(leaf: LeafLayout) -> int:
        return math.prod(layout.local_shape(leaf, leaf.stored_shape)[leaf.stacked :])

    within = {leaf.path for layer in layout.layers for leaf in layer}
    others = sorted(size(leaf) for leaf in layout.leaves if leaf.path not in within)
    return max(sum(map(size, layer)) for layer in layout.layers), sum(others[-2:])
