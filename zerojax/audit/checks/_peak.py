"""Check of the peak: how many layers' weights and gradients are whole at one time."""

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

    Of 12 layers of 40 MB between embeddings of 50 MB, one layer ahead, 260 MB of weights
    (2 * 2 * 40 + 2 * 50) are let pass, and 180 MB of gradients (2 * 40 + 2 * 50); of layers that
    are smaller than a bucket, twice the bucket instead.
    """
    layout, recipe = evidence.layout, evidence.recipe
    if evidence.program.platform == "cpu" or not layout.layers:
        return
    if layout.partitions("parameter"):
        gathers = [move for moves in gathers_by_leaf(evidence).values() for move in moves]
        ahead = recipe.lookahead(layout.kinds, evidence.program.platform)
        yield from _beyond(evidence, "weights", gathers, 1 + ahead)
    if layout.partitions("gradient"):
        roles = ("scatter", "sliced", "reduce")
        reductions = [move for move in evidence.large if move.role in roles and move.match.leaves]
        yield from _beyond(evidence, "gradients", reductions, 1)


def _beyond(
    evidence: Evidence, what: str, moves: Sequence[Move], layers: float
) -> Iterator[Problem]:
    """Compare what is whole at one time, in bytes, with the layers that are asked for."""
    if not moves:
        return
    sizes, gathers = Counter[tuple[str, str]](), what == "weights"
    for move in moves:
        record = move.record
        name = record.name if gathers else source_of(evidence.module, record)
        sizes[record.computation, name] += record.elements * record.item_bits // 8
    largest = max(moves, key=lambda move: move.record.elements)
    layer, other = (size * largest.record.item_bits // 8 for size in _largest(evidence))
    least = 0 if gathers else evidence.recipe.bucket_bytes or BUCKET
    alive = most_alive(evidence.module, sizes)
    if alive <= SLACK * max(layers * layer, least) + other:
        return
    yield Problem(
        where=f"{len(sizes)} {'gathers' if gathers else 'reductions'}; the largest, of "
        f"{evidence.leaf_names(largest)}: {describe_move(largest)}",
        expected=f"{what} of {layers:g} layer(s) of {layer:,} B whole at one time, beside "
        f"{other:,} B outside of layers",
        seen=f"{alive:,} B of {what} at one time, {(alive - other) / layer:.1f} layers",
        remedy=f"scan over the layers, or {_remedy(evidence, what, layers)}",
    )


def _remedy(evidence: Evidence, what: str, layers: float) -> str:
    """Say what orders the layers of a list; a train step orders them as its recipe says."""
    if "make_train_step" in evidence.tools:
        if what == "weights":
            return "set Recipe(prefetch=1)" if layers == 1 else "lower Recipe(prefetch=)"
        return "lower Recipe(bucket_bytes=)"
    waits = "weights to its input" if what == "weights" else "input to the gradients made before"
    return (
        f"tie each layer's {waits} with an optimization_barrier{hint(evidence, 'make_train_step')}"
    )


def _largest(evidence: Evidence) -> tuple[int, int]:
    """Count the elements of the largest layer, and of the two largest leaves of no layer."""
    layout = evidence.layout

    def size(leaf: LeafLayout) -> int:
        return math.prod(layout.local_shape(leaf, leaf.stored_shape)[leaf.stacked :])

    within = {leaf.path for layer in layout.layers for leaf in layer}
    others = sorted(size(leaf) for leaf in layout.leaves if leaf.path not in within)
    return max(sum(map(size, layer)) for layer in layout.layers), sum(others[-2:])
