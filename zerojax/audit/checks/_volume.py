"""Checks of how much moves, beside the stage's formula."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from zerojax.audit._evidence import Evidence, Problem, describe_move, hint, reducing, whose
from zerojax.audit._traffic import Move
from zerojax.audit.checks._state import note_undivided
from zerojax.hlo import sum_moved

#: Volume over theory that is still as good: for partitions gathered at once, and in stages, whose
#: last step some backends write as an all-reduce.
TOLERANCE = {"at once": (1.05, 1.10), "in stages": (1.20, 1.25)}

#: How much padding may add to the volume of theory.
PADDED = 0.15

#: The part of theory from which on a volume may be that of so many microbatches.
LEAST = 0.75

#: Inputs joined so that each device keeps the examples that it has.
_JOINED = "jnp.stack([a, b], axis=1).reshape(-1, *a.shape[1:])"
#: What to do where a TPU writes a stage of a torus as an all-reduce.
STAGED = (
    'let the partition lie along one mesh axis per torus dim (axis=("x", "y", "z")), so that '
    "gathers and reductions run in stages that the compiler writes as such"
)


def tolerance(evidence: Evidence) -> float:
    groups = [set(axes) for axes in evidence.layout.groups]
    staged = any(
        move.role in ("gather", "scatter", "sliced")
        and move.match.form
        and move.record.elements >= evidence.floor
        and any(set(move.axes) <= axes for axes in groups)
        and (any("[" in span for span in move.spans) or set(move.axes) not in groups)
        for move in evidence.large
    )
    return TOLERANCE["in stages" if staged else "at once"][evidence.layout.partitions("parameter")]


def check_volume(evidence: Evidence) -> Iterator[Problem]:
    if not evidence.is_step:
        return
    yield from _check_padding(evidence)
    if not is_too_much(evidence):
        return
    judged, psi = sum_moved(evidence.large, "judged"), evidence.layout.num_params
    offenders = _offenders(evidence)[:3]
    offenders = [entry for entry in offenders if entry[1] >= offenders[0][1] / 10]
    share = f"{judged / evidence.theory.elements:.2f} times " if evidence.theory.elements else ""
    what = "; ".join(
        f"{describe_move(move)} moves {excess / psi:.3f} too much, {whose(evidence, move)}"
        for move, excess in offenders
    )
    yield Problem(
        where=what or "all collectives along the axes of ZeRO",
        expected=f"{evidence.theory.elements / psi:.3f} elements per parameter (stage "
        f"{evidence.layout.stage}, accumulate={evidence.recipe.accumulate})",
        seen=f"volume above theory: {judged / psi:.3f}, {share}the formula",
        remedy=_volume_remedy(evidence, [move for move, _ in offenders]),
    )


def check_far(evidence: Evidence) -> Iterator[Problem]:
    """Check that no more than shards move along the axes that parameters are not cut along.

    With hybrid sharding these are the slow links, between nodes or slices: along them the shards of
    gradients are summed, Psi / (shards in a node), and not whole gradients. Compilers sum vectors
    whole, which may be a few percent of the shards.
    """
    layout = evidence.layout
    far = {*layout.axis, *layout.batch_axes} - {*layout.axes["parameter"]}
    moves = [move for move in evidence.large if far.intersection(move.axes)]
    by_axes = evidence.theory.by_axes.items()
    theory = sum(elements for axes, elements in by_axes if far.intersection(axes))
    judged, psi = sum_moved(moves, "judged"), layout.num_params
    if not evidence.is_step or judged <= max(TOLERANCE["at once"]) * theory + evidence.floor:
        return
    largest = max(moves, key=lambda move: move.judged)
    yield Problem(
        where=f"{describe_move(largest)}, {whose(evidence, largest)}",
        expected=f"{theory / psi:.3f} elements per parameter along {' x '.join(sorted(far))}: "
        f"those of shards over {' x '.join(layout.axes['parameter'])}",
        seen=f"{judged / psi:.3f} cross these links",
        remedy="reduce gradients to shards first, and sum the shards along these axes"
        f"{hint(evidence, 'make_train_step', 'sharded(tx, layout)')}",
    )


def _volume_remedy(evidence: Evidence, offenders: Sequence[Move]) -> str:
    if undivided := next(note_undivided(evidence), ""):
        return undivided
    sliced, moved = ([x for x in offenders if x.role == role] for role in ("sliced", "shuffle"))
    advice = staged(evidence, sliced, STAGED if tolerance(evidence) in TOLERANCE["at once"] else "")
    if advice := advice or of_kernel(evidence, offenders) or of_joined(evidence, moved):
        return advice
    if offenders and offenders[0].record.elements < evidence.floor:
        return (
            "let devices sum the gradient of what every turn uses after the loop"
            f"{hint(evidence, 'make_train_step', 'gather_where_used')}, or compute outside of the "
            "loop what no turn changes (of an LSTM, x @ w + b of all time steps before the scan)"
        )
    if advice := _of_optimizer(evidence):
        return advice
    ways, roles = [reducing(evidence)], {move.role for move in offenders if move.match.leaves}
    is_run = bool(roles & {"scatter", "sliced"})
    if is_run and evidence.tools & {"make_train_step", "gather_where_used"}:
        runs = "a network whose runs don't need each other's results"
        ways.append(f"run {runs} once, on {_JOINED}")
    if not ways[0] and evidence.reshards_after_use and "gather" in roles:
        once = "gather once for a network that runs several times: reshard_after_forward=False"
        ways.append(f"or {once}" if is_run else once)
    if not evidence.tools & {"make_train_step", "sharded(tx, layout)"}:
        ways.append("wrap the outermost optimizer: sharded(tx, layout)")
    advice = "; ".join(filter(None, ways)) or "compute with weights where they are used alone"
    return f"{advice}; report.collectives lists all"


def _of_optimizer(evidence: Evidence) -> str:
    """Say what to do where an optimizer's update gathers leaves, to sort or to join them say.

    `jit(_step)/top_k` is of the update; what a loss gathers stands below `jvp()`, and new
    parameters come by a `sharding_constraint`, or the barrier behind it (jax 0.12).
    """
    gathers = [move for move in evidence.large if move.role == "gather"]
    named = (move for move in gathers if move.record.op_name)  # not those that libtpu adds itself
    found = [move for move in named if "jvp" not in move.record.op_name]
    updated = 0 if evidence.layout.partitions("parameter") else len(evidence.layout.leaves)
    new = sum(_theory(evidence, index, is_gather=True) for index in range(updated))
    excess = sum_moved(evidence.large, "judged") - evidence.theory.elements
    known = evidence.tools & {"make_train_step", "sharded(tx, layout)"}
    if not known or not found or sum_moved(found, "judged") - new < excess / 2:
        return ""
    names = dict.fromkeys(move.record.op_name.rpartition("/")[2] for move in found)
    others = [x for x in names if x not in ("sharding_constraint", "optimization_barrier")]
    advice = "take an optimizer that works leaf by leaf and element by element"
    return f"{advice}: {', '.join(others)} needs others" if others else ""


def of_kernel(evidence: Evidence, moves: Sequence[Move]) -> str:
    """Say what to do where all examples are gathered for what XLA can't cut, as a Pallas kernel."""
    spec = f"P{evidence.layout.batch_axes}"
    ways = {  # columns of right-hand sides hold the examples of jax.vmap too
        "pallas_call": f"kernel, in_specs={spec}, out_specs={spec}, check_vma=False",
        "triangular_solve": f"solve, in_specs=(P(), {spec}), out_specs={spec}",
    }
    how = next((x for name, x in ways.items() if any(evidence.is_for(m, name) for m in moves)), "")
    return how and f"let each device compute its own examples: jax.shard_map({how})"


