"""The drawing of `zerojax compile`: what one device holds and moves under each stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerojax._extras import extra
from zerojax.cli.compile._result import Answer, in_words, unit_of
from zerojax.cli.train._plot import COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: From the bottom to the top of a bar; what a run holds between steps comes first.
STACK = {
    "parameters": COLORS["parameters"],
    "masters": COLORS["masters"],
    "optimizer": COLORS["optimizer"],
    "gradients kept": "#aa3377",
    "batch and the rest": "#bbbbbb",
    "gradients, activations": COLORS["gradients"],
}
REFUSED = "what else the refused program needs"
#: The device's memory is drawn where bars still show beneath it: up to so many times the highest.
HEADROOM = 2.5
VOLUME, THEORY, TOO_MUCH = "#66ccee", "#222222", "#bb5566"
WIDTH = 0.62
DASHES = (0, (3, 2))


def write_stages_plot(answers: Sequence[Answer], path: Path) -> None:
    """Write the drawing as PNG."""
    with extra("cli", "a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(6, 4))
    _draw_bytes(left, answers)
    _draw_volume(right, answers)
    question = answers[0].question
    layout, options = question.layout, question.options
    figure.suptitle(
        f"{options.model}, {layout.num_params:,} parameters, {options.precision}, "
        f"{options.optimizer}, compiled for {options.topology} "
        f"({layout.devices.size} x {layout.devices.flat[0].device_kind})"
    )
    figure.legend(
        handles=_legend(answers), frameon=False, loc="outside lower center", ncols=4,
        fontsize="small",
    )  # fmt: skip
    FigureCanvasAgg(figure).print_figure(path, dpi=130, format="png")


def _draw_bytes(axes: Axes, answers: Sequence[Answer]) -> None:
    available = answers[0].available
    tops = [max(sum(answer.parts.values()), answer.needed or 0) for answer in answers]
    is_near = available <= HEADROOM * max(tops)
    unit = unit_of(max(tops))
    limit = max(*tops, available if is_near else 0) / unit.size
    for place, (answer, top) in enumerate(zip(answers, tops, strict=True)):
        _draw_bar(axes, place, answer, unit.size)
        theory = answer.question.description.theory["total"]
        text = f"{'' if answer.fits else 'needs '}{in_words(answer.needed or available)}"
        if answer.needed is None:
            text = text.replace("needs", "needs more than\n")
        axes.annotate(
            text, (place, max(top, theory) / unit.size), xytext=(0, 4), textcoords="offset points",
            ha="center", fontweight="bold", color="black" if answer.fits else TOO_MUCH,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )  # fmt: skip
        _draw_theory(axes, place, theory / unit.size)
    if is_near:
        axes.axhline(available / unit.size, color=TOO_MUCH, linewidth=1.3, zorder=0)
    axes.annotate(
        f"a device has {in_words(available)}" + ("" if is_near else ", far above"),
        (len(answers) - 0.4, available / unit.size if is_near else limit * 1.16), xytext=(0, 3),
        textcoords="offset points", ha="right", va="bottom" if is_near else "top", color=TOO_MUCH,
    )  # fmt: skip
    axes.set_ylim(0, limit * 1.16)
    axes.set_xlim(-0.6, len(answers) - 0.4)
    axes.set_xticks(range(len(answers)), [f"stage {answer.stage}" for answer in answers])
    axes.set(title="one device's memory at its peak", ylabel=f"{unit.name} per device")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: Axes, place: int, answer: Answer, size: int) -> None:
    parts, bottom = answer.parts, 0.0
    for name, color in STACK.items():
        count = parts.get(name, 0) / size
        axes.bar(place, count, WIDTH, bottom=bottom, color=color)
        bottom += count
    rest = (answer.needed or 0) / size - bottom
    if answer.report is None and rest > 0:  # what a compiler refused, it does not tell apart
        axes.bar(
            place, rest, WIDTH, bottom=bottom, facecolor="white", edgecolor=COLORS["gradients"],
            hatch="///", linewidth=0.8,
        )  # fmt: skip


def _draw_theory(axes: Axes, place: int, height: float) -> None:
    half = WIDTH / 2 + 0.06
    axes.hlines(height, place - half, place + half, color=THEORY, linestyles=DASHES, linewidth=1.3)


def _draw_volume(axes: Axes, answers: Sequence[Answer]) -> None:
    highest = 0.0
    for place, answer in enumerate(answers):
        report = answer.report
        if report is None:
            axes.annotate(
                "not\ncompiled", (place, 0), xytext=(0, 4), textcoords="offset points",
                ha="center", color=TOO_MUCH,
            )  # fmt: skip
            continue
        axes.bar(place, report.volume, WIDTH, color=VOLUME)
        _draw_theory(axes, place, report.theory_volume)
        top = max(report.volume, report.theory_volume)
        highest = max(highest, top)
        axes.annotate(
            f"{report.volume:.3f}", (place, top), xytext=(0, 4), textcoords="offset points",
            ha="center", fontweight="bold",
        )  # fmt: skip
    axes.set_ylim(0, (highest or 1.0) * 1.16)
    axes.set_xlim(-0.6, len(answers) - 0.4)
    axes.set_xticks(range(len(answers)), [f"stage {answer.stage}" for answer in answers])
    axes.set(title="moved by one device in a step", ylabel="elements per parameter of the model")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(answers: Sequence[Answer]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=color, label=name)
        for name, color in STACK.items()
        if any(answer.parts.get(name, 0) > 0.002 * (answer.needed or 1) for answer in answers)
    ]
    if any(answer.report is None and answer.needed for answer in answers):
        edge = COLORS["gradients"]
        handles.append(Patch(facecolor="white", edgecolor=edge, hatch="///", label=REFUSED))
    handles.append(Patch(color=VOLUME, label="volume"))
    label = "theory: states with gradients; volume"
    handles.append(Line2D([], [], color=THEORY, linestyle=DASHES, label=label))
    return handles
