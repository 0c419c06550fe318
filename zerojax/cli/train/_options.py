"""The options of `zerojax train` alone: their names, limits and help."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from zerojax.cli.shared._residual_options import Residual
from zerojax.cli.shared._step_options import OUTPUT, TRAINING, ZERO

DATA = "Data"
#: The folder of the checkpoints within that of the run.
CHECKPOINTS = "checkpoints"

Devices = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices to train on: real ones where there are some, else virtual ones on the CPU.",
        show_default="all real ones, or 8 virtual ones",
        rich_help_panel=ZERO,
    ),
]
ShowLayout = Annotated[
    bool,
    typer.Option("--layout", help="Print where every leaf lives, and why.", rich_help_panel=ZERO),
]
Steps = Annotated[
    int, typer.Option(min=1, help="Steps to train for, in all.", rich_help_panel=TRAINING)
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Examples per step, over all devices and microbatches together.",
        show_default="about 32",
        rich_help_panel=TRAINING,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        "--lr",
        min=0.0,
        help="Peak learning rate; it falls along a cosine to a tenth.",
        show_default="suits the optimizer and the model's width",
        rich_help_panel=TRAINING,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        min=0, help="Steps over which the rate rises to its peak.",
        show_default="a tenth of the steps", rich_help_panel=TRAINING,
    ),
]  # fmt: skip
WeightDecay = Annotated[
    float,
    typer.Option(min=0.0, help="Decay of matrices and embeddings.", rich_help_panel=TRAINING),
]
ClipNorm = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Largest global norm of the gradients; 0 does not clip.",
        rich_help_panel=TRAINING,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Fixes the parameters at the start, the order of the data and the sample.",
        rich_help_panel=TRAINING,
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="A file, a folder or a quoted glob of text; may be given several times.",
        show_default="the source of Python's own standard library",
        rich_help_panel=DATA,
    ),
]
EvalEvery = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps between evaluations on the held-out text.",
        show_default="a tenth of the steps, at least 10",
        rich_help_panel=DATA,
    ),
]
EvalWindows = Annotated[
    int,
    typer.Option(
        min=1,
        help="Stretches of held-out text to evaluate on, each as long as the context.",
        rich_help_panel=DATA,
    ),
]
SampleBytes = Annotated[
    int,
    typer.Option(min=0, help="Bytes to generate at the end; 0 for none.", rich_help_panel=OUTPUT),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What the generated sample continues.",
        show_default="the first held-out bytes",
        rich_help_panel=OUTPUT,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="Gets metrics.jsonl, training.png and the checkpoints.",
        rich_help_panel=OUTPUT,
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Steps between checkpoints; one is also saved at the end and on Ctrl-C. SIGTERM, as "
        "preemption sends it, always saves one and ends with status 75.",
        show_default="no checkpoints",
        rich_help_panel=OUTPUT,
    ),
]
Keep = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Checkpoints to keep, the newest ones.",
        show_default="all",
        rich_help_panel=OUTPUT,
    ),
]
Init = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Start from these weights: a checkpoint's parameters, or safetensors files.",
        show_default="initialised from the seed",
        rich_help_panel=TRAINING,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the newest whole checkpoint in --out, with its options where none are "
        "given; on any devices, at any stage and precision.",
        rich_help_panel=OUTPUT,
    ),
]

#: Options that decide what is learned and kept; a checkpoint has them and `--resume` takes them up.
KEPT = (
    "model", "context", "stage", "precision", "batch_size", "accumulate", "optimizer", "lr",
    "weight_decay", "clip_norm", "seed", "data", "save_every", "config", "model_axis",
    "sequence_parallel", "remat_policy", "offload", "loss_chunk", "steps", "warmup", "eval_every",
    "eval_windows", "keep",
)  # fmt: skip
#: Options of several values, which JSON has as lists.
SEVERAL = ("data", "offload")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What `zerojax train` was asked for; None leaves a choice to the run."""

    model: str
    context: int | None
    stage: int | None
    config: str | None
    model_axis: int | None
    sequence_parallel: bool
    remat_policy: str | None
    offload: tuple[str, ...]
    loss_chunk: int | None
    devices: int | None
    precision: str
    layout: bool
    steps: int
    batch_size: int | None
    accumulate: int
    optimizer: str
    lr: float | None
    warmup: int | None
    weight_decay: float
    clip_norm: float
    seed: int
    data: tuple[str, ...]
    eval_every: int | None
    eval_windows: int
    sample_bytes: int
    prompt: str | None
    out: Path
    save_every: int | None
    keep: int | None
    init: Path | None
    resume: bool

    @property
    def residual(self) -> Residual:
        """What was asked for beside the model states; a ValueError where it can't be meant."""
        return Residual(
            config=self.config, model_axis=self.model_axis,
            sequence_parallel=self.sequence_parallel, remat_policy=self.remat_policy,
            offload=self.offload, loss_chunk=self.loss_chunk,
        )  # fmt: skip

    def kept(self) -> dict[str, Any]:
        """Give what a checkpoint keeps, fit for JSON."""
        return {name: getattr(self, name) for name in KEPT}

    def taking_up(self, kept: dict[str, Any], given: frozenset[str]) -> Options:
        """Take the options of an earlier run, apart from those that were given now.

        A stage that is given takes the place of a configuration of another one, and a configuration
        that of a stage.
        """
        left = set(given)
        if "config" in given:
            left.add("stage")
        elif "stage" in given and kept.get("stage") != self.stage:
            left.add("config")
        taken = {name: kept[name] for name in KEPT if name in kept and name not in left}
        for name in SEVERAL:
            if name in taken:
                taken[name] = tuple(taken[name])
        return dataclasses.replace(self, **taken)
