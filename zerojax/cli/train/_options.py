"""The options of `zerojax train`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from zerojax.cli.shared._built_step import BuiltStepOptions
from zerojax.cli.shared._command import PARAMETER, option
from zerojax.cli.shared._options import (
    OUTPUT,
    TRAINING,
    ZERO,
    batch_size_option,
    model_option,
    precision_option,
)

DATA = "Data"
#: The folder of the checkpoints within that of the run.
CHECKPOINTS = "checkpoints"
#: Options of one run; the others decide what is learned and kept: a checkpoint has them.
OF_ONE_RUN = ("devices", "layout", "out", "init", "resume", "prompt", "sample_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(BuiltStepOptions):
    """What `zerojax train` was asked for; None leaves a choice to the run."""

    model: str = model_option("tiny")
    precision: str = precision_option("fp32")
    batch_size: int | None = batch_size_option("about 32")
    devices: int | None = option(
        None,
        help="Devices to train on: real ones where there are some, else virtual ones on the CPU.",
        least=1,
        shown="all real ones, or 8 virtual ones",
        panel=ZERO,
    )
    layout: bool = option(False, help="Print where every leaf lives, and why.", panel=ZERO)
    steps: int = option(200, help="Steps to train for, in all.", least=1, panel=TRAINING)
    lr: float | None = option(
        None,
        help="Peak learning rate; it falls along a cosine to a tenth.",
        least=0.0,
        shown="suits the optimizer and the model's width",
        panel=TRAINING,
    )
    warmup: int | None = option(
        None,
        help="Steps over which the rate rises to its peak.",
        least=0,
        shown="a tenth of the steps",
        panel=TRAINING,
    )
    weight_decay: float = option(
        0.1, help="Decay of matrices and embeddings.", least=0.0, panel=TRAINING
    )
    clip_norm: float = option(
        1.0,
        help="Largest global norm of the gradients; 0 does not clip.",
        least=0.0,
        panel=TRAINING,
    )
    seed: int = option(
        0,
        help="Fixes the parameters at the start, the order of the data and the sample.",
        least=0,
        panel=TRAINING,
    )
    init: Path | None = option(
        None,
        help="Start from these weights: a checkpoint's parameters, or safetensors files.",
        metavar="PATH",
        shown="initialised from the seed",
        panel=TRAINING,
    )
    data: tuple[str, ...] = option(
        (),
        help="A file, a folder or a quoted glob of text; may be given several times.",
        metavar="PATH",
        shown="the source of Python's own standard library",
        panel=DATA,
    )
    eval_every: int | None = option(
        None,
        help="Steps between evaluations on the held-out text.",
        least=1,
        shown="a tenth of the steps, at least 10",
        panel=DATA,
    )
    eval_windows: int = option(
        256,
        help="Stretches of held-out text to evaluate on, each as long as the context.",
        least=1,
        panel=DATA,
    )
    sample_bytes: int = option(
        200, help="Bytes to generate at the end; 0 for none.", least=0, panel=OUTPUT
    )
    prompt: str | None = option(
        None,
        help="What the generated sample continues.",
        metavar="TEXT",
        shown="the first held-out bytes",
        panel=OUTPUT,
    )
    out: Path = option(
        Path("runs/train"),
        help="Gets metrics.jsonl, training.png and the checkpoints.",
        metavar="FOLDER",
        panel=OUTPUT,
    )
    save_every: int | None = option(
        None,
        help="Steps between checkpoints; one is also saved at the end and on Ctrl-C. SIGTERM, as "
        "preemption sends it, always saves one and ends with status 75.",
        least=1,
        shown="no checkpoints",
        panel=OUTPUT,
    )
    keep: int | None = option(
        None, help="Checkpoints to keep, the newest ones.", least=1, shown="all", panel=OUTPUT
    )
    resume: bool = option(
        False,
        help="Go on from the newest whole checkpoint in --out, with its options where none are "
        "given; on any devices, at any stage and precision.",
        panel=OUTPUT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt == "":
            raise ValueError("--prompt is empty; give at least one character")
        if self.resume and "init" in self.given:
            raise ValueError(
                "--init: a run that is resumed has its weights; leave it or --resume out"
            )
        if "keep" in self.given and self.save_every is None and not self.resume:
            raise ValueError("--keep: there are no checkpoints without --save-every; give it too")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warmup."""
        return self.steps // 10 if self.warmup is None else self.warmup

    def kept(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, fit for JSON."""
        return {name: getattr(self, name) for name in _kept_names()}

    def taking_up(self, kept: dict[str, Any]) -> TrainOptions:
        """Take the options of an earlier run, apart from those that were given now.

        A stage that is given takes the place of a configuration of another one, and a configuration
        that of a stage.
        """
        left = set(self.given)
        if "config" in self.given:
            left.add("stage")
        elif "stage" in self.given and kept.get("stage") != self.stage:
            left.add("config")
        taken = {name: kept[name] for name in _kept_names() if name in kept and name not in left}
        taken = {name: tuple(x) if isinstance(x, list) else x for name, x in taken.items()}
        return dataclasses.replace(self, **taken)


def _kept_names() -> list[str]:
    fields = dataclasses.fields(TrainOptions)
    return [x.name for x in fields if PARAMETER in x.metadata and x.name not in OF_ONE_RUN]
