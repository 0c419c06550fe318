"""The drawing of `zerojax plan`: what a device holds, and how long a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax._extras import extra
from zerojax.cli.plan._request import PlanQuestion
from zerojax.cli.plan._screen import PRECISIONS, amount, unit_of
from zerojax.cli.plan._sweep import counts_of, slower, sweep
from zerojax.cli.train._plot import COLORS
from zerojax.planner import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"
#: From the bottom to the top of a bar.
STACK: dict[str, dict[str, Any]] = {
    "parameters": {"color": COLORS["parameters"]},
    "masters": {"color": COLORS["masters"]},
    "optimizer": {"color": COLORS["optimizer"]},
    "gradients": {"color": COLORS["gradients"]},
    "activations and buffers": {"color": "#bbbbbb"},
    TOGETHER: {
        "facecolor": "#bbbbbb", "edgecolor": COLORS["gradients"], "hatch": "////", "linewidth": 0,
    },
}  # fmt: skip
STAGES = {0: "#222222", 1: "#332288", 2: "#44aa99", 3: "#aa4499"}
#: What a step waits for, as the planner calls it.
MARKERS = {
    "compute": "o",
    "memory bandwidth": "s",
    "fast links": "^",
    "slow links": "D",
    "host link": "P",
}
SLOWER = (4, 16)
THEORY, TOO_MUCH, ASKED = "#222222", "#bb5566", "0.75"
WIDTH, DASHES = 0.62, (0, (3, 2))
#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5


def write_plan_plot(question: PlanQuestion, path: Path) -> None:
    """Write the drawing as PNG."""
    with extra("cli", "a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    one, options = question.hardware, question.options
    plans = [question.plan(stage) for stage in STAGES]
    counts = counts_of(question)
    networks = [one, *(slower(one, factor) for factor in SLOWER)]
    times = sweep(question, counts, networks)
    figure = Figure(figsize=(15, 6.2), layout="constrained")
    bars, *lines = figure.subplots(1, 2 + len(SLOWER), width_ratios=(5, 5, *(3.4 for _ in SLOWER)))
    _draw_bytes(bars, plans)
    names = (f"time of a step on {one.name}", *(f"links {factor} x slower" for factor in SLOWER))
    for axes, by_stage, name, network in zip(lines, times, names, networks, strict=True):
        _draw_times(axes, by_stage, counts, options.devices)
        fast, slow = network.link_bandwidth / 1e9, network.slow_bandwidth / 1e9
        axes.set_title(f"{name}\nfast links {fast:,.3g} GB/s, slow {slow:,.3g}", fontsize="medium")
    _scale_times(lines, times)
    figure.suptitle(
        f"{_model(question)}, {options.optimizer}, "
        f"{PRECISIONS.get(options.precision, options.precision)}, "
        f"{options.devices:,} x {one.name}, {options.batch} x {question.context:,} tokens in a "
        "microbatch"
    )
    figure.legend(
        handles=_bar_legend(plans), frameon=False, loc="outside lower left", ncols=3,
        fontsize="small",
    )  # fmt: skip
    figure.legend(
        handles=_line_legend(times, options.devices), frameon=False, loc="outside lower right",
        ncols=5, fontsize="small",
    )  # fmt: skip
    FigureCanvasAgg(figure).print_figure(path, dpi=130, format="png")


def _model(question: PlanQuestion) -> str:
    count = question.plan(0).num_params
    return f"{question.options.model or 'a GPT'}, {count:,} parameters"


def _parts(plan: Plan) -> dict[str, int]:
    """Part the peak by kind."""
    held = plan.bytes
    parts = {
        "parameters": held.parameters, "masters": held.masters,
        "optimizer": held.optimizer - held.masters,
    }  # fmt: skip
    if held.total < held.states:
        return {**parts, TOGETHER: held.total - sum(parts.values())}
    return {**parts, "gradients": held.gradients, "activations and buffers": held.activations}


def _draw_bytes(axes: Axes, plans: Sequence[Plan]) -> None:
    memory = plans[0].hardware.memory
    tops = _tops(plans)
    unit, size = unit_of(max(tops))
    is_near = _is_near(plans)
    limit = max(*tops, memory if is_near else 0) / size * 1.16
    for place, one in enumerate(plans):
        bottom = 0.0
        for name, count in _parts(one).items():
            axes.bar(place, count / size, WIDTH, bottom=bottom, **STACK[name])
            bottom += count / size
        half = WIDTH / 2 + 0.06
        axes.hlines(
            one.bytes.theory / size, place - half, place + half, color=THEORY, linestyles=DASHES,
            linewidth=1.3,
        )  # fmt: skip
        text = f"{amount(one.bytes.total / size)} {unit}"
        if one.bytes.host:
            text += f"\nhost {amount(one.bytes.host / size)}"
        axes.annotate(
            text, (place, _label_height(one, limit * size) / size), xytext=(0, 4),
            textcoords="offset points", ha="center", fontweight="bold",
            color="black" if one.fits else TOO_MUCH,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
    if is_near:
        axes.axhline(memory / size, color=TOO_MUCH, linewidth=1.3, zorder=0)
    axes.set_ylim(0, limit)
    axes.set_xlim(-0.6, len(plans) - 0.4)
    ticks = [f"stage {one.stage}\n({amount(one.bytes.theory / size)})" for one in plans]
    axes.set_xticks(range(len(plans)), ticks)
    axes.set_title("one device's memory at its peak", fontsize="medium")
    axes.set_ylabel(f"{unit} per device")
    axes.spines[["top", "right"]].set_visible(False)


def _tops(plans: Sequence[Plan]) -> list[int]:
    return [max(one.bytes.total, one.bytes.theory) for one in plans]


def _is_near(plans: Sequence[Plan]) -> bool:
    return plans[0].hardware.memory <= HEADROOM * max(_tops(plans))


def _label_height(plan: Plan, limit: float) -> float:
    """Find where the peak is written: on its bar, but not across the formula's line."""
    total, theory = plan.bytes.total, plan.bytes.theory
    return theory if total < theory < total + 0.075 * limit else total


