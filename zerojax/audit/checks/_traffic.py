"""Checks of what moves: whether ZeRO needs it, and whether the step waits for it."""

import math
from collections.abc import Iterator

from zerojax.audit._evidence import SHARE, Evidence, Problem, describe_move, hint, reducing, some
from zerojax.audit._match import Matcher
from zerojax.audit._memory import traffic_of
from zerojax.audit._traffic import REDUCTIONS
from zerojax.audit.checks._volume import STAGED, is_too_much, of_joined, of_kernel, staged
from zerojax.hlo import find_host_moves, sum_moved

#: The share of the parameters that may be shuffled: libtpu pads scatters between slices so.
SHUFFLED = 0.02
#: The share of a scheduled step for which it may wait.
EXPOSED = 0.1
#: The share above what the host's update has to move from which on it is too much.
HOSTED = 0.05
#: What to do where no gradient is reduced.
ALONE = (
    "let each device compute its own examples: a loop over the batch (lax.map, lax.scan) gathers "
    "them, jax.vmap does not; or sum the gradients over devices"
)


def check_unread(evidence: Evidence) -> Iterator[Problem]:
    """Check that all was read: what was not can't be called clean."""
    for line in evidence.unread:
        yield Problem(
            where=line,
            expected="a collective that the parser knows",
            seen="a line that names a collective and could not be read",
            remedy="report it with the program's text (compiled.as_text()); the volume lacks it",
        )
    for move in evidence.large:
        if None in move.record.trips:
            yield Problem(
                where=describe_move(move),
                expected="a loop whose length the program says",
                seen="a collective that runs an unknown number of times, counted once",
                remedy="use lax.scan or a fori_loop with constant bounds around it",
            )


def check_scatter(evidence: Evidence) -> Iterator[Problem]:
    """Check that gradients of partitioned leaves are reduce-scattered, at stage 0 all summed."""
    layout = evidence.layout
    if evidence.is_step and not layout.partitions("optimizer"):
        yield from _check_summed(evidence)
        return
    partitioned = evidence.gathered_elements({*range(len(layout.leaves))} - evidence.frozen)
    summed = set(layout.axes["gradient"]) & set(layout.batch_axes)
    if not evidence.is_step or not summed or partitioned < evidence.floor:
        return
    accepted = ("scatter",) if evidence.has_scatter else ("scatter", "sliced")
    reductions = [move for move in evidence.ours if move.role in REDUCTIONS]
    scattered = sum(move.handled for move in reductions if move.role in accepted)
    if scattered >= partitioned / 2 or evidence.instead:
        return
    others = (x for x in reductions if x.role not in accepted and x.record.dtype[0] in "bcf")
    rest = sorted(others, key=lambda x: -x.judged)
    sliced = sum(move.moved for move in rest if move.role == "sliced")
    whole = sum(move.moved for move in rest if move.role == "reduce")
    # Of a weight that others generate the gradient is reduced, which is less than theirs.
    generated = sum(move.moved for move in rest if not move.match.form)
    if generated >= SHARE * partitioned and not is_too_much(evidence):
        return
    remedy = (
        "constrain the gradients to shards, as layout.grads of stage 2 has them, and don't compute "
        f"with whole gradients before{hint(evidence, 'make_train_step', 'sharded(tx, layout)')}"
    )
    if "sharded(tx, layout)" in evidence.tools and (advice := reducing(evidence)):
        remedy = advice
    is_known = bool(rest) and rest[0].record.elements >= evidence.floor  # and no norm alone
    yield Problem(
        where=describe_move(rest[0]) if is_known else "no reduction of a gradient along the axis",
        expected=f"{partitioned:,} elements of gradients reduce-scattered along "
        f"{' x '.join(layout.axes['gradient'])}, as stage {layout.stage} does",
        seen=f"only {scattered:,.0f} of {partitioned:,} elements are reduce-scattered; "
        f"{whole + sliced:,.0f} elements per device are moved by all-reduces",
        remedy=(staged(evidence, rest, STAGED) if sliced > whole else "")
        or (remedy if is_known else ALONE),
    )


def _check_summed(evidence: Evidence) -> Iterator[Problem]:
    theory, moves = evidence.theory, [x for x in evidence.ours if x.role in REDUCTIONS]
    due = sum(theory.summed.values()) / max(theory.reductions, 1)
    if (seen := sum_moved(moves, "moved")) < due / 2 and due >= evidence.floor:
        yield Problem(
            where="no reduction of a gradient along the axis",
            expected=f"{due:,.0f} elements per device moved to sum gradients, as stage 0 does",
            seen=f"only {seen:,.0f}: each device computes the examples of all",
            remedy=ALONE,
        )


