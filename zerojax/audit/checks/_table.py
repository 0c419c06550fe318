"""The table of checks, and that of notes."""

import dataclasses
from collections.abc import Callable, Iterator

from zerojax.audit._evidence import Evidence, Problem
from zerojax.audit.checks import _batch, _dtype, _state, _traffic, _volume, _whole

#: Every kind of problem and the function that looks for it.
CHECKS: dict[str, Callable[[Evidence], Iterator[Problem]]] = {
    "unmatched": _state.check_recognised,
    "placement": _state.check_placement,
    "batch": _batch.check_batch,
    "donation": _state.check_donation,
    "unread": _traffic.check_unread,
    "reduce-scatter": _traffic.check_scatter,
    "reduction": _batch.check_reduction,
    "replicas": _batch.check_replicas,
    "accumulator": _whole.check_accumulator,
    "volume": _volume.check_volume,
    "slow links": _volume.check_far,
    "activation": _traffic.check_activation,
    "shuffle": _traffic.check_shuffle,
    "dtype": _dtype.check_dtype,
    "precision": _state.check_precision,
    "offload": _state.check_offload,
    "constant": _state.check_constants,
    "hoisted gather": _whole.check_hoisted,
    "kept gather": _whole.check_kept,
    "peak": _whole.check_peak,
    "host traffic": _traffic.check_host_traffic,
    "exposed": _traffic.check_exposed,
    "recompile": _state.check_recompile,
}

#: What an audit can't judge, or may have been told wrongly.
NOTES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    *(_volume.note_recipe, _dtype.note_dtypes, _state.note_undivided),
    *(_state.note_others, _whole.note_unordered),
)


def find_problems(evidence: Evidence) -> tuple[Problem, ...]:
    """Return what every check finds; of a batch that is placed wrongly, that alone is told."""
    misplaced = any(True for _ in _batch.check_batch(evidence))
    asked = {kind: x for kind, x in CHECKS.items() if not (misplaced and kind in _batch.FOLLOWS)}
    found = ((kind, one) for kind, check in asked.items() for one in check(evidence))
    return tuple(dataclasses.replace(one, kind=kind) for kind, one in found)
