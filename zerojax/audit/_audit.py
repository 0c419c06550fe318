"""`audit`: what a compiled step moves and keeps, compared with its layout and its recipe."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, decimal
from zerojax.audit._evidence import Evidence, Problem
from zerojax.audit._host import HostTraffic, traffic_of
from zerojax.audit._memory import MemoryReport, memory_of
from zerojax.audit._program import Program
from zerojax.audit._schedule import ScheduleReport
from zerojax.audit._tables import (
    AxisVolume,
    collective_table,
    host_table,
    labelled,
    largest_table,
    memory_table,
    schedule_table,
    volume_table,
)
from zerojax.audit._traffic import Move
from zerojax.audit.checks import NOTES, find_problems
from zerojax.hlo import Collective, sum_moved
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Recipe

#: The volumes of a report, in elements moved per parameter.
VOLUMES = ("volume", "judged_volume", "padding_volume", "theory_volume")


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Shown):
    """What a compiled step moves and keeps on one device.

    Volumes are elements moved per device and step over the number of parameters, along the axes of
    ZeRO and of the batch.

    Attributes:
        title: stage, mesh and platform in one line.
        volume: what the program moves.
        judged_volume: the same without the compiler's padding, and where the backend has no
            reduce-scatters (a CPU), with all-reduces of which a part is kept counted as such.
        padding_volume: what the compiler adds to fit its tiles.
        theory_volume: what the layout has to move, leaf by leaf: leaves that stay whole, padding,
            microbatches and further batch axes included.
        volume_by_axis: seen and theory by mesh axis, "data" or "data x model" for one collective
            along both.
        memory: bytes on one device by kind.
        host_traffic: bytes between one device and its host in a step.
        schedule: what the step waits for, as scheduled and not measured; None on a CPU, which has
            no asynchronous collectives and whose compiler tells no costs, and on an unknown chip.
        problems: what is wrong.
        notes: what is worth knowing and no failure.
        moves: every collective, with the axes along which it moves and the leaf that it may be.
    """

    title: str
    volume: float
    judged_volume: float
    padding_volume: float
    theory_volume: float
    volume_by_axis: dict[str, AxisVolume]
    memory: MemoryReport
    host_traffic: HostTraffic
    schedule: ScheduleReport | None
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    moves: tuple[Move, ...]

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Return every collective of the program."""
        return tuple(move.record for move in self.moves)

    @property
    def verdict(self) -> str:
        """Return in one line whether the program is what the layout says."""
        if not self.problems:
            return f"clean: {self.title}"
        count = len(self.problems)
        kinds = ", ".join(dict.fromkeys(problem.kind for problem in self.problems))
        return f"{count} problem{'s' if count > 1 else ''} ({kinds}): {self.title}"

    def raise_if_problems(self) -> None:
        """Raise an `AuditError` that lists every problem, if there are any."""
        if self.problems:
            raise AuditError(self)

    @property
    def _summary(self) -> str:
        moved = f"{self.volume:.3f} elements moved per parameter"
        return f"{self.verdict}; {moved}, peak {decimal(self.memory.peak)}"

    @property
    def _style(self) -> str:
        return "bold red" if self.problems else "bold green"

    def _parts(self) -> Iterator[Text | Table]:
        for problem in self.problems:
            yield Text(problem.kind, style="bold red")
            names = ("where", "seen", "expected", "remedy")
            yield labelled({f"{name}:": getattr(problem, name) for name in names}, "red")
        totals = {name: getattr(self, name) for name in VOLUMES}
        yield volume_table(self.volume_by_axis, totals)
        yield collective_table(self.moves)
        yield memory_table(self.memory)
        yield largest_table(self.memory)
        if self.schedule is not None and self.schedule.collectives:
            yield schedule_table(self.schedule)
        if self.host_traffic.total:
            yield host_table(self.host_traffic)
        for note in self.notes:
            yield labelled({"note:": note})


class AuditError(Exception):
    """Raise this where a compiled step has problems; `report` is the whole audit."""

    def __init__(self, report: AuditReport) -> None:
        self.report = report
        super().__init__("\n".join([report.verdict, *map(str, report.problems)]))


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
    evidence = Evidence.gather(program, layout, recipe)
    psi = max(layout.num_params, 1)
    names = ("moved", "judged", "padding")
    volume, judged, padding = (sum_moved(evidence.ours, name) / psi for name in names)
    return AuditReport(
        title=_title(evidence),
        volume=volume,
        judged_volume=judged,
        padding_volume=padding,
        theory_volume=evidence.theory.elements / psi,
        volume_by_axis=_by_axis(evidence, psi),
        memory=memory_of(evidence),
        host_traffic=traffic_of(evidence),
        schedule=evidence.schedule,
        problems=find_problems(evidence),
        notes=tuple(note for find in NOTES for note in find(evidence)),
        moves=evidence.moves,
    )


def _title(evidence: Evidence) -> str:
    layout = evidence.layout
    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    return (
        f"ZeRO stage {layout.stage} over {layout.over} on "
        f"{evidence.program.platform}, mesh {axes}; {layout.num_params:,} parameters"
    )


def _by_axis(evidence: Evidence, psi: int) -> dict[str, AxisVolume]:
    """Group by the axes that theory knows: the steps of a staged gather count for all its axes."""
    layout, theory = evidence.layout, evidence.theory.by_axes
    order = list(layout.mesh.axis_names)
    groups: dict[tuple[str, ...], list[Move]] = {axes: [] for axes in theory}
    for move in evidence.moves:
        axes = tuple(sorted(move.axes, key=order.index))
        known = [a for a in theory if set(axes) <= set(a)]
        groups.setdefault(min(known, key=len) if known else axes, []).append(move)
    ours = {*layout.axis, *layout.batch_axes}
    return {
        " x ".join(axes): AxisVolume(
            seen=sum_moved(moves, "moved") / psi,
            theory=theory.get(axes, 0.0) / psi if ours & set(axes) else None,
        )
        for axes, moves in groups.items()
    }
