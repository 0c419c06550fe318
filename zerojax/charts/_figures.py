"""Functions of results that return a `matplotlib.figure.Figure`, and the bars that they draw."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from zerojax._display import DECIMAL, decimal, duration, unit_for
from zerojax._extras import extra
from zerojax._tree import grouped
from zerojax.audit import AuditReport, ScheduledCollective
from zerojax.layout import Description
from zerojax.planner import Choices, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"
BUFFERS, TEMPORARIES = "activations and buffers", "gradients, activations"
KEPT, REST = "gradients kept", "batch and the rest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of parts, one on top of the other.

    Attributes:
        parts: bytes, or elements per parameter, by name.
        label: what stands above it; empty for the size of its parts.
        theory: the height of a dashed line; None for none.
        fits: False writes the label in red.
    """

    parts: Mapping[str, float]
    label: str = ""
    theory: float | None = None
    fits: bool = True

    @property
    def top(self) -> float:
        return max(sum(self.parts.values()), self.theory or 0)


#: Kinds of model states, from the bottom of a bar on.
KINDS = ("parameters", "masters", "optimizer", "gradients")
#: What has bytes by kind.
Holding: TypeAlias = Plan | AuditReport | Description | Bar


def bytes_of(held: Holding) -> Bar:
    """Return the bytes of a device by kind, up to its peak, of what is `held`; else a TypeError."""
    if isinstance(held, Bar):
        return held
    if isinstance(held, Description):
        return Bar(parts={kind: held.bytes[kind] for kind in KINDS}, theory=held.theory["total"])
    if isinstance(held, AuditReport):
        memory = held.memory
        parts = {name: getattr(memory, name) for name in ("parameters", "masters", "optimizer")}
        parts |= {KEPT: memory.gradients, TEMPORARIES: memory.temporaries}
        parts[REST] = memory.batch + memory.other + memory.outputs
        return Bar(parts=parts, theory=memory.theory["total"])
    if not isinstance(held, Plan):
        told = f"a plan, an audit report or a description is drawn, got {type(held).__name__}; of a"
        raise TypeError(f"{told} layout, layout.describe(tx)")
    size = held.bytes
    parts = {"parameters": size.parameters, "masters": size.masters}
    parts["optimizer"] = size.optimizer - size.masters
    if size.total < size.states:
        parts[TOGETHER] = size.total - sum(parts.values())
    else:
        parts |= {"gradients": size.gradients, BUFFERS: size.activations}
    label = f"{decimal(sum(parts.values()))}\nhost {decimal(size.host)}" if size.host else ""
    return Bar(parts=parts, label=label, theory=size.theory, fits=held.fits)


def volume_of(held: Holding) -> Bar | None:
    """Return what a device moves in a step by mesh axis; None where that is not known."""
    if isinstance(held, Plan):
        parts = {f"along {' x '.join(axes)}": moved for axes, moved in held.volume_by_axes.items()}
        return Bar(parts=parts, label=f"{held.volume:.3f}\n≥ {duration(held.step_time)}")
    if isinstance(held, AuditReport):
        by_axis = held.volume_by_axis
        parts = {f"along {axes}": moved.seen for axes, moved in by_axis.items()}
        theory = sum(moved.theory or 0 for moved in by_axis.values())
        return Bar(parts=parts, label=f"{sum(parts.values()):.3f}", theory=theory)
    return None


