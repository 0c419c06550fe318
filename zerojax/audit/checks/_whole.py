"""Checks of what is made whole: what loops carry, what stage 3 gathers and when, and the peak."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from zerojax._tree import grouped
from zerojax._types import Shape
from zerojax.audit._arguments import shard_of
from zerojax.audit._evidence import SHARE, Evidence, Problem, describe_move, hint
from zerojax.audit._match import Key, Match, key_of
from zerojax.audit._traffic import REDUCTIONS, Move
from zerojax.collectives.passes import BUCKET
from zerojax.hlo import Carry, most_alive, operand_of
from zerojax.layout import LeafLayout


def check_accumulator(evidence: Evidence) -> Iterator[Problem]:
    """Check that no loop carries whole gradients where the stage partitions them.

    A loop over microbatches carries the sum of their gradients, one over layers the stack of
    theirs. Of a gradient [512, 64] that 8 devices cut by rows, both should hold [64, 64].
    Sums of a backward pass are gradients of weights that every turn reads; they may be whole, as
    those of one layer are.
    """
    if not evidence.layout.partitions("gradient"):
        return
    found = [
        (index, carry)
        for index, carry in whole_carries(evidence)
        if carry.is_sum != ("transpose(" in carry.op_name) and carry.written != "all-gather"
    ]
    elements = sum(carry.tensor.elements for _, carry in found)
    if not found or elements < SHARE * evidence.partitioned_elements:
        return
    largest = max((carry for _, carry in found), key=lambda carry: carry.tensor.bytes)
    sums = [carry for _, carry in found if carry.is_sum]
    what = "a sum over microbatches" if sums else "a stack over layers"
    remedy = (
        "constrain the gradients to layout.grads within the loop, where they are made, and start "
        f"the sum from shards{hint(evidence, 'make_train_step', 'gather_where_used')}"
    )
    if evidence.recipe.reduction(evidence.layout.kinds) == "once":
        told = "keep it where Recipe(reduce='each') moves too much, which sums each use into shards"
        remedy = f"{told}; a whole sum is the memory of stage 1"
    yield Problem(
        where=f"{evidence.paths(i for i, _ in found)}: {largest.loop} ({largest.op_name})",
        expected=f"shards of gradients, 1 / {evidence.layout.num_shards} of each on a device, as "
        f"stage {evidence.layout.stage} has them",
        seen=f"{what} holds whole gradients on every device: "
        f"{sum(carry.tensor.bytes for _, carry in found):,} B in {len(found)} tensor(s)",
        remedy=remedy,
    )


def whole_carries(evidence: Evidence) -> list[tuple[int, Carry]]:
    """List what loops carry that looks like a partitioned leaf made whole, with the leaf's index.

    A shard of one leaf can look like another leaf: so many of them are left out.
    """
    layout = evidence.layout
    leaves: dict[Key, int] = {}
    shards: Counter[Key] = Counter()
    for index, leaf in enumerate(layout.leaves):
        shards[key_of(shard_of(leaf, leaf.stored_shape, layout, "gradient"))] += 1
        for shape in (leaf.shape, leaf.stored_shape) if leaf.dim is not None else ():
            leaves[key_of(layout.local_shape(leaf, shape))] = index
    found: dict[tuple[str, Key], list[Carry]] = {}
    for carry in evidence.carries:
        key: Shape = key_of(carry.tensor.dims)
        is_float = carry.tensor.dtype.startswith(("f", "bf"))
        if is_float and key in leaves and carry.tensor.elements >= evidence.floor:
            found.setdefault((carry.loop, key), []).append(carry)
    return [
        (leaves[key], carry)
        for (_, key), carries in found.items()
        for carry in carries[: max(len(carries) - shards[key], 0)]
    ]


#: The share of the partitioned parameters that may be kept: the last weights of a forward pass are
#: the first of the backward pass, and keeping those costs nothing.
KEPT_SHARE = 0.1


def check_hoisted(evidence: Evidence) -> Iterator[Problem]:
    """Check that weights are gathered within the loop over layers, not all of them before."""
    found = _whole_stacks(evidence) if evidence.layout.partitions("parameter") else []
    total = sum(move.record.elements for move in found)
    # Libtpu gathers a small leaf along a new dim, which can look like a stack of layers.
    if not found or total < SHARE * evidence.partitioned_elements:
        return
    largest = max(found, key=lambda move: move.record.elements)
    leaf = evidence.layout.leaves[largest.match.leaves[0]]
    size = sum(move.record.elements * move.record.item_bits // 8 for move in found)
    yield Problem(
        where=f"{evidence.leaf_names(largest)}: {describe_move(largest)}",
        expected=f"one layer gathered at a time, {list(leaf.shape[leaf.stacked :])}",
        seen=f"all {leaf.shape[0]} layers gathered at once: {size:,} B of temporaries",
        remedy="gather within the scanned, rematerialised layer, and don't compute with the whole "
        f"stack outside of it{hint(evidence, 'make_train_step', 'gather_where_used')}; a first dim "
        "that counts no layers has Rule(path=..., stacked=0)",
    )


def check_kept(evidence: Evidence) -> Iterator[Problem]:
    """Check that gathered weights are given up after the forward pass and gathered again."""
    if not evidence.reshards_after_use or not evidence.is_step:
        return
    kept: list[tuple[Move, int]] = []
    # Leaves that a loop may stack whole, layer by layer, and those of which it is sure.
    stacks = [(index, carry) for index, carry in whole_carries(evidence) if not carry.is_sum]
    stacked = {index for index, _ in stacks}
    sure = {index for index, carry in stacks if carry.written == "all-gather"}
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
            kept += [(x, math.prod(key)) for x in moves if _is_used_in_both(evidence, x)]
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
        remedy="gather each weight within the function that jax.checkpoint wraps, so that it is "
        f"gathered again{hint(evidence, 'make_train_step', 'gather_where_used')}",
    )


def _gathers(evidence: Evidence) -> list[Move]:
    near = {*evidence.layout.axes["parameter"]}
    found = (move for move in evidence.large if move.role == "gather" and move.match.leaves)
    return [move for move in found if near.intersection(move.axes)]


def _whole_stacks(evidence: Evidence) -> list[Move]:
    leaves = evidence.layout.leaves
    stacks = {i for i, leaf in enumerate(leaves) if leaf.stacked and leaf.shape[0] > 1}
    return [
        move
        for move in _gathers(evidence)
        if move.match.form == "leaf" and stacks.issuperset(move.match.leaves)
    ]


def gathers_by_leaf(evidence: Evidence) -> dict[Key, list[Move]]:
    """Group the gathers of single leaves and layers by what they give."""
    stacks = _whole_stacks(evidence)
    single = (move for move in _gathers(evidence) if move.match.form in ("leaf", "layer"))
    return grouped((move for move in single if move not in stacks), lambda move: move.match.key)


def _is_reduced(evidence: Evidence, match: Match) -> bool:
    reductions = (x for x in evidence.large if x.role in REDUCTIONS)
    reduced = sum(x.handled for x in reductions if {*x.match.leaves} & {*match.leaves})
    return reduced >= 0.5 * evidence.gathered_elements(match.leaves)


def _is_used_in_both(evidence: Evidence, move: Move) -> bool:
    names = [use.line.op_name for use in evidence.uses(move)]
    return {"transpose(" in name for name in names if name} == {True, False}


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
    if evidence.reshards_after_use:
        gathers = [move for moves in gathers_by_leaf(evidence).values() for move in moves]
        ahead = recipe.lookahead(layout.kinds, layout.platform)
        yield from _beyond(evidence, "weights", gathers, 1 + ahead)
    if layout.partitions("gradient"):
        reductions = [x for x in evidence.large if x.role in REDUCTIONS and x.match.leaves]
        yield from _beyond(evidence, "gradients", reductions, 1)


def note_unordered(evidence: Evidence) -> Iterator[str]:
    """Name what is whole at one time of a model without layers, whose gathers nothing orders."""
    if evidence.layout.layers or not evidence.reshards_after_use:
        return
    sizes = _sizes([x for moves in gathers_by_leaf(evidence).values() for x in moves], "weights")
    alive, largest = most_alive(evidence.module, sizes), max(sizes.values(), default=0)
    if alive > 2 * SLACK * largest and evidence.program.platform != "cpu":
        yield (
            f"{alive:,} B of weights are whole at one time, the largest {largest:,} B: no layers "
            "repeat in this model, so nothing orders their gathers; a scan over a stack does"
        )


def _sizes(moves: Sequence[Move], of: str) -> Counter[tuple[str, str]]:
    """Count the bytes of gathered weights, or of what is reduced, by computation and value."""
    sizes = Counter[tuple[str, str]]()
    for one in (move.record for move in moves):
        name = one.name if of == "weights" else operand_of(one)
        sizes[one.computation, name] += one.elements * one.item_bits // 8
    return sizes


def _beyond(evidence: Evidence, of: str, moves: Sequence[Move], layers: float) -> Iterator[Problem]:
    """Compare what is whole at one time, in bytes, with the layers that are asked for."""
    if not moves:
        return
    gathers, sizes = of == "weights", _sizes(moves, of)
    largest = max(moves, key=lambda move: move.record.elements)
    layer, other = (size * largest.record.item_bits // 8 for size in _largest(evidence))
    least = 0 if gathers else evidence.recipe.bucket_bytes or BUCKET
    alive = most_alive(evidence.module, sizes)
    if alive <= SLACK * max(layers * layer, least) + other:
        return
    yield Problem(
        where=f"{len(sizes)} {'gathers' if gathers else 'reductions'}; the largest, of "
        f"{evidence.leaf_names(largest)}: {describe_move(largest)}",
        expected=f"{of} of {layers:g} layer(s) of {layer:,} B whole at one time, beside "
        f"{other:,} B outside of layers",
        seen=f"{alive:,} B of {of} at one time, {(alive - other) / layer:.1f} layers",
        remedy=f"scan over the layers, or {_remedy(evidence, of, layers)}",
    )


def _remedy(evidence: Evidence, what: str, layers: float) -> str:
    """Say what orders the layers of a list; a train step orders them as its recipe says."""
    if "make_train_step" in evidence.tools:
        if what == "weights":
            return f"{'leave out' if layers == 1 else 'lower'} Recipe(prefetch=)"
        return "lower Recipe(bucket_bytes=)"
    waits = "weights to its input" if what == "weights" else "input to the gradients made before"
    return f"tie each layer's {waits} by an optimization_barrier{hint(evidence, 'make_train_step')}"


def _largest(evidence: Evidence) -> tuple[int, int]:
    layout = evidence.layout

    def size(leaf: LeafLayout) -> int:
        return math.prod(layout.local_shape(leaf, leaf.stored_shape)[leaf.stacked :])

    within = {leaf.path for layer in layout.layers for leaf in layer}
    others = sorted(size(leaf) for leaf in layout.leaves if leaf.path not in within)
    return max(sum(map(size, layer)) for layer in layout.layers), sum(others[-2:])