def of_joined(evidence: Evidence, moves: Iterable[Move]) -> str:
    """Say what to do where a loss puts one batch behind another: examples change their devices."""
    is_joined = any(evidence.is_for(move, r"jvp\(.*/concatenate$") for move in moves)
    told = "where one batch stands behind another, join them so that no example changes its device"
    return f"{told}: {_JOINED}" if is_joined else ""


def staged(evidence: Evidence, sliced: Sequence[Move], otherwise: str) -> str:
    """Say what to do where a TPU all-reduces gradients, as it does the columns of a long table."""
    if not sliced or evidence.program.platform != "tpu":
        return ""
    largest = max(sliced, key=lambda move: move.moved)
    for leaf in (evidence.layout.leaves[index] for index in largest.match.leaves):
        if leaf.dim == len(leaf.shape) - 1 and leaf.shape[leaf.stacked] > leaf.shape[-1]:
            rule = f"zerojax.Rule(path={leaf.path!r}, dim={leaf.stacked})"
            return f"cut its rows, which are padded then: rules=[{rule}]"
    return otherwise


def is_too_much(evidence: Evidence) -> bool:
    allowed = evidence.theory.elements * tolerance(evidence) + evidence.floor
    return sum_moved(evidence.large, "judged") > allowed


def _check_padding(evidence: Evidence) -> Iterator[Problem]:
    """Check what a compiler adds to fit its tiles: no fault of the step, but it may cost much."""
    padded = [move for move in evidence.large if move.padding]
    total = sum_moved(padded, "padding")
    if total <= PADDED * evidence.theory.elements + evidence.floor:
        return
    largest = max(padded, key=lambda move: move.padding)
    psi = evidence.layout.num_params
    yield Problem(
        where=f"{describe_move(largest)}, {whose(evidence, largest)}",
        expected=f"padding up to {PADDED:.0%} of theory ({evidence.theory.elements / psi:.3f})",
        seen=f"the compiler pads what it moves: {len(padded)} collective(s) move {total / psi:.3f} "
        "elements per parameter for it",
        remedy=f"make the partitioned dims multiples of {128 * evidence.layout.num_shards} (a "
        "shard of 128 rows), or partition over fewer devices",
    )


