"""The drawings of the commands: functions of data that return figures. matplotlib waits for one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from zerojax.cli.shared._units import Unit, amount, decimal_unit, in_words
from zerojax.planner import Hardware, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Steps, and the values of a metric at them.
Curve = tuple[Sequence[int], Sequence[float]]
#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"
#: What a compiler refused for its memory, it does not tell apart.
REFUSED = "what else the refused program needs"
#: How parts of a bar look, from the bottom to the top; what a run holds between steps comes first.
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
#: What a step waits for, as the planner calls it.
MARKERS = {
    "compute": "o",
    "memory bandwidth": "s",
    "fast links": "^",
    "slow links": "D",
    "host link": "P",
}
#: How much slower the networks beside that of the hardware are.
SLOWER = (4, 16)
TRAINING, HELD_OUT = "#88aacc", "#bb5566"
THEORY, TOO_MUCH, ASKED = "#222222", "#bb5566", "0.75"
WIDTH, DASHES = 0.62, (0, (3, 2))
#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
SMALL: dict[str, Any] = {"frameon": False, "fontsize": "small"}
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
        faint: whether it stands behind the others.
    """

    name: str
    parts: Mapping[str, float]
    label: str
    theory: float | None = None
    fits: bool = True
    faint: bool = False

    @property
    def height(self) -> float:
        """The height of all parts together."""
        return sum(self.parts.values())


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_figure(path, dpi=130, format="png")


def training_figure(
    title: str,
    *,
    training: Curve,
    held_out: Curve,
    stages: Mapping[str, Mapping[str, int]],
    mine: str,
    measured: Mapping[str, int],
) -> Figure:
    """Draw what was learned, and the bytes that one device holds under each stage.

    Args:
        title: of the figure.
        training: bits per byte of each step.
        held_out: bits per byte of each evaluation.
        stages: bytes by kind, for each stage.
        mine: the stage of this run.
        measured: bytes by kind that the first device really holds.
    """
    figure = _figure(title, 11, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(6, 5))
    left.plot(*training, color=TRAINING, linewidth=1, label="training")
    left.plot(*held_out, "o-", color=HELD_OUT, markersize=4, label="held out")
    for step, loss in list(zip(*held_out, strict=True))[-1:]:
        style = {"color": HELD_OUT, "fontweight": "bold", **ABOVE, "ha": "right"}
        left.annotate(f"{loss:.2f}", (step, loss), **style)
    left.set(title="loss", xlabel="step", ylabel="bits per byte")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend(frameon=False)
    bars = [_states_bar(name, kinds, is_mine=name == mine) for name, kinds in stages.items()]
    bars.append(_states_bar("held by\ndevice 0", measured, is_mine=True))
    _draw_bars(right, bars)
    right.axvline(len(bars) - 1.5, color="0.8", linewidth=1)
    right.set(title="model states per device")
    right.yaxis.set_major_formatter(lambda value, _: decimal(int(value)))
    right.margins(y=0.12)
    right.legend(handles=_part_handles(bars)[::-1], frameon=False)
    return figure


def _states_bar(name: str, kinds: Mapping[str, int], *, is_mine: bool) -> Bar:
    parts = {kind: kinds[kind] for kind in PARTS if kinds.get(kind)}
    name = f"{name}\nthis run" if is_mine and name.startswith("stage") else name
    return Bar(name=name, parts=parts, label=decimal(sum(parts.values())), faint=not is_mine)


