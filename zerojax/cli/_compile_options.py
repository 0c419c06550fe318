"""The options of `zerojax compile` alone: their names, limits and help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli._step_options import MODEL, OUTPUT, TRAINING, ZERO

HARDWARE = "Hardware"

TopologyName = Annotated[
    str,
    typer.Option(
        "--topology",
        metavar="NAME",
        help="Nodes x GPUs (h100:1x8, a100:4x8; also h200, b200), TPU chips along each dim of the "
        "torus (v5e:2x4, v6e:16x16, v4:2x2x4, v5p:8x8x16, tpu7x:2x2x1), or several TPU slices "
        "(v5e:4x4x2slices).",
        rich_help_panel=HARDWARE,
    ),
]
MeshAxes = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        "--axes",
        metavar="AXIS=SIZE,...",
        help="Axes of the mesh, major first. ZeRO partitions over all of them.",
        show_default="data=all devices",
        rich_help_panel=HARDWARE,
    ),
]
Scan = Annotated[
    bool,
    typer.Option(
        "--scan/--no-scan",
        help="Layers stacked and scanned, or a Python list of them, which compiles far longer.",
        rich_help_panel=MODEL,
    ),
]
Remat = Annotated[
    bool,
    typer.Option(
        "--remat/--no-remat",
        help="Recompute each layer in the backward pass, or keep its activations.",
        rich_help_panel=MODEL,
    ),
]
AllStages = Annotated[
    bool,
    typer.Option(
        "--all-stages",
        help="Compile stages 0 to 3, compare them, and draw bytes and volume: to --plot, or to "
        "MODEL.TOPOLOGY.png.",
        rich_help_panel=ZERO,
    ),
]
Batch = Annotated[
    int,
    typer.Option(
        min=1, help="Examples that each device takes in a microbatch.", rich_help_panel=TRAINING
    ),
]
Hlo = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keep the text of the compiled program; with --all-stages, a file for each stage.",
        rich_help_panel=OUTPUT,
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Compile even what was compiled before, and keep nothing.",
        rich_help_panel=OUTPUT,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """What `zerojax compile` was asked for; None leaves a choice to it."""

    topology: str
    mesh: str | None
    model: str
    context: int | None
    scan: bool
    remat: bool
    stage: int
    all_stages: bool
    precision: str
    reduce: str | None
    batch: int
    accumulate: int
    optimizer: str
    plot: Path | None
    hlo: Path | None
    json: Path | None
    no_cache: bool

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to compile."""
        return (0, 1, 2, 3) if self.all_stages else (self.stage,)
