"""Checks of what a step waits for, as its compiler scheduled it."""

from __future__ import annotations

from collections.abc import Iterator

from zerojax.audit._evidence import Evidence, Problem, hint, some

#: The share of a scheduled step for which it may wait.
SHARE = 0.1


def check_exposed(evidence: Evidence) -> Iterator[Problem]:
    """Check that loops don't wait for collectives which could move beside their work.

    What `make_train_step` compiles is its own affair, and told in the report's schedule alone.
    """
    schedule = evidence.schedule
    if schedule is None or not schedule.step_seconds or "make_train_step" in evidence.tools:
        return
    found = [one for one in schedule.collectives if one.is_blocking and one.trips and one.leaves]
    exposed = sum(one.exposed_seconds for one in found)
    if min(exposed, schedule.work_seconds) < SHARE * schedule.step_seconds:
        return
    names = some(list(dict.fromkeys(f"{one.op} of {some(one.leaves, 2)}" for one in found)), 2)
    yield Problem(
        where=names,
        expected=f"at most {SHARE:.0%} of a step spent waiting for what loops move",
        seen=f"{len(found)} in loops with nothing scheduled beside them: "
        f"{exposed / schedule.step_seconds:.0%} of a scheduled step of "
        f"{schedule.step_seconds * 1e3:.2f} ms",
        remedy="compile with the options that make these collectives asynchronous on "
        f"{schedule.hardware}, and move each layer's weights and gradients while another computes"
        f"{hint(evidence, 'make_train_step')}",
    )