def stages_figure(
    title: str, *, memory: Sequence[Bar], volume: Sequence[Bar], available: float, unit: Unit
) -> Figure:
    """Draw what one device holds and moves under each stage, as compilers have it.

    Args:
        title: of the figure.
        memory: bytes of a device.
        volume: elements that a device moves, per parameter.
        available: bytes that a device has.
        unit: of the bytes.
    """
    figure = _figure(title, 11, 5.2)
    left, right = figure.subplots(1, 2, width_ratios=(6, 4))
    handles = _draw_memory(left, memory, available, unit, in_words(available))
    _draw_bars(right, volume)
    tops = [max(bar.height, bar.theory or 0) for bar in volume]
    right.set_ylim(0, (max(tops) or 1.0) * 1.16)
    right.set(title="moved by one device in a step", ylabel="elements per parameter of the model")
    handles += [*_part_handles(volume), _line("theory: states with gradients; volume")]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, **SMALL)
    return figure


def plan_figure(
    title: str,
    *,
    plans: Sequence[Plan],
    times: Sequence[Mapping[int, Sequence[Plan]]],
    networks: Mapping[str, Hardware],
    counts: Sequence[int],
    asked: int,
) -> Figure:
    """Draw what a device holds under each stage, and how long a step takes by number of devices.

    Args:
        title: of the figure.
        plans: one for each stage.
        times: for each network, by stage, a plan for each number of devices.
        networks: by what their drawing is called.
        counts: numbers of devices.
        asked: the number of devices of `plans`.
    """
    figure = _figure(title, 15, 6.2)
    widths = (5, 5, *(3.4 for _ in SLOWER))
    left, *lines = figure.subplots(1, len(widths), width_ratios=widths)
    unit = decimal_unit(max(max(one.bytes.total, one.bytes.theory) for one in plans))
    memory = plans[0].hardware.memory
    own = decimal_unit(memory)
    bars = [_plan_bar(one, unit) for one in plans]
    device = f"{amount(memory / own.size)} {own.name}"
    handles = _draw_memory(left, bars, memory, unit, device)
    handles.append(_line("states by the formula (in brackets)"))
    for axes, by_stage, (name, network) in zip(lines, times, networks.items(), strict=True):
        _draw_times(axes, by_stage, counts, asked)
        fast, slow = network.link_bandwidth / 1e9, network.slow_bandwidth / 1e9
        axes.set_title(f"{name}\nfast links {fast:,.3g} GB/s, slow {slow:,.3g}", fontsize="medium")
    found = [one for by_stage in times for stage in by_stage.values() for one in stage]
    _scale_times(lines, found)
    figure.legend(handles=handles, loc="outside lower left", ncols=3, **SMALL)
    figure.legend(handles=_time_handles(found, asked), loc="outside lower right", ncols=5, **SMALL)
    return figure


def _plan_bar(plan: Plan, unit: Unit) -> Bar:
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
    label = f"{amount(held.total / unit.size)} {unit.name}"
    return Bar(
        name=f"stage {plan.stage}\n({amount(held.theory / unit.size)})",
        parts=parts,
        label=label + (f"\nhost {amount(held.host / unit.size)}" if held.host else ""),
        theory=held.theory,
        fits=plan.fits,
    )


def _figure(title: str, width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _draw_bars(axes: Axes, bars: Sequence[Bar], unit: float = 1.0, limit: float = 0.0) -> None:
    """Draw bars with their labels, which don't stand across the line of the theory.

    Args:
        unit: what 1 on the axis is.
        limit: the height of the axes, where it is known.
    """
    half = WIDTH / 2 + 0.06
    white = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    for place, bar in enumerate(bars):
        bottom, alpha = 0.0, 0.45 if bar.faint else 1
        for name, size in bar.parts.items():
            axes.bar(place, size / unit, WIDTH, bottom=bottom, alpha=alpha, **PARTS[name])
            bottom += size / unit
        top = bottom
        if bar.theory is not None:
            line, ends = bar.theory / unit, (place - half, place + half)
            axes.hlines(line, *ends, color=THEORY, linestyles=DASHES, linewidth=1.3, zorder=4)
            top = line if top < line < top + 0.075 * limit else top
        axes.annotate(
            bar.label,
            (place, top),
            color="black" if bar.fits else TOO_MUCH,
            fontweight="normal" if bar.faint else "bold",
            bbox=white,
            **ABOVE,
        )
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [bar.name for bar in bars])
    axes.spines[["top", "right"]].set_visible(False)