def check_activation(evidence: Evidence) -> Iterator[Problem]:
    """Check that activations stay where they are: ZeRO moves parameters and gradients."""
    strange = [move for move in evidence.large if not move.match.form and move.judged]
    strange = [move for move in strange if move not in evidence.instead]
    gathered = [move for move in strange if move.role == "gather"]
    of_weights = evidence.origins.is_of_weights
    gathered = [move for move in gathered if not of_weights(move.record.operand)]
    reduced = [move for move in strange if move.role in REDUCTIONS]
    if not is_too_much(evidence):  # gradients of weights that the loss has joined
        joins = Matcher(evidence.layout).joins
        reduced = [move for move in reduced if not joins(move.record.shape)]
        # A step gathers weights itself: else it is the gradient of one that others generate.
        reduced = [] if "make_train_step" in evidence.tools else reduced
    least = SHARE * _local_elements(evidence)
    heavy = sum_moved(reduced, "judged") >= least
    # Indices of examples that are put in another order cost what they move, and no more.
    few = all(x.record.elements < evidence.floor or x.record.dtype[0] in "su" for x in gathered)
    groups = [("gathered", gathered)] if not few or sum_moved(gathered, "judged") >= least else []
    groups += [("reduced", reduced)] if evidence.layout.partitions("parameter") and heavy else []
    once = reducing(evidence) if "make_train_step" in evidence.tools else ""
    for verb, group in groups:
        if not group:
            continue
        largest = max(group, key=lambda move: move.moved)
        joined = of_joined(evidence, group)
        yield Problem(
            where=describe_move(largest),
            expected="a tensor that is a parameter, a gradient, or a layer or part of one",
            seen=f"an activation is {verb}: {len(group)} tensor(s) that no leaf of the layout "
            f"looks like, {sum_moved(group, 'moved'):,.0f} elements per device",
            remedy=of_kernel(evidence, group)
            or f"{joined and joined + '; '}constrain the activation to layout.batch where it is "
            "made, and the weight it meets to P(), so that the partitioner moves the weight"
            f"{hint(evidence, 'make_train_step', 'gather_where_used')}; {once and once + '; '}if "
            "the loss joins examples, as a contrastive one does, audit with joins_examples=True",
        )


def check_shuffle(evidence: Evidence) -> Iterator[Problem]:
    """Check for all-to-alls and permutes that the loss does not ask for: ZeRO needs none."""
    found = [move for move in evidence.large if move.role == "shuffle" and move.judged]
    moved = sum_moved(found, "moved")
    if not found or moved < SHUFFLED * _local_elements(evidence):
        return
    largest = max(found, key=lambda move: move.moved)
    ops = sorted({move.record.op for move in found})
    remedy = (
        "partition states and gradients along the same dim, with ZeRO's axes in the same order in "
        "every spec (the user's axes first), so that no shard has to change places"
    )
    is_step = "make_train_step" in evidence.tools
    if is_step and "all-to-all" in ops:
        remedy = (
            "the loss moves examples to other devices, as a reshape of [examples, tokens] to "
            "[chunks, tokens] does: cut the tokens of each example into chunks"
        )
    elif is_step and evidence.program.platform == "tpu":
        remedy = (  # GPT-2 XL over 64 devices: 1600 = 16 x 100 rows, reduced as 16 x 120
            "libtpu pads shards of rows that are no whole tiles, and moves the rows to their "
            f"places: make dims that are cut multiples of 8 x {evidence.layout.num_shards}, or "
            "partition over fewer devices (make_layout(axis=))"
        )
    yield Problem(
        where=describe_move(largest),
        expected="gathers and reductions only",
        seen=f"{len(found)} {' and '.join(ops)}, {moved:,.0f} elements per device",
        remedy=of_joined(evidence, found) or remedy,
    )


def check_exposed(evidence: Evidence) -> Iterator[Problem]:
    """Check that loops don't wait for collectives which could move beside their work.

    Steps of `make_train_step` are not checked: `report.schedule` tells their exposed time.
    """
    schedule = evidence.schedule
    if schedule is None or not schedule.step_seconds or "make_train_step" in evidence.tools:
        return
    found = [one for one in schedule.collectives if one.is_blocking and one.leaves]
    found = [one for one in found if one.trips[len(evidence.steps) :]]
    exposed = sum(one.exposed_seconds for one in found)
    if min(exposed, schedule.work_seconds) < EXPOSED * schedule.step_seconds:
        return
    yield Problem(
        where=some(list(dict.fromkeys(f"{one.op} of {some(one.leaves, 2)}" for one in found)), 2),
        expected=f"at most {EXPOSED:.0%} of a step spent waiting for what loops move",
        seen=f"{len(found)} in loops with nothing scheduled beside them: "
        f"{exposed / schedule.step_seconds:.0%} of {schedule.step_seconds * 1e3:.2f} ms",
        remedy="jax.jit(step, compiler_options=zerojax.collectives.compiler_options(layout)), and "
        "move each layer's weights and gradients while another computes"
        f"{hint(evidence, 'make_train_step')}",
    )


def check_host_traffic(evidence: Evidence) -> Iterator[Problem]:
    """Check that the host's update takes gradients and gives parameters, and no more."""
    traffic = traffic_of(evidence)
    if not traffic.theory or traffic.updated <= traffic.theory * (1 + HOSTED):
        return
    computed = (m for m in find_host_moves(evidence.module) if m.is_computed)
    yield Problem(
        where=some([m.name for m in sorted(computed, key=lambda m: -(m.to_host + m.from_host))], 2),
        expected=f"{traffic.theory:,} bytes per device: gradients to the host and parameters back",
        seen=f"the update moves {traffic.updated:,} bytes between the device and the host, "
        f"{traffic.updated / traffic.theory:.2f} times that",
        remedy="send gradients and parameters in the parameters' dtype and keep masters and "
        "optimizer states in the host's memory: Recipe(offload=True)",
    )


def _local_elements(evidence: Evidence) -> float:
    return sum(math.prod(leaf.shape) / leaf.own_parts for leaf in evidence.layout.leaves)
