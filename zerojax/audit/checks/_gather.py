"""Checks of when stage 3 gathers: layer by layer, and again for the backward pass."""

import math
from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, Problem, describe_move, hint
from zerojax.audit._match import Key, Match
from zerojax.audit._traffic import Move
from zerojax.audit.checks._memory import whole_carries
from zerojax.hlo import Use, uses_of

#: The share of the partitioned parameters that may be kept: the last weights of a forward pass are
#: the first of the backward pass, and keeping those costs nothing.
KEPT_SHARE = 0.1
HOISTED_SHARE = 0.01


def check_hoisted(evidence: Evidence) -> Iterator[Problem]:
    """Check that weights are gathered within the loop over layers, not all of them before."""
    found = _whole_stacks(evidence) if evidence.layout.partitions("parameter") else []
    total = sum(move.record.elements for move in found)
    # Libtpu gathers a small leaf along a new dim, which can look like a stack of layers.
    if not found or total < HOISTED_SHARE * evidence.partitioned_elements:
        return
    largest = max(found, key=lambda move: move.record.elements)
    leaf = evidence.layout.leaves[largest.match.leaves[0]]
    size = sum(move.record.elements * move.record.item_bits // 8 for move in found)
    yield Problem(
        where=f"{evidence.leaf_names(largest)}: {describe_move(largest)}",
        expected=f"one layer gathered at a time, {list(leaf.shape[leaf.stacked :])}",
        seen=f"all {leaf.shape[0]} layers gathered at once: {size:,} B of temporaries",
        remedy="gather within the scanned, rematerialised layer, and don't compute with the whole "
        f"stack outside of it{hint(evidence, 'make_train_step', 'gather_where_used')}",
    )


def check_kept(evidence: Evidence) -> Iterator[Problem]:
    """Check that gathered weights are given up after the forward pass and gathered again."""
    if not evidence.layout.partitions("parameter") or not evidence.is_step:
        return
    kept: list[tuple[Move, int]] = []
    stacked, sure = _stacks(evidence)
    for key, moves in gathers_by_leaf(evidence).items():
        match = moves[0].match
        stored = evidence.gathered_elements(match.leaves)
        gathered = sum(move.handled for move in moves)
        if sure.intersection(match.leaves):
            kept.append((moves[0], stored))
        elif gathered > 1.5 * stored * evidence.recipe.accumulate:
            continue
        elif match.form == "layer":
            kept += [(moves[0], stored)] if stacked.intersection(match.leaves) else []
        elif _is_reduced(evidence, match):
            both = [move for move in moves if _is_used_in_both(evidence, move)]
            kept += [(move, math.prod(key)) for move in both]
    largest, most = max(kept, key=lambda pair: pair[1], default=(None, 0))
    stays = 0 if largest is None or largest.match.form == "layer" else most
    total = sum(size for _, size in kept)
    if largest is None or total - stays < KEPT_SHARE * evidence.partitioned_elements:
        return
    yield Problem(
        where=f"{evidence.leaf_names(*(move for move, _ in kept))}: {describe_move(largest)}",
        expected="two gathers per microbatch, for the forward and for the backward pass",
        seen=f"weights gathered once and kept for the backward pass: {total:,} elements stay whole "
        "on every device",
        remedy="rematerialise the function in which the weight is gathered (jax.checkpoint around "
        f"the layer, gathering inside of it){hint(evidence, 'make_train_step')}",
    )


def users(evidence: Evidence, move: Move) -> list[Use]:
    """List the first real consumers of what a collective gives."""
    return list(uses_of(evidence.module, move.record.result))


def _gathers(evidence: Evidence) -> list[Move]:
    """List the gathers of weights for the loss, or of new parameters that stay whole."""
    near = {*evidence.layout.axes["parameter"]}
    found = (move for move in evidence.large if move.role == "gather" and move.match.leaves)
    return [move for move in found if near.intersection(move.axes)]


def _whole_stacks(evidence: Evidence) -> list[Move]:
    """List the gathers that give all layers of a stacked leaf, and can be of no other leaf."""
    leaves = evidence.layout.leaves
    stacks = {i for i, leaf in enumerate(leaves) if leaf.stacked and leaf.shape[0] > 1}
    return [
        move
        for move in _gathers(evidence)
        if move.match.form == "leaf" and stacks.issuperset(move.match.leaves)
    ]


def gathers_by_leaf(evidence: Evidence) -> dict[Key, list[Move]]:
    """Group the gathers of single leaves and layers by what they give."""
    found: dict[Key, list[Move]] = {}
    stacks = _whole_stacks(evidence)
    for move in _gathers(evidence):
        if move.match.form in ("leaf", "layer") and move not in stacks:
            found.setdefault(move.match.key, []).append(move)
    return found


def _is_reduced(evidence: Evidence, match: Match) -> bool:
    """Return whether gradients of the leaves are reduced, so that there is a backward pass."""
    reduced = sum(
        move.handled
        for move in evidence.large
        if move.role in ("scatter", "sliced", "reduce")
        and set(move.match.leaves) & set(match.leaves)
    )
    return reduced >= 0.5 * evidence.gathered_elements(match.leaves)


def _stacks(evidence: Evidence) -> tuple[set[int], set[int]]:
    """Return leaves that a loop may stack whole, layer by layer, and those of which it is sure."""
    stacks = [(index, carry) for index, carry in whole_carries(evidence) if not carry.is_sum]
    sure = {index for index, carry in stacks if carry.written == "all-gather"}
    return {index for index, _ in stacks}, sure


def _is_used_in_both(evidence: Evidence, move: Move) -> bool:
    """Return whether one gathered weight is used in the forward and in the backward pass."""
    names = [use.instruction.op_name for use in users(evidence, move) if use.instruction.op_name]
    backward = ["transpose(" in name for name in names]
    return any(backward) and not all(backward)
