"""What a run of `zerojax train` is made of, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

from zerojax._types import PyTree
from zerojax.checkpoint import (
    Checkpoints,
    Restored,
    find_checkpoints,
    import_safetensors,
    is_safetensors,
    read_manifest,
    restore,
)
from zerojax.cli.shared._built_step import gpt_layout
from zerojax.cli.shared._checkpoints import CHECKPOINTS, find_checkpoint
from zerojax.cli.shared._devices import find_devices, memory_per_device
from zerojax.cli.shared._files import check_outputs
from zerojax.cli.train._evaluate import evaluate, held_out_batches
from zerojax.cli.train._options import TrainOptions
from zerojax.data import load_corpus, make_batches
from zerojax.layout import Layout, make_mesh
from zerojax.models import gpt
from zerojax.train import TrainState, first_loss_scale, make_train_step

#: Examples per step where none are asked for: the next number that devices and microbatches divide.
BATCH_SIZE = 32


class TrainRun:
    """A run that is ready to start.

    Attributes:
        options: with every choice made that decides what is learned.
        config: the model.
        corpus: the text to train on, and what is held out of it.
        description: bytes of the states on a device, beside the theory.
        plain: bytes per device by kind under stage 0.
        rates: the learning rate of each step.
        checkpoint: the newest one, which the run is to start from, or None.
        checkpoints: all of them, one per step that was saved.
    """

    def __init__(self, options: TrainOptions, checkpoint: Path | None) -> None:
        found = find_devices(options.devices)
        axes = options.mesh_axes(len(found))
        self.config, optimizer = options.chosen_model, options.chosen_optimizer
        context, width = self.config.context, self.config.width
        schedule = optimizer.schedule(options.lr, options.warmup_steps, options.steps, width)
        tx = optimizer.make(schedule, options.weight_decay)
        self.corpus = load_corpus(options.data, context=context)
        recipe, stage = options.recipe(options.clip_norm or None), options.chosen_stage
        self.batch_size = options.examples(axes["data"], BATCH_SIZE)
        self.options = dataclasses.replace(options, stage=stage, batch_size=self.batch_size)
        mesh = make_mesh(axes, devices=found)
        self.devices = list(mesh.devices.flat)
        self.layout, whole = gpt_layout(self.config, mesh, stage), gpt_layout(self.config, mesh, 0)
        self.description = self.layout.describe(tx, recipe)
        self.plain = whole.bytes_per_device(tx, recipe)
        self._check_memory()
        self.step = make_train_step(
            functools.partial(gpt.loss, self.config), tx, self.layout, recipe
        )
        self.rates = np.asarray(jax.vmap(schedule)(jnp.arange(options.steps)))
        self.batches = make_batches(
            self.corpus.train, context=context, batch_size=self.batch_size, seed=options.seed
        )
        self._held_out = held_out_batches(
            self.corpus.held_out, context, options.eval_windows, self.batch_size
        )
        files = {"--out": "metrics.jsonl", "--plot": "training.png"}
        check_outputs({option: options.out / name for option, name in files.items()})
        self.checkpoint = checkpoint
        self.checkpoints = Checkpoints(options.out / CHECKPOINTS, keep=options.keep)

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
        restored = self.checkpoints.restore_latest(self.layout, like)
        if restored is not None:
            self.batches.set_state(dict(restored.manifest.data))
        return restored

    def initialise(self) -> TrainState:
        """Initialise the state from the weights that the options name, or from the seed."""
        if self.options.init is not None:
            return self.step.init(_read_weights(self.options.init, self.layout))
        init = functools.partial(gpt.init, self.config)
        return self.step.init(init, jax.random.key(self.options.seed))

    def evaluate(self, state: TrainState) -> float:
        """Return the bits per byte of held-out text."""
        return evaluate(self.step, state, self._held_out)

    def _check_memory(self) -> None:
        """Refuse a model whose states alone are larger than a device."""
        options, devices, held = self.options, self.devices, self.description.bytes
        there, needed = memory_per_device(devices), held["total"]
        if "optimizer" in options.offload and devices[0].platform != "cpu":  # host = device there
            needed -= held["optimizer"] + held["masters"]
        if there is not None and needed > there:
            raise ValueError(
                f"--model {options.model} at stage {options.stage} takes {decimal(needed)} of "
                f"model states on each of {len(devices)} devices, which have {decimal(there)} "
                "each; give a higher --stage, more devices or a smaller --model"
            )


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


def _read_weights(path: Path, layout: Layout) -> PyTree:
    """Read parameters from safetensors files, or from a checkpoint; each device reads its part."""
    like = layout.map_leaves(
        lambda leaf, x: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            # What is cut without padding comes cut; the step's state is made of it.
            sharding=layout.sharding(leaf.whole_spec if leaf.is_padded else leaf.shard_spec),
        ),
        layout.shapes,
    )
    if path.exists() and is_safetensors(path):
        return import_safetensors(path, layout, like)
    found = find_checkpoint(path)
    return restore(found, layout, {"params": like}, partial=True)["params"]
