"""How a report is laid out, for a width of 100 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from zerojax.audit._host import HostTraffic
from zerojax.audit._memory import NAMES, MemoryReport
from zerojax.audit._problems import Problem
from zerojax.audit._traffic import Move, moved_elements

#: The part of the peak from which on something small has a row of its own.
LEAST = 0.001


@dataclass(frozen=True)
class AxisVolume:
    """Count the elements per device, step and parameter that move along some axes.

    Attributes:
        seen: what the program moves.
        theory: what the stage has to move; None along axes that are not ZeRO's or the batch's.
    """

    seen: float
    theory: float | None


def problem_grid(problem: Problem) -> Table:
    """Make a table of the parts of a problem."""
    grid = Table.grid(padding=(0, 1), pad_edge=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style="red")
    for name in ("where", "seen", "expected", "remedy"):
        grid.add_row(f"{name}:", Text(getattr(problem, name)))
    return grid


def hanging(label: str, text: str) -> Table:
    """Indent the further lines of a text."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(label, Text(text))
    return grid


def volume_table(
    by_axis: Mapping[str, AxisVolume],
    *,
    seen: float,
    judged: float,
    padding: float,
    theory: float,
    paper: float,
) -> Table:
    """Make a table of what moves beside theory, by axis."""
    table = _table("volume (elements per parameter)", 1, "axis", "seen", "theory", "seen / theory")
    for axis, volume in by_axis.items():
        if volume.theory is None:
            table.add_row(axis, f"{volume.seen:.4f}", "not judged", "")
        else:
            ratio = f"{volume.seen / volume.theory:.3f}" if volume.theory else "-"
            table.add_row(axis, f"{volume.seen:.4f}", f"{volume.theory:.4f}", ratio)
    if padding:
        ratio = f"{padding / theory:.3f}" if theory else ""
        table.add_row("of which padding", f"{padding:.4f}", "", ratio)
    if judged != seen:
        ratio = f"{judged / theory:.3f}" if theory else ""
        table.add_row("as judged", f"{judged:.4f}", f"{theory:.4f}", ratio)
    if abs(paper - theory) > 5e-5:
        table.add_row("the paper's number", "", f"{paper:.4f}", "")
    return table


def collective_table(moves: Iterable[Move]) -> Table:
    """Make a table of collectives by spelling, axes and dtype, the heaviest first."""
    groups: dict[tuple[str, str, str], list[Move]] = {}
    for move in moves:
        key = (move.record.spelling, " x ".join(move.spans), move.record.dtype)
        groups.setdefault(key, []).append(move)
    table = _table(
        "collectives", 3, "what", "along", "dtype", "sites", "per step", "largest", "B / device"
    )
    table.caption = "largest: elements; B / device: bytes that a device sends in a step"
    table.caption_justify = "left"
    ordered = sorted(groups.items(), key=lambda item: -moved_elements(item[1]))
    for (spelling, axes, dtype), group in ordered:
        runs = [move.record.trip_count for move in group]
        runs = "?" if None in runs else f"{sum(run or 0 for run in runs):,}"
        size = sum(move.record.moved_bytes for move in group)
        largest = max(move.record.elements for move in group)
        table.add_row(spelling, axes, dtype, str(len(group)), runs, f"{largest:,}", f"{size:,.0f}")
    return table


def memory_table(memory: MemoryReport) -> Table:
    """Make a table of the bytes of one device by kind, beside theory."""
    table = _table("memory (B per device)", 1, "what", "seen", "theory", "seen / theory")

    def row(name: str, seen: int | None, theory: int | None = None) -> None:
        ratio = f"{seen / theory:.3f}" if theory and seen else ""
        texts = ["" if count is None else f"{count:,}" for count in (seen, theory)]
        table.add_row(name, *texts, ratio)

    for name in ("parameters", "masters", "optimizer"):
        if getattr(memory, name) or memory.theory[name]:
            row(name, getattr(memory, name), memory.theory[name])
    if memory.gradients:
        row("gradients", memory.gradients)
    row("gradients of a step", None, memory.theory["gradients"])
    rest = {name: getattr(memory, name) for name in (NAMES["batch"], NAMES["other"], "outputs")}
    for name, count in rest.items():
        if count >= LEAST * memory.peak:
            row(name, count)
    small = {name: count for name, count in rest.items() if 0 < count < LEAST * memory.peak}
    if small:
        row(", ".join(small), sum(small.values()))
    row("temporaries, with gradients", memory.temporaries)
    row("peak", memory.peak, memory.theory["total"])
    if memory.reused:
        row("saved by donation", memory.reused)
    lost = memory.fragmentation
    told = "not told by this compiler" if lost is None else f"{lost:.2%}"
    table.add_row("fragmentation of temporaries", told, "", "")
    if memory.host:
        row("host", memory.host)
    return table


def host_table(traffic: HostTraffic) -> Table:
    """Make a table of what moves between a device and its host, beside theory."""
    table = _table("host (B per device and step)", 1, "what", "seen", "theory", "seen / theory")
    table.add_row("to the host", f"{traffic.to_host:,}", "", "")
    table.add_row("from the host", f"{traffic.from_host:,}", "", "")
    if traffic.theory:
        ratio = f"{traffic.updated / traffic.theory:.3f}"
        table.add_row("the host's update", f"{traffic.updated:,}", f"{traffic.theory:,}", ratio)
    return table


def largest_table(memory: MemoryReport) -> Table:
    """Make a table of the largest results of instructions."""
    table = _table("largest results (some share a buffer)", 2, "what", "of", "B")
    for column in table.columns[:2]:
        column.no_wrap, column.overflow = True, "ellipsis"
    for one in memory.largest[:3]:
        table.add_row(Text(one.shape), Text(one.name), f"{one.bytes:,}")
    return table


def _table(title: str, num_texts: int, *names: str) -> Table:
    """Make a table whose first columns are texts and whose others are figures."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < num_texts else "right")
    return table
