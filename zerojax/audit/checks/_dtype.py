"""Checks of the dtypes in which weights are gathered and gradients reduced."""

from collections.abc import Iterator

import jax.numpy as jnp

from zerojax.audit._arguments import item_bits
from zerojax.audit._evidence import SHARE, Evidence, Problem, describe_move, whose
from zerojax.audit._traffic import REDUCTIONS, Move
from zerojax.hlo import sum_moved


def check_dtype(evidence: Evidence) -> Iterator[Problem]:
    """Check that what is gathered is as narrow as what the loss computes with."""
    gathers = [move for move in evidence.large if move.role == "gather"]
    found = [(move, bits) for move in gathers if (bits := _narrow_bits(evidence, move))]
    if _is_relevant(evidence, [move for move, _ in found]):
        moved = sum(move.record.moved_bytes for move, _ in found)
        saved = sum(m.record.moved_bytes * (1 - bits / m.record.item_bits) for m, bits in found)
        largest, bits = max(found, key=lambda pair: pair[0].moved)
        yield Problem(
            where=f"{describe_move(largest)}, {whose(evidence, largest)}",
            expected=f"gathers of {bits}-bit elements, as "
            + ("the precision says" if bits == 8 else "the parameters are computed with"),
            seen=f"{largest.record.dtype} moved where {bits} bits would do: {moved:,.0f} B in "
            f"{len(found)} gather(s), of which {saved:,.0f} B are needless",
            remedy="cast to the parameters' dtype before the gather, with an optimization_barrier "
            "between them (Precision(params=jnp.bfloat16) does so)"
            if evidence.recipe.precision.params is None
            else "let the loss use the weight as it comes (no weight.astype(jnp.float32)), or "
            "cast it where it is whole",
        )
    leaves, sums = evidence.layout.leaves, [x for x in evidence.large if x.role in REDUCTIONS]
    # Sums of the size of a vector may be statistics of the batch, which BatchNorm computes in fp32,
    # and so may those of what is carried beside the states, where no backward pass makes them.
    carried = {one.elements for one in evidence.states("other")}
    wide = [
        move
        for move in sums
        if 0 < _own_bits(evidence, move) < move.record.item_bits
        and any(len(leaves[i].shape) - leaves[i].stacked > 1 for i in move.match.leaves)
        and (move.record.elements not in carried or "transpose(" in move.record.op_name)
    ]
    if _is_relevant(evidence, wide) and not _may_reduce_wide(evidence):
        largest = max(wide, key=lambda move: move.moved)
        yield Problem(
            where=f"{describe_move(largest)}, {whose(evidence, largest)}",
            expected="gradients reduced in the dtype that the precision says",
            seen=f"{largest.record.dtype} reductions of {len(wide)} gradient(s)",
            remedy="multiply in the weights' dtype (no weight.astype(jnp.float32) in the loss), "
            "reduce before the cast to the master's dtype, or say Precision(reduce=...)",
        )


def note_dtypes(evidence: Evidence) -> Iterator[str]:
    gathers = (move for move in evidence.large if move.role == "gather")
    promoted = any(0 < _own_bits(evidence, x) < x.record.item_bits for x in gathers)
    if promoted and not evidence.has_scatter:
        yield "a CPU moves 16-bit tensors as 32-bit ones, so that dtypes are not judged here"


def _is_relevant(evidence: Evidence, moves: list[Move]) -> bool:
    return bool(moves) and sum_moved(moves, "judged") >= SHARE * evidence.theory.elements


def _own_bits(evidence: Evidence, move: Move) -> int:
    if not move.record.dtype.startswith(("f", "bf")):
        return 0
    return max([evidence.parameter_bits.get(index, 0) for index in move.match.leaves], default=0)


def _narrow_bits(evidence: Evidence, move: Move) -> int | None:
    # Of hybrid sharding, updated weights return along the other axes, in the parameters' dtype.
    is_for_loss = {*move.axes} <= {*evidence.layout.axes["parameter"]}
    is_narrow = is_for_loss and {*move.match.leaves} <= evidence.narrow and move.match.leaves
    if is_narrow and move.record.item_bits > 8:
        # A CPU widens 8-bit floats to f16, as it does 16-bit ones.
        return 8 if evidence.has_scatter or evidence.recipe.precision.gather == "int8" else None
    own, bits = _own_bits(evidence, move), move.record.item_bits
    if own and own < bits:
        return own if evidence.has_scatter else None  # a CPU's own promotion
    if not own or (not evidence.has_scatter and move.record.operand.is_widened(evidence.module)):
        return None
    # As wide as the parameter: every use may cast it.
    cast = {item_bits(use.casts[0]) if use.casts else bits for use in evidence.uses(move)}
    return max(cast) if cast and max(cast) < bits else None


def _may_reduce_wide(evidence: Evidence) -> bool:
    """Return whether fp32 sums of narrower gradients are what the user asked for, or may be."""
    precision = evidence.recipe.precision
    dtypes = (precision.params, precision.master, precision.reduce)
    if dtypes == (None, None, None) or not evidence.has_scatter:
        return True  # nothing was said of dtypes: those of the state may be any
    wanted = evidence.recipe.accumulator
    return wanted is not None and jnp.dtype(wanted).itemsize >= 4
