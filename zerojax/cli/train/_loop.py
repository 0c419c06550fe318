"""The loop of `zerojax train`: steps, evaluations, checkpoints, and an orderly end."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import absl.logging  # which orbax logs with
import jax

from zerojax._types import PyTree
from zerojax.checkpoint import PendingSave
from zerojax.cli import charts
from zerojax.cli.shared._checkpoints import CHECKPOINTS
from zerojax.cli.shared._errors import INTERRUPTED, PREEMPTED, Failure, refusing
from zerojax.cli.train._evaluate import bits, sample
from zerojax.cli.train._metrics import Metrics
from zerojax.cli.train._run import TrainRun
from zerojax.cli.train._screen import TrainScreen
from zerojax.cli.train._signals import Signals
from zerojax.recipe import HOST_MEMORY
from zerojax.train import TrainState, unpad

#: Steps that may wait for an accelerator while the next is prepared. Virtual devices share one pool
#: of threads, where queued steps can wait for each other's collectives for ever: none wait there.
QUEUED_STEPS = {"cpu": 0}
QUEUED_STEPS_ELSEWHERE = 2
#: Characters of an error that is long because it has gone through several libraries.
MOST_TOLD = 300


def train_and_write(run: TrainRun, screen: TrainScreen) -> None:
    """Train, evaluate and write everything that a run asks for."""
    screen.start(run)
    absl.logging.set_verbosity(absl.logging.FATAL)  # orbax logs what it raises, many times
    try:
        with Signals() as signals:
            _Training(run, screen, signals).go()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Failure(
            "out of memory; give a higher --stage, a smaller --batch-size or --context, or more "
            f"microbatches with --accumulate ({str(error).splitlines()[0]})",
            status=1,
        ) from error


class _Training:
    """The moving parts of a run."""

    def __init__(self, run: TrainRun, screen: TrainScreen, signals: Signals) -> None:
        self.run, self.options = run, run.options
        self.screen, self.signals = screen, signals
        self.first_step = 0
        with refusing():
            restored = run.restore()
            state = jax.block_until_ready(run.initialise()) if restored is None else restored.state
        if restored is not None:
            self.first_step = restored.manifest.step or 0
            screen.restored(restored, self.first_step)
        self.state = state
        self.number = self.saved = self.first_step
        self.saving: PendingSave | None = None
        self.metrics = Metrics(self.options.out / "metrics.jsonl", self.first_step)
        self.evaluated = max(self.metrics.column("validation_bits_per_byte")[0], default=-1)
        self.pending: deque[tuple[int, dict[str, Any]]] = deque()
        platform = run.devices[0].platform
        self.queued_steps = QUEUED_STEPS.get(platform, QUEUED_STEPS_ELSEWHERE)
        self.clock = time.perf_counter()

    def go(self) -> None:
        """Train to the end, or until a signal or a loss that is not finite."""
        self.screen.held(*held_bytes(self.state))
        try:
            with self.screen.progress:
                self.train()
            if not self.signals.requested:
                self.finish()
                self.save_if_wanted()  # preempted after the last step
            if self.metrics.lines:
                self.write()
        finally:
            self.metrics.close()
            self.end_saving()
        if self.signals.requested:
            status = PREEMPTED if self.signals.preempted else INTERRUPTED
            raise Failure(self.how_to_go_on(), status)

    def train(self) -> None:
        """Do the steps that are left."""
        options = self.options
        eval_every = options.eval_every or max(options.steps // 10, 10)
        if self.number >= options.steps:
            self.screen.say(f"already at step {self.number}; nothing is left to train")
        if self.number == 0 and not self.signals.requested:
            self.evaluate()
        while self.number < options.steps and not self.signals.requested:
            self.step()
            if self.number % eval_every == 0:
                self.evaluate()
            if options.save_every and self.number % options.save_every == 0:
                self.save()
        self.settle(0)
        self.save_if_wanted()

    def save_if_wanted(self) -> None:
        """Save what was not saved yet, where checkpoints or a preemption ask for it."""
        wanted = self.options.save_every or self.signals.preempted
        if wanted and self.saved < self.number:
            self.save()
        self.end_saving()

    def step(self) -> None:
        """Send one step off and take in those that are done."""
        batch = jax.device_put(next(self.run.batches), self.run.layout.batch)
        before = time.perf_counter()
        self.state, metrics = self.run.step(self.state, batch)
        if self.number == self.first_step:  # the first call compiled the step
            self.clock = time.perf_counter()
            self.screen.say(f"compiled the step in {self.clock - before:.1f} s")
        self.number += 1
        if self.saving is not None and self.saving.is_done:
            self.end_saving()
        self.pending.append((self.number, metrics))
        self.settle(self.queued_steps)

    def settle(self, queued: int) -> None:
        """Wait until at most `queued` steps are under way, and record the others."""
        while len(self.pending) > queued:
            number, metrics = self.pending.popleft()
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            now = time.perf_counter()
            tokens = self.run.batch_size * self.run.config.context
            line = {
                "step": number,
                "loss": loss,
                "train_bits_per_byte": bits(loss),
                "grad_norm": norm,
                "learning_rate": float(self.run.rates[number - 1]),
                "tokens_per_second": round(tokens / (now - self.clock), 1),
            }
            if "loss_scale" in metrics:
                line["loss_scale"] = float(metrics["loss_scale"])
            self.clock = now
            self.metrics.add(**line)
            self.screen.step(line)
            if not math.isfinite(loss) and not metrics.get("skipped", False):
                self.write()
                raise Failure(
                    f"the loss is {loss} at step {number}: training diverged; give a smaller --lr, "
                    "a longer --warmup or a smaller --clip-norm",
                    status=1,
                )

    def evaluate(self) -> None:
        """Evaluate on the held-out text."""
        self.settle(0)
        found = self.run.evaluate(self.state)
        self.evaluated = self.number
        self.metrics.add(step=self.number, validation_bits_per_byte=found)
        self.screen.evaluated(self.number, found)
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Start to save a checkpoint: the state, the position in the data, and the options."""
        self.settle(0)
        self.end_saving()
        with _saving():
            self.saving = self.run.checkpoints.save(
                self.number,
                self.state,
                self.run.layout,
                data=self.run.batches.get_state(),
                metadata={"options": self.options.kept(), "recipe": self.run.step.recipe.to_dict()},
            )
        self.saved = self.number
        self.clock = time.perf_counter()

    def end_saving(self) -> None:
        """Wait for the checkpoint that is being saved, and tell of it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            with _saving():
                saving.wait()
            self.screen.say(f"saved {self.options.out / CHECKPOINTS / saving.path.name}")

    def finish(self) -> None:
        """Evaluate a last time and let the model write."""
        if self.evaluated < self.number:
            self.evaluate()
        self.screen.finished(self.metrics)
        if self.options.sample_bytes:
            start = self.run.corpus.held_out
            params = unpad(self.state.params, self.run.layout)
            self.screen.sampled(*sample(self.run.config, params, start, self.options))

    def write(self) -> None:
        """Write the plot, and say what else was written."""
        run, options, plot = self.run, self.options, self.options.out / "training.png"
        figure = charts.training_figure(
            f"{options.model}, {options.optimizer}, {options.precision}, "
            f"ZeRO stage {options.stage} on {len(run.devices)} devices",
            training=self.metrics.column("train_bits_per_byte"),
            held_out=self.metrics.column("validation_bits_per_byte"),
        )
        charts.write(figure, plot)
        self.screen.wrote(options.out / "metrics.jsonl", plot)

    def how_to_go_on(self) -> str:
        """Return where the run stopped and how to go on."""
        options = self.options
        word = "preempted" if self.signals.preempted else "interrupted"
        stopped = f"{word} after step {self.number} of {options.steps}"
        if not self.saved:
            return stopped
        return f"{stopped}; go on with: zerojax train --resume --out {options.out}"


@contextmanager
def _saving() -> Iterator[None]:
    """Turn what keeps a checkpoint from being written, a full disk say, into one line."""
    try:
        yield
    except (ValueError, OSError) as error:
        told = " ".join(str(error).split())[:MOST_TOLD]
        raise Failure(
            f"can't save a checkpoint: {told}; mend that (a full disk needs room), and go on with "
            "--resume from an earlier one, if there is one",
            status=1,
        ) from error


def held_bytes(state: TrainState) -> tuple[dict[str, int], int]:
    """Measure what the first device really holds between steps, by kind, and the host for it."""
    kinds = {"parameters": state.params, "masters": state.masters, "optimizer": state.opt_state}

    def count(tree: PyTree, *, hosted: bool) -> int:
        return sum(
            x.addressable_data(0).nbytes
            for x in jax.tree.leaves(tree)
            if (x.sharding.memory_kind == HOST_MEMORY) == hosted
        )

    held = {kind: count(tree, hosted=False) for kind, tree in kinds.items()}
    return held, count(state, hosted=True)