def _draw_times(
    axes: Axes, by_stage: dict[int, list[Plan]], counts: Sequence[int], asked: int
) -> None:
    """Draw a line for each stage; hollow marks where a device is too small."""
    for stage, plans in by_stage.items():
        times = [1e3 * one.step_time for one in plans]
        color = STAGES[stage]
        # Stages often coincide: earlier ones are wider, so that they show beneath.
        axes.plot(counts, times, color=color, linewidth=4.5 - 1.1 * stage, alpha=0.55, zorder=stage)
        for count, time, one in zip(counts, times, plans, strict=True):
            axes.plot(
                count, time, MARKERS[one.bound_by], color=color, markersize=7.5 - stage,
                markerfacecolor=color if one.fits else "white", zorder=10 + stage,
            )  # fmt: skip
    axes.axvline(asked, color=ASKED, linewidth=1.5, zorder=-1)
    axes.set_xscale("log", base=2)
    ticks = counts[:: 1 + len(counts) // 7]
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    axes.set_xlabel("devices")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _scale_times(lines: Sequence[Axes], times: Sequence[dict[int, list[Plan]]]) -> None:
    """Give all networks one scale of milliseconds, in numbers that one reads."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plans = [one for by_stage in times for found in by_stage.values() for one in found]
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


def _bar_legend(plans: Sequence[Plan]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {
        name for one in plans for name, count in _parts(one).items()
        if count > 0.002 * one.bytes.total
    }  # fmt: skip
    handles: list[Any] = [
        Patch(label=name, **style) for name, style in STACK.items() if name in shown
    ]
    formula = "states by the formula (in brackets)"
    unit, size = unit_of(plans[0].hardware.memory)
    device = f"a device's memory: {amount(plans[0].hardware.memory / size)} {unit}"
    device += "" if _is_near(plans) else ", far above"
    handles.append(Line2D([], [], color=THEORY, linestyle=DASHES, label=formula))
    return [*handles, Line2D([], [], color=TOO_MUCH, label=device)]


def _line_legend(times: Sequence[dict[int, list[Plan]]], asked: int) -> list[Any]:
    from matplotlib.lines import Line2D

    plans = [one for by_stage in times for found in by_stage.values() for one in found]
    handles = [
        Line2D([], [], color=color, linewidth=4.5 - 1.1 * stage, label=f"stage {stage}")
        for stage, color in STAGES.items()
    ]
    given: dict[str, Any] = {"linestyle": "", "color": "0.35"}
    bounds = {one.bound_by for one in plans}
    handles += [
        Line2D([], [], marker=marker, label=f"bound by {name}", **given)
        for name, marker in MARKERS.items()
        if name in bounds
    ]
    if not all(one.fits for one in plans):
        label = "hollow: does not fit"
        handles.append(Line2D([], [], marker="o", markerfacecolor="white", label=label, **given))
    return [*handles, Line2D([], [], color=ASKED, label=f"{asked:,} devices")]
