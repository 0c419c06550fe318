"""What a run of `zerojax train` is made of, checked before anything is computed."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from rich.filesize import decimal

from zerojax._types import PyTree
from zerojax.checkpoint import (
    Checkpoints,
    IncompatibleCheckpointError,
    Restored,
    find_checkpoints,
    read_manifest,
)
from zerojax.cli.shared._devices import find_devices, memory_per_device
from zerojax.cli.shared._optimizers import find_optimizer, make_schedule
from zerojax.cli.train._evaluate import Evaluation
from zerojax.cli.train._options import CHECKPOINTS, Options
from zerojax.cli.train._weights import read_weights
from zerojax.data import BatchIterator, Corpus, load_corpus, make_batches
from zerojax.layout import STAGES, Description, Layout, make_layout, make_mesh
from zerojax.models import gpt
from zerojax.recipe import DynamicLossScale, OffloadPolicy, Precision
from zerojax.train import (
    TrainState,
    TrainStep,
    abstract_train_state,
    first_loss_scale,
    init_train_state,
    make_train_step,
)

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(params=jnp.bfloat16, master=jnp.float32),
    "fp16": Precision(params=jnp.float16, master=jnp.float32, loss_scale=DynamicLossScale()),
}
#: Examples per step where none are asked for: the next number that devices and microbatches divide.
BATCH_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """A run that is ready to start.

    Attributes:
        options: with every choice made that decides what is learned.
        offload: what the host keeps of the state.
        stage_bytes: bytes per device by kind, for each stage.
        batch_size: examples per step.
        rates: the learning rate of each step.
        checkpoint: the newest one, which the run is to start from, or None.
        checkpoints: all of them, one per step that was saved.
    """

    options: Options
    config: gpt.Config
    corpus: Corpus
    batches: BatchIterator
    evaluation: Evaluation
    layout: Layout
    tx: optax.GradientTransformation
    precision: Precision
    offload: OffloadPolicy | None
    step: TrainStep
    description: Description
    stage_bytes: dict[int, dict[str, int]]
    batch_size: int
    rates: np.ndarray
    checkpoint: Path | None
    checkpoints: Checkpoints

    @property
    def devices(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.layout.devices.flat)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one step learns to predict."""
        return self.batch_size * self.config.context

    def restore(self) -> Restored | None:
        """Restore the newest whole checkpoint and move the data to where it stood.

        Returns:
            What was restored; None where the run does not go on from anything.

        Raises:
            ValueError: the checkpoint is of another model or optimizer, or of other data; or all
                checkpoints are damaged.
        """
        if self.checkpoint is None:
            return None
        like = abstract_train_state(
            *self._initial(), precision=self.precision, offload=self.offload
        )
        # What was trained without a loss scale goes on with a fresh one.
        like = dataclasses.replace(like, loss_scale=first_loss_scale(self.precision.loss_scale))
        try:
            restored = self.checkpoints.restore(self.layout, like)
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

    def weights(self) -> PyTree:
        """Read the parameters that the options name; None where they name none.

        Raises:
            ValueError: they are of another model, or damaged.
        """
        if self.options.init is None:
            return None
        init, _, layout, key = self._initial()
        return read_weights(self.options.init, layout, jax.eval_shape(init, key))

    def initialise(self, weights: PyTree) -> TrainState:
        """Initialise the state from weights, or from the seed where there are none."""
        init, tx, layout, given = self._initial()
        if weights is not None:
            init, given = _as_given, weights
        return init_train_state(
            init, tx, layout, given, precision=self.precision, offload=self.offload
        )

    def _initial(self) -> tuple[Any, ...]:
        init = functools.partial(gpt.init, self.config)
        return init, self.tx, self.layout, jax.random.key(self.options.seed)


def _as_given(params: PyTree) -> PyTree:
    return params


def take_up(options: Options, given: frozenset[str]) -> tuple[Options, Path | None]:
    """Find the checkpoint to go on from, and take up the options that it keeps.

    Raises:
        ValueError: there is none to resume, or one that a new run would mix itself with.
    """
    if options.resume and "init" in given:
        raise ValueError("--init: a run that is resumed has its weights; leave it or --resume out")
    if "keep" in given and options.save_every is None and not options.resume:
        raise ValueError("--keep: there are no checkpoints without --save-every; give it too")
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
    return options.taking_up(manifest.metadata["options"], given), path


