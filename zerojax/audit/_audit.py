"""`audit`: what a compiled step moves and keeps, compared with its layout and its recipe."""

from __future__ import annotations

import jax

from zerojax.audit._evidence import Evidence
from zerojax.audit._program import Program
from zerojax.audit._report import AuditReport, build_report
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Recipe


def audit(
    compiled: jax.stages.Compiled | Program, layout: Layout, recipe: Recipe | None = None
) -> AuditReport:
    """Compare what a compiled step moves and keeps with what its layout and recipe ask for.

    Args:
        compiled: what `step.lower(...).compile()` returns, for any step: `make_train_step`'s or one
            that jit compiled from the user's own code; or a `Program` that was kept.
        layout: the placement that the step should follow.
        recipe: how the step is computed: its microbatches, when it reduces, its dtypes and what
            the host keeps. A recipe without dtypes (and none) leaves those of states and reductions
            open; none leaves the host's memory open too.

    Returns:
        A report with volume, memory and problems, each beside the theory; it prints as a table.

    Raises:
        TypeError: `compiled` is not compiled, or `recipe` is no recipe.
        ValueError: the program runs on another number of devices than the layout's mesh has, or
            its text is not that of a compiled program.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    check_layout(layout, "audit(compiled, layout, recipe)")
    program = compiled if isinstance(compiled, Program) else Program.of(compiled)
    return build_report(Evidence.gather(program, layout, recipe))
