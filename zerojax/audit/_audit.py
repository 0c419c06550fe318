"""`audit`: what a compiled step moves and keeps, compared with its layout and its recipe."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import jax
from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, decimal, make_table, wrapped
from zerojax._quiet import uncollected
from zerojax._tree import grouped
from zerojax.audit._evidence import Evidence, Problem
from zerojax.audit._memory import BESIDE, HostTraffic, MemoryReport, beside, memory_of, traffic_of
from zerojax.audit._program import Program
from zerojax.audit._schedule import ScheduleReport
from zerojax.audit._traffic import Move
from zerojax.audit.checks import EXPOSED, NOTES, find_problems
from zerojax.hlo import Collective, sum_moved
from zerojax.layout import Layout, check_layout
from zerojax.recipe import Recipe


@dataclass(frozen=True)
class AxisVolume:
    """Count the elements per device, step and parameter that move along some axes."""

    seen: float  # what the program moves
    # what the stage has to move; None along axes that are not ZeRO's or the batch's
    theory: float | None


def labelled(texts: Mapping[str, str], style: str = "") -> Table:
    grid = Table.grid(padding=(0, 1), pad_edge=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style=style)
    for label, text in texts.items():
        grid.add_row(label, Text(text))
    return grid


def volume_table(report: "AuditReport") -> Table:
    table = make_table("axis", *BESIDE, title="volume (elements per parameter)")
    for axis, volume in report.volume_by_axis.items():
        if volume.theory is None:
            table.add_row(axis, f"{volume.seen:.4f}", "not judged", "")
        else:
            table.add_row(axis, *beside(volume.seen, volume.theory, ".4f"))
    theory = report.theory_volume
    if padding := report.padding_volume:
        table.add_row("of which padding", f"{padding:.4f}", "", beside(padding, theory)[2])
    if report.judged_volume != report.volume:
        table.add_row("as judged", *beside(report.judged_volume, theory, ".4f"))
    if any(move.role == "sliced" and move.judged < move.moved for move in report.moves):
        table.caption = "as judged: TPUs and GPUs make an all-reduce + slice a reduce-scatter"
    return table


def collective_table(moves: Iterable[Move]) -> Table:
    groups = grouped(moves, lambda x: (x.record.spelling, " x ".join(x.spans), x.record.dtype))
    names = ("what", "along", "dtype", ">sites", ">per step", ">largest", ">B / device")
    table = make_table(*names, title="collectives")
    table.caption = "largest: elements; B / device: bytes that a device sends in a step"
    for key, group in sorted(groups.items(), key=lambda item: -sum_moved(item[1], "moved")):
        is_known = all(None not in move.record.trips for move in group)
        times = f"{sum(move.record.runs for move in group):,}" if is_known else "?"
        size = sum(move.record.moved_bytes for move in group)
        largest = max(move.record.elements for move in group)
        table.add_row(*key, str(len(group)), times, f"{largest:,}", f"{size:,.0f}")
    return table


def host_table(traffic: HostTraffic) -> Table:
    table = make_table("what", *BESIDE, title="host (B per device and step)")
    table.add_row("to the host", f"{traffic.to_host:,}")
    table.add_row("from the host", f"{traffic.from_host:,}")
    if traffic.theory:
        table.add_row("the host's update", *beside(traffic.updated, traffic.theory))
    return table


def schedule_table(schedule: ScheduleReport) -> Table:
    """Make a table of the most exposed collectives, with what the step waits for below it."""
    names = ("waits for", "of", "beside it", ">links ms", ">exposed ms")
    table = make_table(*names, title="scheduled by the compiler, not measured")
    for column, width in zip(table.columns[:3], (15, 18, 13), strict=True):
        column.no_wrap, column.overflow, column.max_width = True, "ellipsis", width
    for one in schedule.collectives[:5]:
        beside = one.beside_source.rpartition("/")[2] or one.beside or "nothing"
        times = (f"{seconds * 1e3:.2f}" for seconds in (one.link_seconds, one.exposed_seconds))
        table.add_row(one.op, ", ".join(one.leaves) or "no leaf", beside, *times)
    first = schedule.collectives[0]
    advice = f"; of the first: {first.remedy}" if schedule.exposed_share >= EXPOSED else ""
    table.caption = schedule.summary + advice
    return table


@dataclass(frozen=True, kw_only=True, repr=False)
class AuditReport(Shown):
    """What a compiled step moves and keeps on one device.

    Volumes are elements moved per device, step and parameter, along the axes of ZeRO and the batch.

    Attributes:
        title: stage, mesh and platform in one line.
        volume: the elements that the program moves.
        judged_volume: these elements without the compiler's padding; on a CPU, which has no
            reduce-scatters, an all-reduce of which a part is kept counts as one.
        padding_volume: the elements that the compiler adds to fit its tiles.
        theory_volume: the elements that the layout has to move, leaf by leaf: leaves that stay
            whole, padding, microbatches and further batch axes included.
        volume_by_axis: elements, seen and theory, by mesh axis; "data x model" is along both.
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
        judged = f", judged as {self.judged_volume:.3f}" * (self.judged_volume != self.volume)
        moved = f"{self.volume:.3f} elements moved per parameter{judged}"
        return f"{self.verdict}; {moved}, peak {decimal(self.memory.peak)}"

    @property
    def _style(self) -> str:
        return "bold red" if self.problems else "bold green"

    def _parts(self) -> Iterator[Text | Table]:
        for problem in self.problems:
            yield Text(problem.kind, style="bold red")
            names = ("where", "seen", "expected", "remedy")
            yield labelled({f"{name}:": getattr(problem, name) for name in names}, "red")
        yield volume_table(self)
        yield collective_table(self.moves)
        yield from self.memory._parts()
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
        super().__init__("\n".join([wrapped(report.verdict), *map(str, report.problems)]))