def prepare(options: Options, checkpoint: Path | None) -> Session:
    """Make everything that a run needs, apart from its state.

    Raises:
        ValueError: an option that can't be met, data that is missing or too short.
        OSError: the folder for the results can't be written to.
    """
    residual = options.residual
    options = dataclasses.replace(options, stage=residual.stage(options.stage))
    config = gpt.preset(options.model)
    config = dataclasses.replace(config, context=options.context or config.context)
    choice = find_optimizer(options.optimizer)
    if options.precision not in PRECISIONS:
        raise ValueError(f"--precision {options.precision}: give one of {', '.join(PRECISIONS)}")
    if options.prompt == "":
        raise ValueError("--prompt is empty; give at least one character")
    precision = PRECISIONS[options.precision]
    warmup = options.steps // 10 if options.warmup is None else options.warmup
    schedule = make_schedule(choice, options.lr, warmup, options.steps, config.width)
    tx = choice.make(schedule, options.weight_decay)
    devices = find_devices(options.devices)
    axes = residual.axes(len(devices))
    config, remat = residual.model(config), residual.remat()
    corpus = load_corpus(options.data, context=config.context)

    offload = residual.offloads(choice, devices)
    batch_size = _batch_size(options, axes["data"])
    options = dataclasses.replace(options, batch_size=batch_size)
    layouts = _layouts(config, make_mesh(axes, devices=devices))
    layout = layouts[residual.stage(options.stage)]
    description = layout.describe(tx, precision)
    _check_memory(description, devices, options, offload)
    _check_writable(options.out)
    loss = functools.partial(gpt.loss, config)
    return Session(
        options=options,
        config=config,
        corpus=corpus,
        batches=make_batches(
            corpus.train,
            context=config.context,
            batch_size=batch_size,
            seed=options.seed,
        ),
        evaluation=Evaluation(
            loss, layout, corpus.held_out, config.context, options.eval_windows, batch_size
        ),
        layout=layout,
        tx=tx,
        precision=precision,
        offload=offload,
        step=make_train_step(
            loss, tx, layout, precision=precision, accumulate=options.accumulate,
            clip_norm=options.clip_norm or None, remat=remat, offload=offload,
        ),
        description=description,
        stage_bytes={stage: x.bytes_per_device(tx, precision) for stage, x in layouts.items()},
        batch_size=batch_size,
        rates=np.asarray(jax.vmap(schedule)(jnp.arange(options.steps))),
        checkpoint=checkpoint,
        checkpoints=Checkpoints(options.out / CHECKPOINTS, keep=options.keep),
    )  # fmt: skip


def _layouts(config: gpt.Config, mesh: Mesh) -> dict[int, Layout]:
    """Place the model under every stage."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(gpt.init, config), key)
    specs = None if config.model_axis is None else gpt.specs(config)
    return {stage: make_layout(shapes, mesh, stage=stage, specs=specs) for stage in STAGES}


def _batch_size(options: Options, num_parts: int) -> int:
    """Give the examples per step, which devices along data and microbatches must divide."""
    multiple = num_parts * options.accumulate
    if options.batch_size is None:
        return -(-BATCH_SIZE // multiple) * multiple
    if options.batch_size % multiple:
        near = -(-options.batch_size // multiple) * multiple
        what = "devices" if options.residual.num_parts == 1 else "groups along the model axis"
        times = f" times {options.accumulate} microbatches" if options.accumulate > 1 else ""
        raise ValueError(
            f"--batch-size {options.batch_size} can't be split evenly over {num_parts} {what}"
            f"{times}; give a multiple of {multiple}, such as {near}"
        )
    return options.batch_size


def _check_memory(
    description: Description, devices: list[Any], options: Options, offload: OffloadPolicy | None
) -> None:
    """Refuse a model whose states alone are larger than a device."""
    there, needed = memory_per_device(devices), description.bytes["total"]
    if offload is not None and devices[0].platform != "cpu":  # whose host is the device
        kinds = {"optimizer": "optimizer", "master": "masters"}
        needed -= sum(description.bytes[kinds[kind]] for kind in offload.kinds if kind in kinds)
    if there is not None and needed > there:
        raise ValueError(
            f"--model {options.model} at stage {options.stage} takes {decimal(needed)} of model "
            f"states on each of {len(devices)} devices, which have {decimal(there)} each; give a "
            "higher --stage, more devices or a smaller --model"
        )


def _check_writable(out: Path) -> None:
    """Make the folder of the results and see that files can be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "metrics.jsonl").open("a"):
            pass
    except OSError as error:
        raise OSError(f"can't write to --out {out}: {error.strerror}") from error
