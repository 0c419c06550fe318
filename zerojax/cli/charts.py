"""The drawings of the commands: functions of data that return figures. matplotlib waits for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax.cli.shared._screen import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Steps, and the values of a metric at them.
Curve = tuple[Sequence[int], Sequence[float]]
TRAINING, HELD_OUT, THEORY, TOO_MUCH = "#88aacc", "#bb5566", "#222222", "#bb5566"
#: Half of a bar, and how far the line of its theory reaches beyond it.
HALF, BEYOND = 0.31, 0.06
#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
#: The height of the axes in that of the highest bar, which has a label above it.
ROOM = 1.16
ABOVE: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "xytext": (0, 4)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of parts, one on top of the other.

    Attributes:
        name: what stands below it.
        parts: sizes by name.
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
    title: str,
    *,
    memory: Sequence[Bar],
    beside: Sequence[Bar],
    axes: Mapping[str, str],
    available: float,
    unit: Unit,
) -> Figure:
    """Draw what one device holds under each stage, and beside it what it moves or waits for.

    Args:
        memory: bytes of a device.
        beside: the other bars.
        axes: their `title` and `ylabel`.
        available: bytes that a device has.
        unit: of the bytes.
    """
    figure, (left, right) = _figure(title, (11, 5.2), (6, 4))
    there = unit.words(available)
    left.set(title=f"one device's memory at its peak, of {there}", ylabel=f"{unit.name} per device")
    _draw_bars(left, memory, unit.size)
    highest = max(bar.top for bar in memory)
    if available <= HEADROOM * highest:
        label, line = "a device's memory", available / unit.size
        left.axhline(line, color=TOO_MUCH, linewidth=1.3, zorder=0, label=label)
        left.set_ylim(0, ROOM * max(highest, available) / unit.size)
    right.set(**axes)
    _draw_bars(right, beside, label="_", color="0.6")  # which the title names
    handles, _ = left.get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    return figure


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


def _draw_bars(axes: Axes, bars: Sequence[Bar], unit: float = 1.0, **look: Any) -> None:
    """Draw bars with their labels and lines; `unit` is what 1 on the axis is."""
    places, bottoms = range(len(bars)), [0.0] * len(bars)
    for name in dict.fromkeys(name for bar in bars for name in bar.parts):
        sizes = [bar.parts.get(name, 0) / unit for bar in bars]
        axes.bar(places, sizes, 2 * HALF, bottom=bottoms, **{"label": name, **look})
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    half = HALF + BEYOND
    lines = [(at, bar.theory / unit) for at, bar in enumerate(bars) if bar.theory is not None]
    if lines:
        starts, ends, heights = zip(*((at - half, at + half, y) for at, y in lines), strict=True)
        dashed: dict[str, Any] = {"color": THEORY, "linestyles": (0, (3, 2)), "linewidth": 1.3}
        axes.hlines(heights, starts, ends, zorder=4, label="by the theory", **dashed)
    for at, bar in enumerate(bars):
        style = {"color": "black" if bar.fits else TOO_MUCH, "fontweight": "bold", **ABOVE}
        axes.annotate(bar.label, (at, bar.top / unit), **style)
    axes.set_xticks(places, [bar.name for bar in bars])
    axes.set_ylim(0, ROOM * (max(bar.top for bar in bars) or unit) / unit)
