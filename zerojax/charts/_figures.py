"""The figures: each a function of results that returns a `matplotlib.figure.Figure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerojax._display import DECIMAL, unit_for
from zerojax.audit import AuditReport, ScheduledCollective
from zerojax.charts._bars import (
    PLAIN,
    ROOM,
    STRONG,
    TOO_MUCH,
    Holding,
    bytes_of,
    draw_bars,
    make_figure,
    volume_of,
)
from zerojax.planner import Choices, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
#: Collectives that a schedule shows, and the marks of the stages.
LANES, MARKS = 12, "osD^"
_LEGENDS = ("outside lower left", "outside lower right")


def compare(
    results: Mapping[str, Holding], *, title: str = "", available: float | None = None
) -> Figure:
    """Draw the bytes of one device by kind, up to its peak, and what it moves by mesh axis.

    Args:
        results: plans, audit reports or what `layout.describe(tx)` returns, by the names that stand
            below their bars. Lines are the theory: bytes of the states by the stage's formula, and
            for reports elements per parameter.
        title: above the figure.
        available: bytes that a device has; a plan's hardware says it.

    Raises:
        TypeError: something else is among the results.
    """
    moved = {name: bar for name, one in results.items() if (bar := volume_of(one))}
    widths, inches = ((6, 4), 11) if moved else ((1,), 6.5)
    figure, drawings = make_figure(title, (inches, 5.2), widths)
    _draw_memory(drawings[0], results, available)
    for axes in drawings[1:]:
        axes.set(title="moved by one device in a step", ylabel="elements per parameter")
        draw_bars(axes, moved)
    for axes, place in zip(drawings, _LEGENDS, strict=False):
        look: Any = {"loc": place, "ncols": 3, "frameon": False, "fontsize": "small"}
        figure.legend(*axes.get_legend_handles_labels(), **look)
    return figure


def schedule(report: AuditReport, *, title: str = "") -> Figure:
    """Draw when each collective keeps links busy, as scheduled, and when the device waits for it.

    Of a loop the first two turns are drawn; later ones are like the second.

    Args:
        report: of a step that was compiled for a TPU or GPU.
        title: above the figure; the schedule's summary by default.

    Raises:
        ValueError: the report has no schedule: that of a CPU's program, or of an unknown chip.
    """
    if report.schedule is None:
        raise ValueError(
            "the report has no schedule, as of a program for a CPU; compile the step for a TPU or "
            "GPU, for instance on zerojax.topology_mesh('v5p:2x2x2', {'data': 8})"
        )
    lanes = [one for one in report.schedule.collectives if one.runs]
    lanes = sorted(lanes, key=lambda one: -one.link_seconds)[:LANES]
    lanes.sort(key=lambda one: one.runs[0])
    figure, (axes,) = make_figure(title or report.schedule.summary, (10, 1.6 + 0.42 * len(lanes)))
    for at, one in enumerate(lanes):
        for begin, end, waits in one.runs:
            bar = {"y": at, "height": 0.7, "edgecolor": "white", "linewidth": 0.3}
            axes.barh(left=1e3 * begin, width=1e3 * (end - begin), color=PLAIN, **bar)
            exposed = {"left": 1e3 * (end - waits), "width": 1e3 * waits, "hatch": "////"}
            axes.barh(color=TOO_MUCH, **exposed, **bar)
    axes.barh(0, 0, color=PLAIN, label="links are busy")
    axes.barh(0, 0, color=TOO_MUCH, hatch="////", edgecolor="white", label="the device waits")
    axes.set_yticks(range(len(lanes)), [_lane(one) for one in lanes], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(f"ms from the beginning of a step on {report.schedule.hardware}, scheduled")
    axes.grid(axis="x", alpha=0.25)
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize="small")
    return figure


def pareto(choices: Choices, *, title: str = "") -> Figure:
    """Draw the time and the peak of all that a search planned, and the front of what fits.

    Args:
        choices: what `search_plans` found.
        title: above the figure.
    """
    figure, (axes,) = make_figure(title, (8, 5))
    unit = unit_for(max(one.bytes.total for one in choices.tried), DECIMAL)
    for mark, stage in zip(MARKS, sorted({one.stage for one in choices.tried}), strict=False):
        points = [_point(one, unit.size) for one in choices.tried if one.stage == stage]
        look = {"s": 26, "marker": mark, "color": PLAIN, "edgecolor": STRONG, "linewidth": 0.5}
        axes.scatter(*zip(*points, strict=True), label=f"stage {stage}", **look)
    if front := [_point(one, unit.size) for one in choices.pareto]:
        axes.plot(*zip(*front, strict=True), "-", color=STRONG, label="none is faster and smaller")
    axes.axhline(choices.limit / unit.size, color=TOO_MUCH, linestyle="--", label="the limit")
    axes.set(xlabel="time of a step, at least (ms)", ylabel=f"peak of a device ({unit.name})")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False, fontsize="small")
    return figure


def training(metrics: Sequence[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Draw what a run learned, in bits per byte.

    Args:
        metrics: the lines of its metrics.jsonl.
        title: above the figure.
    """
    figure, (axes,) = make_figure(title, (8, 4.6))
    curves = (("training", "train", PLAIN, "-"), ("held out", "validation", STRONG, "o-"))
    for label, name, color, style in curves:
        found = ((line["step"], line.get(f"{name}_bits_per_byte")) for line in metrics)
        points = [point for point in found if point[1] is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(steps, values, style, color=color, linewidth=1, markersize=4, label=label)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _draw_memory(axes: Axes, found: Mapping[str, Holding], available: float | None) -> None:
    bars = {name: bytes_of(one) for name, one in found.items()}
    if available is None:
        limits = {one.hardware.memory for one in found.values() if isinstance(one, Plan)}
        available = limits.pop() if len(limits) == 1 else 0
    if available:
        bars = {name: bar.within(available) for name, bar in bars.items()}
    highest = max(bar.top for bar in bars.values())
    unit = unit_for(highest, DECIMAL)
    of = f", of {unit.words(available)}" if available else ""
    axes.set(title=f"one device's memory{of}", ylabel=f"{unit.name} per device")
    draw_bars(axes, bars, unit.size, unit.words)
    if 0 < available <= HEADROOM * highest:
        line: dict[str, Any] = {"color": TOO_MUCH, "linewidth": 1.3, "zorder": 0}
        axes.axhline(available / unit.size, label="a device's memory", **line)
        axes.set_ylim(0, ROOM * max(highest, available) / unit.size)


def _point(one: Plan, unit: float) -> tuple[float, float]:
    return 1e3 * one.step_time, one.bytes.total / unit


def _lane(one: ScheduledCollective) -> str:
    times = "".join(f" x {count}" for count in one.trips if count and count > 1)
    leaf = one.leaves[0] if one.leaves else "no leaf"
    more = f", {len(one.leaves) - 1} more" if one.leaves[1:] else ""
    return f"{one.op} of {leaf}{more}{times}"
