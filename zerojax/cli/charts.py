"""The drawings of the commands: functions of data that return figures. matplotlib waits for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.cli.shared._units import Unit
from zerojax.planner import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Steps, and the values of a metric at them.
Curve = tuple[Sequence[int], Sequence[float]]
#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"
#: What a compiler refused for its memory, it does not tell apart.
REFUSED = "what the refused program needs"
#: How parts of a bar look, from the bottom to the top.
PARTS: dict[str, dict[str, Any]] = {
    "parameters": {"color": "#4477aa"},
    "masters": {"color": "#ccbb44"},
    "optimizer": {"color": "#228833"},
    "gradients": {"color": "#ee6677"},
    "gradients kept": {"color": "#aa3377"},
    "batch and the rest": {"color": "#bbbbbb"},
    "gradients, activations": {"color": "#ee6677"},
    "activations and buffers": {"color": "#bbbbbb"},
    TOGETHER: {"facecolor": "#bbbbbb", "edgecolor": "#ee6677", "hatch": "////", "linewidth": 0},
    REFUSED: {"facecolor": "white", "edgecolor": "#ee6677", "hatch": "///", "linewidth": 0.8},
    "volume": {"color": "#66ccee"},
}
STAGES = {0: "#222222", 1: "#332288", 2: "#44aa99", 3: "#aa4499"}
TRAINING, HELD_OUT = "#88aacc", "#bb5566"
THEORY, TOO_MUCH, ASKED = "#222222", "#bb5566", "0.75"
WIDTH, DASHES = 0.62, (0, (3, 2))
#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "xytext": (0, 4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of parts, one on top of the other.

    Attributes:
        name: what stands below it.
        parts: sizes by name, those of `PARTS`.
        label: what stands above it.
        theory: the height of a dashed line; None for none.
        fits: False writes the label in red.
    """

    name: str
    parts: Mapping[str, float]
    label: str
    theory: float | None = None
    fits: bool = True

    @property
    def top(self) -> float:
        """The height of all parts together, or of the line where that is higher."""
        return max(sum(self.parts.values()), self.theory or 0)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, dpi=130, format="png")


def training_figure(title: str, *, training: Curve, held_out: Curve) -> Figure:
    """Draw what was learned: bits per byte of each step, and of each evaluation."""
    figure, (axes,) = _figure(title, (8, 4.6), (1,))
    axes.plot(*training, color=TRAINING, linewidth=1, label="training")
    axes.plot(*held_out, "o-", color=HELD_OUT, markersize=4, label="held out")
    for step, loss in list(zip(*held_out, strict=True))[-1:]:
        style = {"color": HELD_OUT, "fontweight": "bold", **ABOVE, "ha": "right"}
        axes.annotate(f"{loss:.2f}", (step, loss), **style)
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return figure


def stages_figure(
    title: str, *, memory: Sequence[Bar], volume: Sequence[Bar], available: float, unit: Unit
) -> Figure:
    """Draw what one device holds and moves under each stage, as compilers have it.

    Args:
        memory: bytes of a device.
        volume: elements that a device moves, per parameter.
        available: bytes that a device has.
        unit: of the bytes.
    """
    figure, (left, right) = _figure(title, (11, 5.2), (6, 4))
    handles = _draw_memory(left, memory, available, unit)
    _draw_bars(right, volume)
    right.set_ylim(0, (max(bar.top for bar in volume) or 1.0) * 1.16)
    right.set(title="moved by one device in a step", ylabel="elements per parameter of the model")
    handles += [*_part_handles(volume), _line("theory: states with gradients; volume")]
    _legend(figure, handles)
    return figure


def plan_figure(
    title: str,
    *,
    memory: Sequence[Bar],
    times: Mapping[int, Sequence[Plan]],
    available: float,
    unit: Unit,
    asked: int,
) -> Figure:
    """Draw what a device holds under each stage, and how long a step takes by number of devices.

    Args:
        memory: bytes of a device.
        times: by stage, a plan for each number of devices.
        available: bytes that a device has.
        unit: of the bytes.
        asked: the number of devices of the bars.
    """
    figure, (left, right) = _figure(title, (11, 6.2), (5, 5))
    handles = _draw_memory(left, memory, available, unit)
    handles += [_line("states by the formula (in brackets)"), *_draw_times(right, times)]
    right.axvline(asked, color=ASKED, linewidth=1.5, zorder=-1)
    handles.append(_line(f"{asked:,} devices", color=ASKED, linestyle="-"))
    _legend(figure, handles)
    return figure


