"""training.png: what was learned, and the bytes that one device holds under each stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from zerojax._extras import extra
from zerojax.cli.train._metrics import Record
from zerojax.cli.train._run import Session

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "parameters": "#4477aa",
    "gradients": "#ee6677",
    "masters": "#ccbb44",
    "optimizer": "#228833",
}
MEASURED = "held by\ndevice 0"


def write_plot(session: Session, record: Record, held: dict[str, int]) -> Path:
    """Write the plot and return its path."""
    with extra("cli", "a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(6, 5))
    _draw_learning(left, record)
    _draw_bytes(right, session, held)
    options = session.options
    figure.suptitle(
        f"{options.model}: {session.layout.num_params:,} parameters, {options.optimizer}, "
        f"{options.precision}, ZeRO stage {session.layout.stage} on {len(session.devices)} devices"
    )
    path = options.out / "training.png"
    FigureCanvasAgg(figure).print_figure(path, dpi=130)
    return path


def _draw_learning(axes: Axes, record: Record) -> None:
    steps, losses = record.column("train_bits_per_byte")
    axes.plot(steps, losses, color="#88aacc", linewidth=1, label="training")
    steps, found = record.column("validation_bits_per_byte")
    axes.plot(steps, found, "o-", color="#bb5566", markersize=4, label="held out")
    if steps:
        axes.annotate(
            f"{found[-1]:.2f}", (steps[-1], found[-1]), xytext=(0, 8), textcoords="offset points",
            ha="right", color="#bb5566", fontweight="bold",
        )  # fmt: skip
    axes.set(title="loss", xlabel="step", ylabel="bits per byte")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_bytes(axes: Axes, session: Session, held: dict[str, int]) -> None:
    mine = session.layout.stage
    columns: list[tuple[str, dict[str, int], bool]] = [
        (f"stage {stage}" + ("\nthis run" if stage == mine else ""), counts, stage == mine)
        for stage, counts in session.stage_bytes.items()
    ]
    columns.append((MEASURED, held, True))
    for place, (_, counts, is_mine) in enumerate(columns):
        bottom = 0
        for kind, color in COLORS.items():
            axes.bar(
                place, counts.get(kind, 0), bottom=bottom, color=color, alpha=1 if is_mine else 0.45
            )
            bottom += counts.get(kind, 0)
        axes.annotate(
            decimal(bottom), (place, bottom), xytext=(0, 3), textcoords="offset points",
            ha="center", fontweight="bold" if is_mine else "normal",
        )  # fmt: skip
    axes.axvline(len(columns) - 1.5, color="0.8", linewidth=1)
    axes.set_xticks(range(len(columns)), [name for name, _, _ in columns])
    axes.set(title="model states per device")
    axes.yaxis.set_major_formatter(lambda value, _: decimal(int(value)))
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=_legend(columns), frameon=False)


def _legend(columns: list[tuple[str, dict[str, int], bool]]) -> list[Any]:
    from matplotlib.patches import Patch

    shown = [kind for kind in COLORS if any(counts.get(kind) for _, counts, _ in columns)]
    return [Patch(color=COLORS[kind], label=kind) for kind in reversed(shown)]
