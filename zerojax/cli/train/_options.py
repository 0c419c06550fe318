"""The options of `zerojax train`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

from zerojax._arguments import as_amount
from zerojax.cli.shared import _options
from zerojax.cli.shared._command import option
from zerojax.cli.shared._options import DATA, MODEL, OUTPUT, PROCESSES, TRAINING, ZERO
from zerojax.data import Tokenizer
from zerojax.models import gpt
from zerojax.processes import PATIENCE, WAIT

#: What is of one run; the other options decide what is learned and kept: a checkpoint has them.
OF_ONE_RUN = (
    *("given", "devices", "out", "init", "resume", "profile"),
    *("coordinator", "num_processes", "process_id", "patience", "wait"),
)
FOUND: Any = {"show_default": "found by jax on a cluster", "panel": PROCESSES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions(_options.BuiltStepOptions):
    """What `zerojax train` was asked for; None leaves a choice to the run."""

    model: str = option("tiny", metavar="NAME", panel=MODEL)
    precision: _options.Precision = option("fp32", panel=ZERO)
    batch_size: int | None = option(None, min=1, show_default="about 32", panel=TRAINING)
    devices: int | None = option(None, min=1, show_default="all real or 8 virtual ones", panel=ZERO)
    """Devices to train on: real ones where there are some, else virtual ones on the CPU."""
    steps: int = option(200, min=1, max=2**31 - 1, metavar="N", panel=TRAINING)
    """Steps to train for, in all."""
    lr: float | None = option(
        None, min=0.0, show_default="suits the optimizer and the model's width", panel=TRAINING
    )
    """Peak learning rate; it falls along a cosine to a tenth."""
    warmup: int | None = option(None, min=0, show_default="a tenth of the steps", panel=TRAINING)
    """Steps over which the rate rises to its peak."""
    weight_decay: float = option(0.1, min=0.0, panel=TRAINING)
    """Decay of matrices and embeddings."""
    clip_norm: float = option(1.0, min=0.0, panel=TRAINING)
    """Largest global norm of the gradients; 0 does not clip."""
    seed: int = option(0, min=0, max=2**32 - 1, metavar="N", panel=TRAINING)
    """Fixes the parameters at the start and the order of the data."""
    init: Path | None = option(None, metavar="PATH", show_default="the seed's", panel=TRAINING)
    """Start from these weights: a checkpoint's parameters, or a safetensors file or index."""
    data: tuple[str, ...] = option(
        (), metavar="PATH", show_default="the source of Python's own standard library", panel=DATA
    )
    """A file, a folder or a quoted glob of text; may be given several times. Or one .npy file of
    tokens, which may be larger than memory."""
    tokenizer: str | None = option(None, metavar="FILE", show_default="bytes", panel=DATA)
    """A tokenizer.json, whose vocabulary the model gets."""
    eval_every: int | None = option(None, min=1, show_default="steps / 10, at least 10", panel=DATA)
    """Steps between evaluations on the held-out text."""
    eval_windows: int = option(256, min=1, panel=DATA)
    """Windows of held-out text to evaluate on, each as long as the context, in whole batches."""
    out: Path = option(Path("runs/train"), metavar="FOLDER", panel=OUTPUT)
    """Gets metrics.jsonl, training.png and the checkpoints."""
    tensorboard: bool = option(False, panel=OUTPUT)
    """Also write the metrics for TensorBoard, to OUT/tensorboard."""
    profile: int | None = option(None, min=1, metavar="STEPS", panel=OUTPUT)
    """Record so many steps, after the first two, with jax.profiler, to OUT/profile."""
    save_every: int | None = option(None, min=1, show_default="no checkpoints", panel=OUTPUT)
    """Steps between checkpoints; one is also saved at the end and on Ctrl-C. SIGTERM, as preemption
    sends it, and SIGHUP always save one and end with status 75."""
    keep: int | None = option(None, min=1, show_default="all", panel=OUTPUT)
    """Checkpoints to keep, the newest ones."""
    resume: bool = option(False, panel=OUTPUT)
    """Go on from the newest whole checkpoint in --out, with its options where none are given; on
    any devices, at any stage and precision."""
    coordinator: str | None = option(None, metavar="HOST:PORT", **FOUND)
    """Where process 0 of several listens for the others."""
    num_processes: int | None = option(None, min=1, **FOUND)
    """Processes of this run; 1 where jax should look for none."""
    process_id: int | None = option(None, min=0, **FOUND)
    """Which of them this one is."""
    patience: float = option(PATIENCE, min=1.0, panel=PROCESSES)
    """Seconds without a sign of life after which a process is lost, and all end."""
    wait: float = option(WAIT, min=1.0, panel=PROCESSES)
    """Seconds that all processes have to start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, x in {"--lr": self.lr or 0.0, "--weight-decay": self.weight_decay}.items():
            as_amount(name, x)
        if self.resume and "init" in self.given:
            raise ValueError("--init: a resumed run has its weights; leave it or --resume out")
        if self.profile and self.profile + 2 > self.steps:
            raise ValueError(f"--profile {self.profile} records after two steps: give more --steps")
        if "keep" in self.given and self.save_every is None and not self.resume:
            raise ValueError("--keep: there are no checkpoints without --save-every; give it too")

    @functools.cached_property
    def text(self) -> Tokenizer:
        return Tokenizer(self.tokenizer)

    def resized(self, config: gpt.Config) -> gpt.Config:
        return dataclasses.replace(super().resized(config), vocab_size=self.text.vocab_size)

    def kept(self) -> dict[str, Any]:
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in OF_ONE_RUN}

    def taking_up(self, kept: dict[str, Any]) -> "TrainOptions":
        """Take the options of an earlier run, apart from those that were given now."""
        kept = kept | {"heads": self.heads_of(kept)}
        for name in ("optimizer", "model", "heads"):
            ours, was = getattr(self, name), kept.get(name)
            if name in self.given and was not in (None, ours):
                told = f"--{name} {ours}: the checkpoint has states of {was}; leave it out"
                remedy = ", or start a run from the weights with --init" * (name == "optimizer")
                raise ValueError(told + remedy)
        open_ = self.kept().keys() - self.given
        taken = {name: x for name, x in kept.items() if name in open_}
        taken = {name: tuple(x) if isinstance(x, list) else x for name, x in taken.items()}
        return dataclasses.replace(self, **taken)

    def heads_of(self, kept: dict[str, Any]) -> int:
        """Return the heads that an earlier run had, which no shape tells."""
        return kept.get("heads") or gpt.preset(kept.get("model", self.model)).num_heads