def note_recipe(evidence: Evidence) -> Iterator[str]:
    """Name the microbatches that the program's loops show, where the recipe has others."""
    layout, recipe = evidence.layout, evidence.recipe
    judged = sum_moved(evidence.large, "judged")
    if evidence.joins_examples:
        joined = [move for move in evidence.ours if not move.match.form and not move.judged]
        moved = f"{sum_moved(joined, 'moved') / layout.num_params:.3f} elements per parameter"
        yield f"{moved} move because the loss joins examples, and are not judged"
    if evidence.steps:
        turns = " x ".join(str(loop.trip_count or "?") for loop in evidence.steps)
        yield f"the program takes {turns} steps, in a loop; what moves is told of one of them"
    moves = ((move.record.trips, move.match.form) for move in evidence.large)
    # The innermost loop around a layer is that over layers.
    found = [trips[:-1] if form == "layer" else trips for trips, form in moves if form]
    if not evidence.is_step or not found:
        return
    if is_too_much(evidence):
        for length in sorted({trips[0] or 1 for trips in found if trips} - {1}):
            each = replace(recipe, accumulate=length, reduce="each")
            theory = evidence.theory_with(each).elements
            if LEAST * theory <= judged <= tolerance(evidence) * theory:
                advice = reducing(evidence)
                yield (
                    f"the volume is that of {length} microbatches, and collectives stand in a loop "
                    f"of {length} turns: if these are microbatches, audit with "
                    f"Recipe(accumulate={length}, reduce='each')"
                    + (advice and f"; if it is the loss's own, {advice}")
                )
        return
    is_looped = evidence.theory.reductions == 1 or any(recipe.accumulate in x for x in found)
    if not is_looped and judged < LEAST * evidence.theory.elements:
        yield (
            f"no collective stands in a loop of {recipe.accumulate} turns, and the volume is "
            f"{judged / evidence.theory.elements:.2f} of theory's: was the step made with "
            f"Recipe(accumulate={recipe.accumulate})?"
        )


def _offenders(evidence: Evidence) -> list[tuple[Move, float]]:
    groups: dict[tuple[Any, bool], list[Move]] = {}
    for move in evidence.large:
        is_leaf = move.match.leaves and move.role != "shuffle"
        group: Any = move.match.leaves if is_leaf else (move.record.shape, move.record.op)
        groups.setdefault((group, move.role == "gather"), []).append(move)
    excess = []
    for (_, is_gather), moves in groups.items():
        first = max(moves, key=lambda move: move.judged)
        leaves = () if first.role == "shuffle" else first.match.leaves
        theory = sum(_theory(evidence, index, is_gather=is_gather) for index in leaves)
        excess.append((first, sum_moved(moves, "judged") - theory))
    return sorted((entry for entry in excess if entry[1] > 0), key=lambda entry: -entry[1])


def _theory(evidence: Evidence, index: int, *, is_gather: bool) -> float:
    leaf, theory, parts = evidence.layout.leaves[index], evidence.theory, evidence.layout.num_shards
    if index in evidence.frozen and not (is_gather and evidence.layout.partitions("parameter")):
        return 0.0
    if is_gather:
        count = theory.gathers if leaf.dim is not None else 0
    else:
        count = theory.reductions * (1 if leaf.dim is not None else 2)
    size = math.prod(evidence.layout.local_shape(leaf, leaf.stored_shape))
    return count * size * (parts - 1) / parts
