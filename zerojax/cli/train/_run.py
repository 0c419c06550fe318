"""What a run of `zerojax train` is made of, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from zerojax.checkpoint import (
    Checkpoints,
    IncompatibleCheckpointError,
    Restored,
    find_checkpoints,
    read_manifest,
)
from zerojax.cli.shared._built_step import gpt_layout
from zerojax.cli.shared._devices import find_devices, memory_per_device
from zerojax.cli.shared._files import check_outputs
from zerojax.cli.train._evaluate import Evaluation
from zerojax.cli.train._options import CHECKPOINTS, TrainOptions
from zerojax.cli.train._weights import read_weights
from zerojax.data import BatchIterator, Corpus, load_corpus, make_batches
from zerojax.layout import STAGES, Description, Layout, make_mesh
from zerojax.models import gpt
from zerojax.train import (
    TrainState,
    TrainStep,
    first_loss_scale,
    make_train_step,
)

#: Examples per step where none are asked for: the next number that devices and microbatches divide.
BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun:
    """A run that is ready to start.

    Attributes:
        options: with every choice made that decides what is learned.
        stage_bytes: bytes per device by kind, for each stage.
        rates: the learning rate of each step.
        checkpoint: the newest one, which the run is to start from, or None.
        checkpoints: all of them, one per step that was saved.
    """

    options: TrainOptions
    config: gpt.Config
    corpus: Corpus
    batches: BatchIterator
    evaluation: Evaluation
    step: TrainStep
    description: Description
    stage_bytes: dict[int, dict[str, int]]
    rates: np.ndarray
    checkpoint: Path | None
    checkpoints: Checkpoints

    @property
    def layout(self) -> Layout:
        """Where the leaves of the state live."""
        return self.step.layout

    @property
    def devices(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.layout.devices.flat)

    @property
    def batch_size(self) -> int:
        """Examples per step."""
        assert self.options.batch_size is not None
        return self.options.batch_size

    def restore(self) -> Restored | None:
        """Restore the newest whole checkpoint and move the data to where it stood.

        Returns:
            What was restored; None where the run does not go on from anything.
        """
        if self.checkpoint is None:
            return None
        # What was trained without a loss scale goes on with a fresh one.
        scale = first_loss_scale(self.step.recipe.precision.loss_scale)
        like = dataclasses.replace(self.step.abstract_state(), loss_scale=scale)
        try:
            restored = self.checkpoints.restore_latest(self.layout, like)
        except IncompatibleCheckpointError as error:
            kept = read_manifest(self.checkpoint).metadata["options"]
            names = ("model", "optimizer", "precision")
            given = " ".join(f"--{name} {kept[name]}" for name in names)
            raise ValueError(
                f"--resume: {self.checkpoint} was saved with {given}, which this run does not fit: "
                f"{'; '.join(error.differences[:3])}"
            ) from error
        if restored is not None:
            self.batches.set_state(dict(restored.manifest.data))
        return restored

    def initialise(self) -> TrainState:
        """Initialise the state from the weights that the options name, or from the seed."""
        if self.options.init is not None:
            return self.step.init(read_weights(self.options.init, self.layout))
        init = functools.partial(gpt.init, self.config)
        return self.step.init(init, jax.random.key(self.options.seed))


def take_up(options: TrainOptions) -> tuple[TrainOptions, Path | None]:
    """Find the checkpoint to go on from, and take up the options that it keeps."""
    passed_over: list[str] = []
    found = find_checkpoints(options.out / CHECKPOINTS, lambda _, why: passed_over.append(why))
    if not options.resume:
        if found:
            raise ValueError(
                f"{options.out} holds checkpoints of an earlier run, up to step {max(found)}; go "
                "on from there with --resume, or give another folder to --out"
            )
        return options, None
    if not found:
        raise ValueError(
            f"--resume: there is no whole checkpoint in {options.out / CHECKPOINTS}"
            + (f" ({'; '.join(passed_over)})" if passed_over else "")
            + "; leave --resume out to start a run, with --save-every to have checkpoints"
        )
    path = found[max(found)]
    manifest = read_manifest(path)
    if "options" not in manifest.metadata or manifest.data is None or manifest.step is None:
        raise ValueError(f"--resume: {path} was not saved by `zerojax train`; restore it in Python")
    return options.taking_up(manifest.metadata["options"]), path


def prepare(options: TrainOptions, checkpoint: Path | None) -> TrainRun:
    """Make everything that a run needs, apart from its state."""
    devices = find_devices(options.devices)
    axes = options.mesh_axes(len(devices))
    config, optimizer = options.chosen_model, options.chosen_optimizer
    schedule = optimizer.schedule(options.lr, options.warmup_steps, options.steps, config.width)
    tx = optimizer.make(schedule, options.weight_decay)
    corpus = load_corpus(options.data, context=config.context)
    recipe = options.recipe(options.clip_norm or None)
    batch_size = options.examples(axes["data"], BATCH_SIZE)
    options = dataclasses.replace(options, stage=options.chosen_stage, batch_size=batch_size)
    mesh = make_mesh(axes, devices=devices)
    layouts = {stage: gpt_layout(config, mesh, stage) for stage in STAGES}
    layout = layouts[options.chosen_stage]
    description = layout.describe(tx, recipe)
    _check_memory(description, devices, options)
    step = make_train_step(functools.partial(gpt.loss, config), tx, layout, recipe)
    check_outputs({"--out": options.out / "metrics.jsonl"})
    return TrainRun(
        options=options,
        config=config,
        corpus=corpus,
        batches=make_batches(
            corpus.train, context=config.context, batch_size=batch_size, seed=options.seed
        ),
        evaluation=Evaluation(
            step, corpus.held_out, config.context, options.eval_windows, batch_size
        ),
        step=step,
        description=description,
        stage_bytes={stage: one.bytes_per_device(tx, recipe) for stage, one in layouts.items()},
        rates=np.asarray(jax.vmap(schedule)(jnp.arange(options.steps))),
        checkpoint=checkpoint,
        checkpoints=Checkpoints(options.out / CHECKPOINTS, keep=options.keep),
    )


def _check_memory(description: Description, devices: list[Any], options: TrainOptions) -> None:
    """Refuse a model whose states alone are larger than a device."""
    there, needed = memory_per_device(devices), description.bytes["total"]
    if "optimizer" in options.offload and devices[0].platform != "cpu":  # whose host is the device
        needed -= description.bytes["optimizer"] + description.bytes["masters"]
    if there is not None and needed > there:
        raise ValueError(
            f"--model {options.model} at stage {options.stage} takes {decimal(needed)} of model "
            f"states on each of {len(devices)} devices, which have {decimal(there)} each; give a "
            "higher --stage, more devices or a smaller --model"
        )
