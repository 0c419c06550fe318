"""Checks of examples: every device has its own, and every leaf learns of those of all devices."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from zerojax.audit._evidence import Evidence, Problem, describe_move, hint, some
from zerojax.audit._origins import Origins
from zerojax.audit._traffic import REDUCTIONS, Move
from zerojax.audit.checks._traffic import check_scatter

#: What a batch that is placed wrongly brings with it, and is no problem of its own.
FOLLOWS = frozenset(
    "reduce-scatter reduction volume accumulator activation shuffle dtype".split()
) | {"kept gather"}
#: What to do where `x.reshape(M, -1, ...)` gives each microbatch the examples of few devices.
MICROBATCHES = (
    "let each microbatch have examples of every device: "
    "x.reshape(-1, M, *x.shape[1:]).swapaxes(0, 1), not x.reshape(M, -1, *x.shape[1:])"
)


def check_batch(evidence: Evidence) -> Iterator[Problem]:
    """Check that the batch is cut over its axes: whole, every device computes all of it.

    A batch that was not placed, a NumPy array say, is whole, or cut along any dim that the compiler
    likes. A cut of another dim than the first may be meant (microbatches before examples, tokens),
    so it is a problem only where gradients are not summed over devices.
    """
    layout, parts = evidence.layout, evidence.layout.num_batch_parts
    batch = [one.argument for one in evidence.states("batch") if one.argument.placement >= 0]
    # A raw PRNG key is no example.
    examples = [
        leaf
        for leaf in batch
        if leaf.shape[0] % parts == 0 and not (leaf.dtype == "uint32" and leaf.shape[-1] <= 4)
    ]
    is_whole = all(leaf.shard_shape == leaf.shape for leaf in batch)
    is_cut = any(leaf.shard_shape[0] < leaf.shape[0] for leaf in batch)
    if parts == 1 or not examples:
        return
    if is_cut:
        yield from _check_shared(evidence)
        return
    if not is_whole and next(check_scatter(evidence), None) is None:
        return
    largest = max(examples, key=lambda leaf: leaf.shard_bytes)
    held = "whole" if is_whole else f"in parts {list(largest.shard_shape)} of all examples"
    yield Problem(
        where=some([f"{leaf.path} {leaf.dtype}{list(leaf.shape)}" for leaf in examples]),
        expected=f"1 / {parts} of the examples a device, along {' x '.join(layout.batch_axes)}",
        seen=f"the batch is {held} on every device, so that each computes all examples; gradients "
        "and what moves can't be judged",
        remedy="place it: jax.device_put(batch, layout.batch), or in_shardings of layout.batch",
    )


def _check_shared(evidence: Evidence) -> Iterator[Problem]:
    """Check that sums of gradients connect all devices: else some compute the same examples.

    %x = f32[4,2,...] all-gather(%batch), data[4/8]    microbatches of a batch as [4, 16, ...]
    %g = f32[64] all-reduce(%own), data[2/8]           the sum of two devices, in four such pairs
    """
    layout = evidence.layout
    adds = [move for move in evidence.large if move.role != "gather"]
    sums = [move for move in adds if move.role in REDUCTIONS and move.match.form]
    axes = {*layout.batch_axes}
    is_whole = any(axes <= {*move.spans} or not move.record.groups for move in adds)
    if is_whole or not sums or evidence.instead:
        return
    apart = [{device} for device in range(layout.devices.size)]
    for group in itertools.chain(*{move.record.groups for move in adds}):
        joined = set[int]().union(*(apart[device] for device in group))
        for device in joined:
            apart[device] = joined
    parts = layout.num_batch_parts
    copies = len({id(one) for one in apart}) * parts // layout.devices.size
    if copies > 1:
        yield Problem(
            where=describe_move(max(sums, key=lambda move: move.moved)),
            expected=f"gradients summed over all {parts} parts of the batch, along "
            f"{' x '.join(layout.batch_axes)}",
            seen=f"they are summed over {parts // copies}: {copies} devices each compute the same "
            "examples; what moves can't be judged",
            remedy=MICROBATCHES + hint(evidence, "make_train_step"),
        )


def check_reduction(evidence: Evidence) -> Iterator[Problem]:
    """Check that a new parameter that depends on the batch depends on a collective over it too.

        %g = f32[64] reduce(%x_of_own_examples);  %new = f32[64] subtract(%bias, %g)

    follows from each device's own examples alone, so that devices train apart; or all devices learn
    of activations in the forward pass, and compute all examples. The first is a problem of
    small leaves, a bias that is left out of a `psum`; where nothing is reduced, that alone is told.
    Where parameters are gathered after the update, the states of the optimizer show it.
    """
    layout, axes = evidence.layout, set(evidence.layout.batch_axes)
    # A matmul that overlaps a ring of permutes adds its own part to what has come around.
    rings = any(move.record.spelling == "windowed reduce-scatter" for move in evidence.ours)
    if layout.num_batch_parts == 1 or rings:
        return
    # A leaf that the user cuts over the batch axes has a part for each device, as experts have.
    trained = {
        leaf: [value for kind, value in values.items() if kind != "copy"]
        for leaf, values in evidence.updated.items()
        if axes.isdisjoint(itertools.chain(*layout.leaves[leaf].entries))
    }
    found = [x for x, values in trained.items() if evidence.origins.are_of_examples(values)]
    seen = "its new value is made of one device's own examples, and others learn nothing of them"
    remedy = "sum or average the gradient over devices (jax.lax.pmean in shard_map)"
    remedy += hint(evidence, "make_train_step")
    if not found:
        # %h = f32[64] all-reduce(%rows);  %g = f32[64] reduce(%h);  %new = f32[64] subtract(%w, %g)
        moves = tuple(replace(x, is_ours=_adds_gradients(x, evidence)) for x in evidence.moves)
        origins = Origins(evidence.module, evidence.held, moves, evidence.steps)
        found = [x for x, values in trained.items() if origins.are_of_examples(values)]
        found = [x for x in found if math.prod(layout.leaves[x].shape) >= evidence.floor]
        seen = "its gradient is summed nowhere: from there on each device computes all examples"
        remedy = "constrain what was put in another order to layout.batch, or order each device's "
        remedy += f"own examples alone (jax.shard_map); {MICROBATCHES}"
    elif len(found) == len(trained) and any(check_scatter(evidence)):
        return
    if found:
        expected = f"its gradient summed over {' x '.join(layout.batch_axes)}"
        yield Problem(where=evidence.paths(found), expected=expected, seen=seen, remedy=remedy)


def _adds_gradients(move: Move, evidence: Evidence) -> bool:
    """Return whether a collective may sum a gradient: no activation of the forward pass does."""
    name, adds = move.record.op_name, move.is_ours and move.role in REDUCTIONS
    if not adds or move.match.form == "leaf" or "transpose(" in name:
        return adds
    return "jvp(" not in name and not evidence.origins.are_inputs(move.record.operand)


def check_replicas(evidence: Evidence) -> Iterator[Problem]:
    """Check that gradients are not summed over devices that have the same examples.

    XLA does so with those of grouped convolutions, and of ones whose input's rows are cut. Where
    no other sum goes along an axis, it cuts no activations: the loss would be summed along it.
    """
    layout = evidence.layout
    held = {axis for leaf in layout.leaves for axis in itertools.chain(*leaf.entries)}
    held.update(layout.batch_axes, layout.axis)
    for axis in [axis for axis in layout.mesh.axis_names if axis not in held]:
        found = [m for m in evidence.moves if axis in m.axes and m.role != "shuffle"]
        of_kernels = ("conv_general_dilated" in move.record.op_name for move in found)
        if found and all(of_kernels) and all(move.role in REDUCTIONS for move in found):
            yield Problem(
                where=describe_move(found[0]),
                expected=f"a sum over {' x '.join(layout.batch_axes)} alone, which cut the batch",
                seen=f"the gradient of a convolution is summed along {axis} too, where devices "
                f"have the same examples: it is {layout.mesh.shape[axis]} times too large",
                remedy="cut the batch along all axes: make_layout(batch_axes=); of a grouped "
                "convolution, differentiate gather_where_used(loss_fn, layout)",
            )
