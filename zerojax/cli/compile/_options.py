"""The options of `zerojax compile` alone: their names, limits and help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from zerojax.cli.shared._residual_options import Residual, find_remat
from zerojax.cli.shared._step_options import MODEL, OUTPUT, TRAINING, ZERO

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
        help="Axes of the mesh, major first. ZeRO partitions over all of them but model, the axis "
        "of model parallelism: data=4,model=2 is --model-axis 2.",
        show_default="data=all devices, or what --model-axis leaves",
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
        min=1,
        help="Examples that each device, or group along the model axis, takes in a microbatch.",
        rich_help_panel=TRAINING,
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
    remat: bool | None
    remat_policy: str | None
    loss_chunk: int | None
    stage: int | None
    all_stages: bool
    config: str | None
    model_axis: int | None
    sequence_parallel: bool
    offload: tuple[str, ...]
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
    def residual(self) -> Residual:
        """What was asked for beside the model states; a ValueError where it can't be meant."""
        return Residual(
            config=self.config, model_axis=self.model_axis,
            sequence_parallel=self.sequence_parallel,
            remat_policy=find_remat(self.remat, self.remat_policy), offload=self.offload,
            loss_chunk=self.loss_chunk,
        )  # fmt: skip

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to compile; a ValueError where two options name different ones."""
        if not self.all_stages:
            return (self.residual.stage(self.stage),)
        if self.config is not None:
            raise ValueError(f"--config {self.config} is of one stage: leave --all-stages out")
        return (0, 1, 2, 3)
