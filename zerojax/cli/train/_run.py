"""What a run of `zerojax train` is made of, checked before anything is computed."""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import zerojax.checkpoint
from zerojax._display import decimal
from zerojax._types import PyTree
from zerojax.checkpoint import Checkpoints, Restored, find_checkpoints, read_manifest, restore
from zerojax.cli.shared import _machine
from zerojax.cli.shared._command import Failure, Screen
from zerojax.cli.shared._options import OPTIMIZERS, gpt_layout, make_schedule
from zerojax.cli.train._options import TrainOptions
from zerojax.data import load_corpus, make_batches
from zerojax.layout import Layout, make_mesh
from zerojax.models import gpt
from zerojax.train import TrainState, first_loss_scale, make_train_step


def held_out_batches(
    text: np.ndarray, num_windows: int, *, context: int, batch_size: int, vocab_size: int
) -> np.ndarray:  # [batches, B, T + 1]
    """Cut fixed stretches of held-out text into whole batches of a step.

    What is left over is not looked at; where they are too few for one batch some come again.
    """
    one = {"context": context, "batch_size": 1, "vocab_size": vocab_size}
    windows = make_batches(text, num_epochs=1, **one)
    rows = np.concatenate(list(itertools.islice(windows, num_windows)))
    return np.resize(rows, (max(1, len(rows) // batch_size), batch_size, context + 1))


#: Examples per step where none are asked for: the next number that devices and microbatches divide.
BATCH_SIZE = 32


class TrainRun:
    def __init__(self, options: TrainOptions, checkpoint: Path | None, num_processes: int) -> None:
        found = _machine.find_devices(options.devices, num_processes)
        axes = options.mesh_axes(len(found))
        self.config = config = options.chosen_model
        context, width = config.context, config.width
        self.warmup = options.steps // 10 if options.warmup is None else options.warmup
        schedule = make_schedule(options.lr, self.warmup, options.steps, width)
        tx = OPTIMIZERS[options.optimizer](schedule, options.weight_decay)
        self.corpus = load_corpus(options.data, context=context, tokenizer=options.text)
        sample = self.corpus.held_out[: 1 << 16]
        self.bytes_per_token = options.text.num_bytes(sample) / sample.size
        recipe, stage = options.recipe(options.clip_norm or None), options.stage
        self.batch_size = options.examples(axes["data"], BATCH_SIZE)
        self.options = dataclasses.replace(options, batch_size=self.batch_size)
        mesh = make_mesh(axes, devices=found)
        self.devices = list(mesh.devices.flat)
        self.layout, whole = gpt_layout(self.config, mesh, stage), gpt_layout(self.config, mesh, 0)
        self.description = self.layout.describe(tx, recipe)
        # It gathers nothing.
        plain = dataclasses.replace(recipe, reshard_after_forward=True, prefetch=None)
        self.plain = whole.bytes_per_device(tx, plain)
        self._check_memory()
        loss_fn = functools.partial(gpt.loss, self.config)
        self.step = make_train_step(loss_fn, tx, self.layout, recipe)
        self.rate = jax.jit(schedule)
        index, count = self.step.batch_part
        cut = {"context": context, "batch_size": self.batch_size, "vocab_size": config.vocab_size}
        own = {"seed": options.seed, "process_index": index, "process_count": count}
        self.batches = make_batches(self.corpus.train, **cut, **own)
        held_out = held_out_batches(self.corpus.held_out, options.eval_windows, **cut)
        self.held_out = held_out[:, index::count]
        if jax.process_index() == 0:
            _machine.check_output("--out", options.out / "metrics.jsonl")
        self.checkpoint = checkpoint
        self.checkpoints = Checkpoints(options.out / _machine.CHECKPOINTS, keep=options.keep)

    def bits(self, nats: float) -> float:
        return nats / float(np.log(2)) / self.bytes_per_token

    def start(self) -> tuple[TrainState, Restored | None]:
        """Return the state to start from, and what it was restored from; the data move along.

        That is the newest whole checkpoint, or the weights that the options name, or the seed's.
        """
        options, restored = self.options, None
        if self.checkpoint is not None:
            # What was trained without a loss scale goes on with a fresh one.
            scale = first_loss_scale(self.step.recipe.precision.loss_scale)
            like = dataclasses.replace(self.step.abstract_state(), loss_scale=scale)
            restored = self.checkpoints.restore_latest(self.layout, like)
        if restored is not None:
            try:
                self.batches.set_state(dict(restored.manifest.data))
            except (LookupError, TypeError, OverflowError) as error:
                told = f"--resume: {restored.path} names no place in the data ({error})"
                raise ValueError(f"{told}; remove it to go on from an older one") from error
            return restored.state, restored
        if options.init is not None:
            return self.step.init(_read_weights(options, options.init, self.layout)), None
        init = functools.partial(gpt.init, self.config)
        return self.step.init(init, jax.random.key(options.seed)), None

    def _check_memory(self) -> None:
        options, devices, held = self.options, self.devices, self.description.bytes
        there, needed = _machine.memory_per_device(devices), held["total"]
        if "optimizer" in options.offload and devices[0].platform != "cpu":  # host = device there
            needed -= held["optimizer"] + held["masters"]
        if there is not None and needed > there:
            told = f"{options.model} at stage {options.stage} takes {decimal(needed)} of model"
            told += f" states on a device, which has {decimal(there)}; give a higher --stage,"
            raise ValueError(f"{told} more devices or a smaller --model")


@contextlib.contextmanager
def sole_run(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder: they would write over each other's files.

    The lock ends with the process, however that ends. A file system without locks is told of.
    """
    if jax.process_index():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise Failure(
                f"{folder} is in use by another run, {file.read()}; give another folder to --out. "
                "Are these processes of one run? Then let them find each other: --coordinator, "
                "--num-processes and --process-id, or a launcher that jax knows (srun, mpirun)"
            ) from error
        except OSError as error:
            told = f"{folder} can't be locked ({error}): keep other runs out of it yourself"
            warnings.warn(told, stacklevel=2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def take_up(options: TrainOptions) -> tuple[TrainOptions, Path | None]:
    """Find the checkpoint to go on from, and take up the options that it keeps."""
    damaged: list[str] = []
    found = find_checkpoints(options.out / _machine.CHECKPOINTS, lambda _, why: damaged.append(why))
    if not options.resume:
        if found:
            told = f"{options.out} holds checkpoints of an earlier run, up to step {max(found)}"
            raise ValueError(f"{told}; go on with --resume, or give another folder to --out")
        return options, None
    if not found:
        raise ValueError(
            f"--resume: there is no whole checkpoint in {options.out / _machine.CHECKPOINTS}"
            + (f" ({'; '.join(damaged)})" if damaged else "")
            + "; leave --resume out to start a run, with --save-every to have checkpoints"
        )
    path = found[max(found)]
    manifest = read_manifest(path)
    told = manifest.metadata.get("options"), manifest.data
    if not all(isinstance(one, dict) for one in told) or manifest.step is None:
        raise ValueError(f"--resume: {path} was not saved by `zerojax train`; restore it in Python")
    return options.taking_up(manifest.metadata["options"]), path


def _read_weights(options: TrainOptions, path: Path, layout: Layout) -> PyTree:
    # What is cut without padding comes cut, as masters lie; the step's state is made of it.
    like = jax.tree.map(lambda x, at: x.update(sharding=at), layout.shapes, layout.masters)
    if path.exists() and zerojax.checkpoint.is_safetensors(path):
        return zerojax.checkpoint.import_safetensors(path, layout, like)
    found = _machine.find_checkpoint(path, Screen(quiet=jax.process_index() > 0))
    weights = restore(found, layout, {"params": like}, partial=True)["params"]
    kept = read_manifest(found).metadata.get("options")
    was, ours = options.heads_of(kept or options.kept()), options.chosen_model.num_heads
    if was != ours:
        raise ValueError(f"--init: {path} has {was} heads, this model {ours}; give --heads {was}")
    return weights
