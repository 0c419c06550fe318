"""`audit`: the facts of a compiled step, held against a layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax

from zerojax.audit import _dtype_checks, _gather_checks, _state_checks, _traffic_checks
from zerojax.audit._evidence import Evidence
from zerojax.audit._host import check_host_traffic, traffic_of
from zerojax.audit._memory import memory_of
from zerojax.audit._problems import Problem
from zerojax.audit._program import Program
from zerojax.audit._report import AuditReport, build_report
from zerojax.layout import Layout
from zerojax.planner import Reduce, theory_of
from zerojax.recipe import Precision

#: Every kind of problem and the function that looks for it.
CHECKS: dict[str, Callable[[Evidence], Iterator[Problem]]] = {
    "unmatched": _state_checks.check_recognised,
    "placement": _state_checks.check_placement,
    "donation": _state_checks.check_donation,
    **_traffic_checks.CHECKS,
    **_dtype_checks.CHECKS,
    **_gather_checks.CHECKS,
    "host traffic": check_host_traffic,
    "recompile": _state_checks.check_recompile,
}

#: What is worth knowing and no failure.
NOTES: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _state_checks.note_placement,
    _state_checks.note_copies,
    _state_checks.note_dropped,
    _traffic_checks.note_traffic,
    _traffic_checks.note_excess,
    _traffic_checks.note_padding,
    _dtype_checks.note_dtypes,
    _gather_checks.note_stacks,
    _gather_checks.note_microbatches,
)


def audit(
    compiled: jax.stages.Compiled | Program,
    layout: Layout,
    *,
    accumulate: int = 1,
    reduce: Reduce | None = None,
    precision: Precision | None = None,
) -> AuditReport:
    """Read off a compiled step whether it does what the layout's stage says.

    Args:
        compiled: what `step.lower(...).compile()` gives, of any step: `make_train_step`'s or one
            that jit compiled from the user's own code; or a `Program` that was kept.
        layout: the placement that the step should follow.
        accumulate: microbatches per step, for the theory of what moves.
        reduce: when gradients are summed over devices, as in `make_train_step`; None is its
            default.
        precision: the dtypes that the step should keep to; without it, gradients may be reduced in
            a wider dtype than the parameters'.

    Returns:
        A report with volume, memory and problems, each beside the theory; it prints as a table.

    Raises:
        ValueError: the program runs on another number of devices than the layout's mesh has, or
            its text is not that of a compiled program.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a positive whole number, got {accumulate!r}")
    if reduce not in (None, "once", "each"):
        raise ValueError(f"reduce must be 'once', 'each' or None, got {reduce!r}")
    program = compiled if isinstance(compiled, Program) else Program.of(compiled)
    theory = theory_of(layout, accumulate, reduce)
    evidence = Evidence.gather(program, layout, theory, accumulate, precision)
    problems = tuple(problem for check in CHECKS.values() for problem in check(evidence))
    notes = tuple(note for find in NOTES for note in find(evidence))
    return build_report(evidence, memory_of(evidence), traffic_of(evidence), problems, notes)