#: From dark to light, then hatched ones, so that a grey print tells them apart as well.
SOLID = ("#16324f", "#3c6e9e", "#7fadd1", "#bcd5e8")
HATCHED = ("#e0a044", "#b3705a", "#c9c9c9", "#6e8b57", "#7d6a94")
#: A part has one shade in all pictures; parts of other names take those that are not in use.
PARTS = (*KINDS, BUFFERS, TOGETHER, REST, TEMPORARIES, KEPT)
SHADES: Mapping[str, str] = dict(zip(PARTS, SOLID + HATCHED, strict=True))
FAINT, PLAIN, STRONG, TOO_MUCH = "#e3ebf3", "#88aacc", "#16324f", "#b3243b"
#: Half of a bar, and of the line of its theory.
HALF, REACH = 0.31, 0.37
#: The height of the axes in that of the highest bar, which has a label above it.
ROOM = 1.16
#: On white, so that a line behind a label does not strike it through.
ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "xytext": (0, 4)}
ABOVE["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def write(figure: Figure, path: Path | str) -> None:
    """Write a figure to a path as PNG."""
    figure.savefig(path, dpi=130, format="png")


def make_figure(
    title: str, size: tuple[float, float], widths: tuple[float, ...] = (1,)
) -> tuple[Figure, Sequence[Axes]]:
    with extra("cli", "zerojax.charts"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, wrap=True)
    drawings = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes in drawings:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, drawings


def draw_bars(
    axes: Axes, bars: Mapping[str, Bar], unit: float = 1.0, words: Callable[[float], str] = str
) -> None:
    """Draw bars, by the names that stand below, with their labels and lines.

    `unit` is what 1 on the axis is; `words` writes the size of a bar that has no label.
    """
    places, bottoms = range(len(bars)), [0.0] * len(bars)
    names = dict.fromkeys(name for bar in bars.values() for name in bar.parts)
    free = itertools.cycle([*(SHADES[name] for name in SHADES if name not in names), PLAIN])
    highest = (max(bar.top for bar in bars.values()) or unit) / unit
    for name in names:
        sizes = [bar.parts.get(name, 0) / unit for bar in bars.values()]
        shade = SHADES.get(name) or next(free)
        look = {"color": shade, "edgecolor": "white", "linewidth": 0.5}
        look["label"] = name if max(sizes) > 0.01 * highest else "_"  # less is in no legend
        look["hatch"] = "///" if shade in HATCHED else ""
        axes.bar(places, sizes, 2 * HALF, bottom=bottoms, **look)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    if lines := [(at, bar.theory / unit) for at, bar in enumerate(bars.values()) if bar.theory]:
        at, heights = np.array(lines).T
        dashed: dict[str, Any] = {"color": "#222222", "linestyles": (0, (3, 2)), "linewidth": 1.3}
        axes.hlines(heights, at - REACH, at + REACH, zorder=4, label="by the theory", **dashed)
    for at, (bar, held) in enumerate(zip(bars.values(), bottoms, strict=True)):
        style = {"color": "black" if bar.fits else TOO_MUCH, "fontweight": "bold", **ABOVE}
        style["fontsize"] = max(6, min(10, 36 / len(bars)))  # else neighbours touch
        # Above a line of the theory that is near, else below it: it would be read as the theory's.
        top = bar.top / unit if bar.top / unit < held + 0.08 * highest else held
        axes.annotate(bar.label or words(held * unit), (at, top), **style)
    axes.set_xticks(places, list(bars))
    axes.set_ylim(0, ROOM * highest)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
#: Collectives that a schedule shows, and the marks of the stages.
LANES, MARKS = 12, "osD^"
LEGEND: Any = {"ncols": 3, "frameon": False, "fontsize": "small"}


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
        ValueError: there are none.
    """
    if not results:
        raise ValueError("compare draws plans, reports or descriptions by their names; got none")
    moved = {name: bar for name, one in results.items() if (bar := volume_of(one))}
    widths, inches = ((6, 4), 11) if moved else ((1,), 6.5)
    figure, drawings = make_figure(title, (inches, 5.2), widths)
    _draw_memory(drawings[0], results, available)
    if title and not moved:
        drawings[0].set_title("")
    for axes in drawings[1:]:
        axes.set(title="moved by one device in a step", ylabel="elements per parameter")
        draw_bars(axes, moved)
    for axes, side in zip(drawings, ("left", "right"), strict=False):
        look = LEGEND | {"loc": f"outside lower {side}"}
        figure.legend(*axes.get_legend_handles_labels(), **look)
    return figure


def schedule(report: AuditReport, *, title: str = "") -> Figure:
    """Draw when each collective keeps links busy, as scheduled, and when the device waits for it.

    Those of one kind and leaf share a line, and lines that the device waits for longest are drawn.
    Of a loop there are two turns, on a pale bar that reaches to its last.

    Args:
        report: of a step that was compiled for a TPU or GPU.
        title: above the figure; the schedule's summary by default.

    Raises:
        ValueError: the report has no schedule: that of a CPU's program, or of an unknown chip.
    """
    if (found := report.schedule) is None:
        raise ValueError(
            "the report has no schedule, as of a program for a CPU; compile the step for a TPU or "
            "GPU, for instance on zerojax.topology_mesh('v5p:2x2x2', {'data': 8})"
        )
    collectives = [one for one in found.collectives if one.runs]
    lanes = grouped(collectives, _lane)
    waits = {name: 1e3 * sum(x.exposed_seconds for x in lane) for name, lane in lanes.items()}
    names = sorted(waits, key=lambda name: -waits[name])[:LANES]
    names.sort(key=lambda name: min(one.runs[0] for one in lanes[name]))
    drawn = [(at, one) for at, name in enumerate(names) for one in lanes[name]]
    title = f"{title or found.summary}; {len(drawn)} of {len(collectives)} collectives"
    figure, (axes,) = make_figure(title, (10, 1.6 + 0.36 * len(names)))
    for at, one in drawn:
        begins, ends, waited = 1e3 * np.array(one.runs).T
        whole, loop = 1e3 * one.until - begins[0], "a loop, with two of its turns"
        axes.barh(at, whole, 0.7, begins[0], color=FAINT, zorder=0, label=loop)
        busy: Any = {"color": PLAIN, "edgecolor": PLAIN, "label": "links are busy"}
        axes.barh(at, ends - begins, 0.7, begins, **busy)
        axes.barh(at, waited, 0.7, ends - waited, color=TOO_MUCH, label="the device waits")
    axes.set_yticks(range(len(names)), [f"{x}: waits {waits[x]:.2f} ms" for x in names])
    axes.invert_yaxis()
    axes.set_xlabel(f"ms of a step on {found.hardware}, scheduled")
    axes.set_xlim(0, 1e3 * found.step_seconds)
    axes.tick_params(axis="y", labelsize="small")
    axes.grid(axis="x", alpha=0.25)
    rows = (x[:3] for x in axes.get_legend_handles_labels())
    figure.legend(*rows, loc="outside lower right", **LEGEND)
    return figure


def pareto(choices: Choices, *, title: str = "") -> Figure:
    """Draw the time and the peak of all that a search planned, and the front of what fits.

    Args:
        choices: what `search_plans` found.
        title: above the figure.
    """
    figure, (axes,) = make_figure(title, (8, 5))
    unit = unit_for(max(one.bytes.total for one in choices.tried), DECIMAL)

    def points(plans: Iterable[Plan]) -> Any:
        return zip(*((1e3 * x.step_time, x.bytes.total / unit.size) for x in plans), strict=True)

    for stage, (mark, shade) in enumerate(zip(MARKS, reversed(SOLID), strict=True)):
        if plans := [one for one in choices.tried if one.stage == stage]:
            look = {"s": 26, "marker": mark, "color": shade, "edgecolor": STRONG, "linewidth": 0.5}
            axes.scatter(*points(plans), label=f"stage {stage}", zorder=3, **look)
    if front := choices.pareto:
        axes.plot(*points(front), "-", color=STRONG, label="none is faster and smaller")
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
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def _draw_memory(axes: Axes, found: Mapping[str, Holding], available: float | None) -> None:
    bars = {name: bytes_of(one) for name, one in found.items()}
    if available is None:
        limits = {one.hardware.memory for one in found.values() if isinstance(one, Plan)}
        available = limits.pop() if len(limits) == 1 else 0
    if available:
        for name, bar in bars.items():
            fits = bar.fits and sum(bar.parts.values()) <= available
            bars[name] = dataclasses.replace(bar, fits=fits)
    highest = max(bar.top for bar in bars.values())
    unit = unit_for(highest, DECIMAL)
    held = f"used of a device's {unit.words(available)}" if available else "one device's memory"
    axes.set(title=held, ylabel=unit.name)
    draw_bars(axes, bars, unit.size, unit.words)
    if 0 < available <= HEADROOM * highest:
        line: dict[str, Any] = {"color": TOO_MUCH, "linewidth": 1.3, "zorder": 0}
        axes.axhline(available / unit.size, label="a device's memory", **line)
        axes.set_ylim(0, ROOM * max(highest, available) / unit.size)


def _lane(one: ScheduledCollective) -> str:
    leaf = one.leaves[0] if one.leaves else "no leaf"
    more = f", {len(one.leaves) - 1} more" if one.leaves[1:] else ""
    return f"{one.op} of {leaf}{more}"
