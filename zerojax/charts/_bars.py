"""`Bar`: what a plan, a report or a description holds on one device; and how bars are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from zerojax._display import decimal, duration
from zerojax._extras import extra
from zerojax.audit import AuditReport
from zerojax.layout import Description
from zerojax.planner import Plan

#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"


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

    def within(self, available: float) -> Bar:
        fits = self.fits and sum(self.parts.values()) <= available
        return dataclasses.replace(self, fits=fits)


#: Kinds of model states, from the bottom of a bar on.
KINDS = ("parameters", "masters", "optimizer", "gradients")
#: What has bytes by kind.
Holding: TypeAlias = Plan | AuditReport | Description | Bar


def bytes_of(held: Holding) -> Bar:
    """Return the bytes of one device by kind, up to its peak, of what is `held`.

    Raises:
        TypeError: it is no plan, audit report or description.
    """
    if isinstance(held, Bar):
        return held
    if isinstance(held, Description):
        parts = {kind: held.bytes[kind] for kind in KINDS}
        return _bar(parts, held.theory["total"])
    if isinstance(held, AuditReport):
        memory = held.memory
        parts = {name: getattr(memory, name) for name in ("parameters", "masters", "optimizer")}
        parts["gradients kept"] = memory.gradients
        parts["batch and the rest"] = memory.batch + memory.other + memory.outputs
        parts["gradients, activations"] = memory.temporaries
        return _bar(parts, memory.theory["total"])
    if not isinstance(held, Plan):
        raise TypeError(
            f"a plan, an audit report or a description is drawn, got {type(held).__name__}; of a "
            "layout, layout.describe(tx)"
        )
    size = held.bytes
    parts = {"parameters": size.parameters, "masters": size.masters}
    parts["optimizer"] = size.optimizer - size.masters
    if size.total < size.states:
        parts[TOGETHER] = size.total - sum(parts.values())
    else:
        parts |= {"gradients": size.gradients, "activations and buffers": size.activations}
    return _bar(parts, size.theory, host=size.host, fits=held.fits)


def _bar(parts: Mapping[str, float], theory: float, *, host: int = 0, fits: bool = True) -> Bar:
    label = f"{decimal(sum(parts.values()))}\nhost {decimal(host)}" if host else ""
    return Bar(parts=parts, label=label, theory=theory, fits=fits)


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


if TYPE_CHECKING:
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
    """Draw bars, by the names that stand below, with their labels and lines.

    `unit` is what 1 on the axis is; `words` writes the size of a bar that has no label.
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
