"""What figures are drawn with; matplotlib is imported where one is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax._extras import extra
from zerojax.charts._bars import Bar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: From dark to light, then hatched ones, so that a grey print tells them apart as well.
SOLID = ("#16324f", "#3c6e9e", "#7fadd1", "#bcd5e8")
HATCHED = ("#e0a044", "#b3705a", "#c9c9c9", "#6e8b57", "#7d6a94")
SHADES = SOLID + HATCHED
PLAIN, STRONG, TOO_MUCH = "#88aacc", "#16324f", "#b3243b"
#: Half of a bar, and how far the line of its theory reaches beyond it.
HALF, BEYOND = 0.31, 0.06
#: The height of the axes in that of the highest bar, which has a label above it.
ROOM = 1.16
#: On white, so that a line behind a label does not strike it through.
ABOVE: dict[str, Any] = {
    "textcoords": "offset points",
    "ha": "center",
    "xytext": (0, 4),
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.5},
}


def write(figure: Figure, path: Path | str) -> None:
    """Write a figure to a path as PNG."""
    figure.savefig(path, dpi=130, format="png")


def make_figure(
    title: str, size: tuple[float, float], widths: tuple[float, ...] = (1,)
) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure of drawings side by side."""
    with extra("cli", "zerojax.charts"):
        from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    drawings = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    for axes in drawings:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, drawings


def draw_bars(
    axes: Axes, bars: Mapping[str, Bar], unit: float = 1.0, words: Callable[[float], str] = str
) -> None:
    """Draw bars with their labels and lines.

    Args:
        axes: where.
        bars: by the name that stands below.
        unit: what 1 on the axis is.
        words: writes the size of a bar that has no label.
    """
    places, bottoms = range(len(bars)), [0.0] * len(bars)
    names = dict.fromkeys(name for bar in bars.values() for name in bar.parts)
    for number, name in enumerate(names):
        sizes = [bar.parts.get(name, 0) / unit for bar in bars.values()]
        look = {"color": SHADES[number % len(SHADES)], "edgecolor": "white", "linewidth": 0.5}
        look["label"] = name if any(sizes) else "_"  # no row in the legend
        look["hatch"] = "///" if number >= len(SOLID) else ""
        axes.bar(places, sizes, 2 * HALF, bottom=bottoms, **look)
        bottoms = [bottom + size for bottom, size in zip(bottoms, sizes, strict=True)]
    half = HALF + BEYOND
    lines = [(at, bar.theory / unit) for at, bar in enumerate(bars.values()) if bar.theory]
    if lines:
        starts, ends, heights = zip(*((at - half, at + half, y) for at, y in lines), strict=True)
        dashed: dict[str, Any] = {"color": "#222222", "linestyles": (0, (3, 2)), "linewidth": 1.3}
        axes.hlines(heights, starts, ends, zorder=4, label="by the theory", **dashed)
    for at, bar in enumerate(bars.values()):
        style = {"color": "black" if bar.fits else TOO_MUCH, "fontweight": "bold", **ABOVE}
        style["fontsize"] = max(6, min(10, 36 / len(bars)))  # else neighbours touch
        axes.annotate(bar.label or words(sum(bar.parts.values())), (at, bar.top / unit), **style)
    axes.set_xticks(places, list(bars))
    axes.set_ylim(0, ROOM * (max(bar.top for bar in bars.values()) or unit) / unit)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