def plan_bar(plan: Plan, unit: Unit) -> Bar:
    """Part a plan's peak by kind."""
    held = plan.bytes
    parts = {
        "parameters": held.parameters,
        "masters": held.masters,
        "optimizer": held.optimizer - held.masters,
    }
    if held.total < held.states:
        parts[TOGETHER] = held.total - sum(parts.values())
    else:
        parts |= {"gradients": held.gradients, "activations and buffers": held.activations}
    return Bar(
        name=f"stage {plan.stage}\n({unit.number(held.theory)})",
        parts=parts,
        label=unit.words(held.total) + (f"\nhost {unit.number(held.host)}" if held.host else ""),
        theory=held.theory,
        fits=plan.fits,
    )


def _figure(
    title: str, size: tuple[float, float], widths: tuple[float, ...]
) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure of drawings side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    drawings = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes in drawings:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, drawings


def _legend(figure: Figure, handles: list[Any]) -> None:
    place = "outside lower center"
    figure.legend(handles=handles, loc=place, ncols=4, frameon=False, fontsize="small")


def _draw_bars(axes: Axes, bars: Sequence[Bar], unit: float = 1.0) -> None:
    """Draw bars with their labels and lines; `unit` is what 1 on the axis is."""
    half = WIDTH / 2 + 0.06
    for place, bar in enumerate(bars):
        bottom = 0.0
        for name, size in bar.parts.items():
            axes.bar(place, size / unit, WIDTH, bottom=bottom, **PARTS[name])
            bottom += size / unit
        if bar.theory is not None:
            line, ends = bar.theory / unit, (place - half, place + half)
            axes.hlines(line, *ends, color=THEORY, linestyles=DASHES, linewidth=1.3, zorder=4)
        look = {"color": "black" if bar.fits else TOO_MUCH, "fontweight": "bold", **ABOVE}
        axes.annotate(bar.label, (place, bar.top / unit), **look)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [bar.name for bar in bars])


def _draw_memory(axes: Axes, bars: Sequence[Bar], available: float, unit: Unit) -> list[Any]:
    """Draw bars of bytes beside what a device has, and return what the legend says of them."""
    highest = max(bar.top for bar in bars)
    is_near = available <= HEADROOM * highest
    limit = max(highest, available if is_near else 0) / unit.size * 1.16
    _draw_bars(axes, bars, unit.size)
    if is_near:
        axes.axhline(available / unit.size, color=TOO_MUCH, linewidth=1.3, zorder=0)
    axes.set_ylim(0, limit)
    axes.set(title="one device's memory at its peak", ylabel=f"{unit.name} per device")
    label = f"a device's memory: {unit.words(available)}" + ("" if is_near else ", far above")
    return [*_part_handles(bars), _line(label, color=TOO_MUCH, linestyle="-")]


def _part_handles(bars: Sequence[Bar]) -> list[Any]:
    """Return the legend of the parts that can be seen."""
    from matplotlib.patches import Patch

    seen = {name for bar in bars for name, size in bar.parts.items() if size > 0.002 * bar.top}
    return [Patch(label=name, **look) for name, look in PARTS.items() if name in seen]


def _line(label: str, color: str = THEORY, linestyle: Any = DASHES, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=linestyle, label=label, **look)


def _draw_times(axes: Axes, times: Mapping[int, Sequence[Plan]]) -> list[Any]:
    """Draw a line for each stage, hollow where a device is too small; return their legend."""
    from matplotlib.ticker import LogLocator

    handles, plans = [], [one for by_count in times.values() for one in by_count]
    for stage, by_count in times.items():
        # Stages often coincide: earlier ones are wider, so that they show beneath.
        look: dict[str, Any] = {"color": STAGES[stage], "linewidth": 4.5 - 1.1 * stage}
        points = [(one.num_devices, 1e3 * one.step_time) for one in by_count]
        axes.plot(*zip(*points, strict=True), alpha=0.55, zorder=stage, **look)
        handles.append(_line(f"stage {stage}", linestyle="-", **look))
        for point, one in zip(points, by_count, strict=True):
            look = {"color": STAGES[stage], "markersize": 7.5 - stage, "zorder": 10 + stage}
            look["markerfacecolor"] = STAGES[stage] if one.fits else "white"
            axes.plot(*point, "o", **look)
    if not all(one.fits for one in plans):
        mark = {"linestyle": "", "color": "0.35", "marker": "o", "markerfacecolor": "white"}
        handles.append(_line("hollow: does not fit", **mark))
    axes.set(title="time of a step", xlabel="devices", ylabel="ms per step, at least")
    axes.set_xscale("log", base=2)
    counts = sorted({one.num_devices for one in plans})
    ticks = counts[:: 1 + len(counts) // 7]
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.25)
    return handles
