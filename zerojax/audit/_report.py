"""`AuditReport`: what a compiled step moves and keeps, beside the theory."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from zerojax.audit._compare import Comparison
from zerojax.audit._evidence import Evidence
from zerojax.audit._host import HostTraffic
from zerojax.audit._memory import MemoryReport
from zerojax.audit._problems import AuditError, Problem
from zerojax.audit._tables import (
    collective_table,
    hanging,
    host_table,
    largest_table,
    memory_table,
    problem_grid,
    volume_table,
)
from zerojax.audit._traffic import Move, judged_elements, moved_elements, padding_elements
from zerojax.hlo import Collective
from zerojax.layout import Layout


@dataclass(frozen=True)
class AxisVolume:
    """Elements per device, step and parameter that move along some axes.

    Attributes:
        seen: what the program moves.
        theory: what the stage has to move; None along axes that are not ZeRO's or the batch's.
    """

    seen: float
    theory: float | None


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What a compiled step moves and keeps on one device.

    Attributes:
        title: stage, mesh and platform in one line.
        volume: elements moved per device and step over the number of parameters, along the axes of
            ZeRO and of the batch.
        judged_volume: the same without the compiler's padding, and where the backend has no
            reduce-scatters (a CPU), with all-reduces of which a part is kept counted as such.
        padding_volume: what the compiler adds to fit its tiles.
        theory_volume: what the layout has to move, leaf by leaf: leaves that stay whole, padding,
            microbatches and further batch axes included.
        paper_volume: the paper's plain number, 2 or 3 times (N-1)/N.
        volume_by_axis: seen and theory by mesh axis, "data" or "data x model" for one collective
            along both.
        memory: bytes on one device by kind.
        host_traffic: bytes between one device and its host in a step.
        problems: what is wrong; each a text with `kind`, `where`, `expected`, `seen`, `remedy`.
        notes: what is worth knowing and no failure.
        collectives: every collective of the program.
        unread: lines with a collective that could not be read.
    """

    title: str
    volume: float
    judged_volume: float
    padding_volume: float
    theory_volume: float
    paper_volume: float
    volume_by_axis: dict[str, AxisVolume]
    memory: MemoryReport
    host_traffic: HostTraffic
    problems: tuple[Problem, ...]
    notes: tuple[str, ...]
    collectives: tuple[Collective, ...]
    unread: tuple[str, ...]
    moves: tuple[Move, ...] = dataclasses.field(repr=False)

    @property
    def verdict(self) -> str:
        """Report in one line whether the program is what the layout says."""
        if not self.problems:
            return f"clean: {self.title}"
        count = len(self.problems)
        kinds = ", ".join(dict.fromkeys(problem.kind for problem in self.problems))
        return f"{count} problem{'s' if count > 1 else ''} ({kinds}): {self.title}"

    def raise_if_problems(self) -> None:
        """Raise an `AuditError` that lists every problem, if there are any."""
        if self.problems:
            raise AuditError(self)

    def compare(self, other: AuditReport) -> Comparison:
        """Set another report beside this one; the result prints as a table."""
        return Comparison.of(self, other)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "title": self.title,
            "verdict": self.verdict,
            "volume": self.volume,
            "judged_volume": self.judged_volume,
            "padding_volume": self.padding_volume,
            "theory_volume": self.theory_volume,
            "paper_volume": self.paper_volume,
            "volume_by_axis": {k: dataclasses.asdict(v) for k, v in self.volume_by_axis.items()},
            "memory": self.memory.to_dict(),
            "host_traffic": self.host_traffic.to_dict(),
            "problems": [problem.to_dict() for problem in self.problems],
            "notes": list(self.notes),
            "collectives": [_record(move) for move in self.moves],
            "unread": list(self.unread),
        }

    def to_json(self) -> str:
        """Write the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the verdict, the problems, and what moves and stays."""
        yield Text(self.verdict, style="bold red" if self.problems else "bold green")
        for problem in self.problems:
            yield Text(problem.kind, style="bold red")
            yield problem_grid(problem)
        yield volume_table(self)
        yield collective_table(self.moves)
        yield memory_table(self.memory)
        yield largest_table(self.memory)
        if self.host_traffic.total:
            yield host_table(self.host_traffic)
        for note in self.notes:
            yield hanging("note:", note)

    def __str__(self) -> str:
        """Render the report as plain text."""
        out = io.StringIO()
        Console(file=out, width=160, color_system=None).print(self)
        return out.getvalue()


def build_report(
    evidence: Evidence,
    memory: MemoryReport,
    host_traffic: HostTraffic,
    problems: tuple[Problem, ...],
    notes: Iterable[str],
) -> AuditReport:
    """Put a report together."""
    psi = max(evidence.layout.num_params, 1)
    return AuditReport(
        title=_title(evidence.layout, evidence),
        volume=moved_elements(evidence.ours) / psi,
        judged_volume=judged_elements(evidence.ours) / psi,
        padding_volume=padding_elements(evidence.ours) / psi,
        theory_volume=evidence.theory.elements / psi,
        paper_volume=evidence.theory.paper / psi,
        volume_by_axis=_by_axis(evidence, psi),
        memory=memory,
        host_traffic=host_traffic,
        problems=problems,
        notes=tuple(notes),
        collectives=tuple(move.record for move in evidence.moves),
        unread=evidence.unread,
        moves=evidence.moves,
    )


def _title(layout: Layout, evidence: Evidence) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    return (
        f"ZeRO stage {layout.stage} over {' x '.join(layout.axis)} (N = {layout.num_shards}) on "
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
            seen=moved_elements(moves) / psi,
            theory=theory.get(axes, 0.0) / psi if ours & set(axes) else None,
        )
        for axes, moves in groups.items()
    }


def _record(move: Move) -> dict[str, Any]:
    record = move.record
    return {
        "op": record.op,
        "spelling": record.spelling,
        "role": move.role,
        "dtype": record.dtype,
        "shape": list(record.shape),
        "axes": list(move.spans),
        "group_size": record.group_size,
        "loops": [loop.trip_count for loop in record.loops],
        "is_async": record.is_async,
        "combined": record.combined,
        "moved_elements": record.moved_elements,
        "moved_bytes": record.moved_bytes,
        "name": record.name,
        "op_name": record.op_name,
        "source": record.source,
    }