@uncollected()
def audit(
    compiled: jax.stages.Compiled | Program,
    layout: Layout,
    recipe: Recipe | None = None,
    *,
    joins_examples: bool = False,
) -> AuditReport:
    """Report what a compiled step moves and keeps, beside what its layout and recipe ask for.

    >>> compiled = step.lower(state, batch).compile()
    >>> zerojax.audit(compiled, layout).raise_if_problems()

    Args:
        compiled: what `step.lower(...).compile()` returns, for any step: `make_train_step`'s or one
            that jit compiled from the user's own code; or a `Program` that was kept.
        layout: the placement that the step should follow.
        recipe: how the step is computed: its microbatches, when it reduces, its dtypes and what
            the host keeps. A recipe without dtypes (and none) leaves those of states and reductions
            open; none leaves the host's memory open too.
        joins_examples: whether the loss computes with examples of several devices, as contrastive
            losses do: activations that move for it are not judged, and a note counts them.

    Raises:
        TypeError: `compiled` is not compiled, or `recipe` is no recipe.
        ValueError: the program runs on another number of devices than the layout's mesh has, or
            its text is not that of a compiled program.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    check_layout(layout, "audit(compiled, layout, recipe)")
    program = compiled if isinstance(compiled, Program) else Program.of(compiled)
    evidence = Evidence(program, layout, recipe, joins_examples=joins_examples)
    psi = max(layout.num_params, 1)
    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    alone = "; with N = 1 nothing is sharded" * (layout.num_shards == 1)
    names = ("moved", "judged", "padding")
    volume, judged, padding = (sum_moved(evidence.ours, name) / psi for name in names)
    return AuditReport(
        title=f"ZeRO stage {layout.stage} over {layout.over} on {program.platform}, mesh {axes}; "
        f"{layout.num_params:,} parameters{alone}",
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
    due = {axes: theory.get(axes, 0.0) / psi if ours & set(axes) else None for axes in groups}
    seen = {axes: sum_moved(moves, "moved") / psi for axes, moves in groups.items()}
    return {" x ".join(axes): AxisVolume(seen=seen[axes], theory=due[axes]) for axes in groups}