def _draw_memory(
    axes: Axes, bars: Sequence[Bar], available: float, unit: Unit, device: str
) -> list[Any]:
    """Draw bars of bytes beside what a device has, and return what the legend says of them."""
    tops = [max(bar.height, bar.theory or 0) for bar in bars]
    is_near = available <= HEADROOM * max(tops)
    limit = max(*tops, available if is_near else 0) / unit.size * 1.16
    _draw_bars(axes, bars, unit.size, limit)
    if is_near:
        axes.axhline(available / unit.size, color=TOO_MUCH, linewidth=1.3, zorder=0)
    axes.set_ylim(0, limit)
    axes.set_title("one device's memory at its peak", fontsize="medium")
    axes.set_ylabel(f"{unit.name} per device")
    label = f"a device's memory: {device}" + ("" if is_near else ", far above")
    return [*_part_handles(bars), _line(label, color=TOO_MUCH, linestyle="-")]


def _part_handles(bars: Iterable[Bar]) -> list[Any]:
    """Return the legend of the parts that can be seen."""
    from matplotlib.patches import Patch

    seen = {name for bar in bars for name, size in bar.parts.items() if size > 0.002 * bar.height}
    return [Patch(label=name, **look) for name, look in PARTS.items() if name in seen]


def _line(label: str, color: str = THEORY, linestyle: Any = DASHES, **look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=linestyle, label=label, **look)


def _draw_times(
    axes: Axes, by_stage: Mapping[int, Sequence[Plan]], counts: Sequence[int], asked: int
) -> None:
    """Draw a line for each stage; hollow marks where a device is too small."""
    for stage, plans in by_stage.items():
        times, color = [1e3 * one.step_time for one in plans], STAGES[stage]
        # Stages often coincide: earlier ones are wider, so that they show beneath.
        axes.plot(counts, times, color=color, linewidth=4.5 - 1.1 * stage, alpha=0.55, zorder=stage)
        look: dict[str, Any] = {"markersize": 7.5 - stage, "zorder": 10 + stage}
        for count, time, one in zip(counts, times, plans, strict=True):
            face, marker = color if one.fits else "white", MARKERS[one.bound_by]
            axes.plot(count, time, marker, color=color, markerfacecolor=face, **look)
    axes.axvline(asked, color=ASKED, linewidth=1.5, zorder=-1)
    axes.set_xscale("log", base=2)
    ticks = counts[:: 1 + len(counts) // 7]
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set_xlabel("devices")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _scale_times(lines: Sequence[Axes], plans: Sequence[Plan]) -> None:
    """Set one scale of milliseconds for all networks, in numbers that one reads."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    found = [1e3 * one.step_time for one in plans]
    axes, *others = lines
    for other in others:
        other.sharey(axes)
        other.tick_params(labelleft=False)
    axes.set_ylabel("ms per step, at least")
    axes.set_yscale("log")
    axes.set_ylim(min(found) / 1.3, max(found) * 1.3)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _time_handles(plans: Sequence[Plan], asked: int) -> list[Any]:
    handles = [
        _line(f"stage {stage}", color=color, linestyle="-", linewidth=4.5 - 1.1 * stage)
        for stage, color in STAGES.items()
    ]
    bounds = {one.bound_by for one in plans}
    mark: dict[str, Any] = {"linestyle": "", "color": "0.35"}
    handles += [
        _line(f"bound by {name}", marker=marker, **mark)
        for name, marker in MARKERS.items()
        if name in bounds
    ]
    if not all(one.fits for one in plans):
        handles.append(_line("hollow: does not fit", marker="o", markerfacecolor="white", **mark))
    return [*handles, _line(f"{asked:,} devices", color=ASKED, linestyle="-")]
