"""How a report is laid out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from zerojax._display import make_bar, make_table
from zerojax.audit._host import HostTraffic
from zerojax.audit._memory import MemoryReport
from zerojax.audit._schedule import ScheduleReport
from zerojax.audit._traffic import Move
from zerojax.hlo import sum_moved

#: Columns of figures that have a theory.
BESIDE = (">seen", ">theory", ">seen / theory")


@dataclass(frozen=True)
class AxisVolume:
    """Count the elements per device, step and parameter that move along some axes."""

    seen: float  # what the program moves
    # what the stage has to move; None along axes that are not ZeRO's or the batch's
    theory: float | None


def labelled(texts: Mapping[str, str], style: str = "") -> Table:
    """Make a table of labels and texts, whose further lines are indented."""
    grid = Table.grid(padding=(0, 1), pad_edge=True)
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(style=style)
    for label, text in texts.items():
        grid.add_row(label, Text(text))
    return grid


def volume_table(by_axis: Mapping[str, AxisVolume], totals: Mapping[str, float]) -> Table:
    """Make a table of what moves beside theory, by axis; `totals` are the report's volumes."""
    table = make_table("axis", *BESIDE, title="volume (elements per parameter)")
    for axis, volume in by_axis.items():
        if volume.theory is None:
            table.add_row(axis, f"{volume.seen:.4f}", "not judged", "")
        else:
            table.add_row(axis, *_beside(volume.seen, volume.theory, ".4f"))
    theory = totals["theory_volume"]
    if padding := totals["padding_volume"]:
        table.add_row("of which padding", f"{padding:.4f}", "", _ratio(padding, theory))
    if totals["judged_volume"] != totals["volume"]:
        table.add_row("as judged", *_beside(totals["judged_volume"], theory, ".4f"))
    return table


def collective_table(moves: Iterable[Move]) -> Table:
    """Make a table of collectives by spelling, axes and dtype, the heaviest first."""
    groups: dict[tuple[str, str, str], list[Move]] = {}
    for move in moves:
        key = (move.record.spelling, " x ".join(move.spans), move.record.dtype)
        groups.setdefault(key, []).append(move)
    names = ("what", "along", "dtype", ">sites", ">per step", ">largest", ">B / device", "")
    table = make_table(*names, title="collectives")
    table.caption = "largest: elements; B / device: bytes that a device sends in a step"
    total = sum(move.record.moved_bytes for group in groups.values() for move in group)
    for key, group in sorted(groups.items(), key=lambda item: -sum_moved(item[1], "moved")):
        is_known = all(None not in move.record.trips for move in group)
        times = f"{sum(move.record.runs for move in group):,}" if is_known else "?"
        size = sum(move.record.moved_bytes for move in group)
        largest = max(move.record.elements for move in group)
        table.add_row(
            *key, str(len(group)), times, f"{largest:,}", f"{size:,.0f}", make_bar(size, total)
        )
    return table


def memory_table(memory: MemoryReport) -> Table:
    """Make a table of the bytes of one device by kind, beside theory."""
    table = make_table("what", *BESIDE, "of the peak", title="memory (B per device)")

    def add(name: str, seen: int, theory: int = 0) -> None:
        beside = (f"{seen:,}", f"{theory:,}" if theory else "", _ratio(seen, theory))
        table.add_row(name, *beside, make_bar(seen, memory.peak))

    for name in ("parameters", "masters", "optimizer"):
        if getattr(memory, name) or memory.theory[name]:
            add(name, getattr(memory, name), memory.theory[name])
    for name in ("gradients", "batch", "other", "outputs"):
        if count := getattr(memory, name):
            add(name, count)
    table.add_row("gradients of a step", "", f"{memory.theory['gradients']:,}")
    add("temporaries, with gradients", memory.temporaries)
    add("peak", memory.peak, memory.theory["total"])
    if memory.reused:
        table.add_row("reused by donation", f"{memory.reused:,}")
    if memory.host:
        table.add_row("host", f"{memory.host:,}")
    return table


def host_table(traffic: HostTraffic) -> Table:
    """Make a table of what moves between a device and its host, beside theory."""
    table = make_table("what", *BESIDE, title="host (B per device and step)")
    table.add_row("to the host", f"{traffic.to_host:,}")
    table.add_row("from the host", f"{traffic.from_host:,}")
    if traffic.theory:
        table.add_row("the host's update", *_beside(traffic.updated, traffic.theory))
    return table


def schedule_table(schedule: ScheduleReport) -> Table:
    """Make a table of the most exposed collectives, with what the step waits for below it."""
    names = ("waits for", "of", "beside it", ">links ms", ">exposed ms")
    table = make_table(*names, title="scheduled by the compiler, not measured")
    for column, width in zip(table.columns[:3], (15, 18, 13), strict=True):
        column.no_wrap, column.overflow, column.max_width = True, "ellipsis", width
    for one in schedule.collectives[:5]:
        beside = one.beside_source.rpartition("/")[2] or one.beside or "nothing"
        leaves = ", ".join(one.leaves) or "no leaf"
        table.add_row(
            one.op,
            leaves,
            beside,
            *(f"{seconds * 1e3:.2f}" for seconds in (one.link_seconds, one.exposed_seconds)),
        )
    table.caption = schedule.summary
    return table


def largest_table(memory: MemoryReport) -> Table:
    """Make a table of the largest results of instructions."""
    table = make_table("what", "of", ">B", title="largest results (some share a buffer)")
    for column in table.columns[:2]:
        column.no_wrap, column.overflow = True, "ellipsis"
    for one in memory.largest[:3]:
        table.add_row(Text(one.shape), Text(one.name), f"{one.bytes:,}")
    return table


def _beside(seen: float, theory: float, style: str = ",") -> tuple[str, str, str]:
    return f"{seen:{style}}", f"{theory:{style}}", _ratio(seen, theory)


def _ratio(seen: float, theory: float) -> str:
    return f"{seen / theory:.3f}" if theory and seen else ""
