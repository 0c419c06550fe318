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
from zerojax.checkpoint import PendingSave, Restored
from zerojax.cli.shared._errors import INTERRUPTED, PREEMPTED, Failure, Interrupted, refusing
from zerojax.cli.train._evaluate import bits, sample
from zerojax.cli.train._metrics import Record
from zerojax.cli.train._options import CHECKPOINTS
from zerojax.cli.train._plot import write_plot
from zerojax.cli.train._run import Session
from zerojax.cli.train._screen import Screen
from zerojax.cli.train._signals import Interrupt
from zerojax.recipe import HOST_MEMORY
from zerojax.train import TrainState

#: Steps that may wait for an accelerator while the next is prepared. Virtual devices share one pool
#: of threads, where queued steps can wait for each other's collectives for ever: none wait there.
QUEUED_STEPS = {"cpu": 0}
QUEUED_STEPS_ELSEWHERE = 2
#: Characters of an error that is long because it has gone through several libraries.
MOST_TOLD = 300


def run(session: Session, screen: Screen) -> None:
    """Train, evaluate and write everything that a session asks for.

    Raises:
        Failure: the loss is no longer finite, or memory ran out.
        Interrupted: Ctrl-C or SIGTERM; what there was has been written.
    """
    screen.start(session)
    absl.logging.set_verbosity(absl.logging.FATAL)  # orbax logs what it raises, many times
    try:
        with Interrupt() as interrupt:
            with refusing():
                restored = session.restore()
            _Training(session, screen, restored).run(interrupt)
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

    def __init__(self, session: Session, screen: Screen, restored: Restored | None) -> None:
        self.session = session
        self.screen = screen
        if restored is None:
            with refusing():
                weights = session.weights()
            self.state = jax.block_until_ready(session.initialise(weights))
            self.first_step = 0
        else:
            self.state = restored.state
            self.first_step = restored.manifest.step or 0
            screen.restored(restored, self.first_step)
        self.held, self.on_host = held_bytes(self.state)
        self.number = self.saved = self.first_step
        self.saving: PendingSave | None = None
        self.record = Record(session.options.out / "metrics.jsonl", self.first_step)
        self.evaluated = max(self.record.column("validation_bits_per_byte")[0], default=-1)
        self.pending: deque[tuple[int, dict[str, Any]]] = deque()
        platform = session.devices[0].platform
        self.queued_steps = QUEUED_STEPS.get(platform, QUEUED_STEPS_ELSEWHERE)
        self.clock = time.perf_counter()

    def run(self, interrupt: Interrupt) -> None:
        """Train to the end, or until a signal or a loss that is not finite."""
        self.screen.held(self.held, self.on_host)
        try:
            with self.screen.training():
                self.train(interrupt)
            if not interrupt.requested:
                self.finish()
                self.save_if_wanted(interrupt)  # preempted after the last step
            if self.record.lines:
                self.write()
        finally:
            self.record.close()
            self.end_saving()
        if interrupt.requested:
            status = PREEMPTED if interrupt.preempted else INTERRUPTED
            raise Interrupted(self.how_to_go_on(interrupt), status)

    def train(self, interrupt: Interrupt) -> None:
        """Do the steps that are left."""
        options = self.session.options
        eval_every = options.eval_every or max(options.steps // 10, 10)
        if self.number >= options.steps:
            self.screen.say(f"already at step {self.number}; nothing is left to train")
        if self.number == 0 and not interrupt.requested:
            self.evaluate()
        while self.number < options.steps and not interrupt.requested:
            self.step()
            if self.number % eval_every == 0:
                self.evaluate()
            if options.save_every and self.number % options.save_every == 0:
                self.save()
        self.settle(0)
        self.save_if_wanted(interrupt)

    def save_if_wanted(self, interrupt: Interrupt) -> None:
        """Save what was not saved yet, where checkpoints or a preemption ask for it."""
        wanted = self.session.options.save_every or interrupt.preempted
        if wanted and self.saved < self.number:
            self.save()
        self.end_saving()

    def step(self) -> None:
        """Send one step off and take in those that are done."""
        batch = jax.device_put(next(self.session.batches), self.session.layout.batch)
        before = time.perf_counter()
        self.state, metrics = self.session.step(self.state, batch)
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
            line = {
                "step": number,
                "loss": loss,
                "train_bits_per_byte": bits(loss),
                "grad_norm": norm,
                "learning_rate": float(self.session.rates[number - 1]),
                "tokens_per_second": round(self.session.tokens_per_step / (now - self.clock), 1),
            }
            if "loss_scale" in metrics:
                line["loss_scale"] = float(metrics["loss_scale"])
            self.clock = now
            self.record.add(**line)
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
        found = self.session.evaluation(self.state.params)
        self.evaluated = self.number
        self.record.add(step=self.number, validation_bits_per_byte=found)
        self.screen.evaluated(self.number, found)
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Start to save a checkpoint: the state, the position in the data, and the options."""
        self.settle(0)
        self.end_saving()
        with _saving():
            self.saving = self.session.checkpoints.save(
                self.number,
                self.state,
                self.session.layout,
                data=self.session.batches.get_state(),
                metadata={"options": self.session.options.kept()},
            )
        self.saved = self.number
        self.clock = time.perf_counter()

    def end_saving(self) -> None:
        """Wait for the checkpoint that is being saved, and tell of it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            with _saving():
                saving.wait()
            self.screen.say(f"saved {self.session.options.out / CHECKPOINTS / saving.path.name}")

    def finish(self) -> None:
        """Evaluate a last time and let the model write."""
        if self.evaluated < self.number:
            self.evaluate()
        options = self.session.options
        self.screen.finished(self.record)
        if options.sample_bytes:
            self.screen.sampled(
                *sample(
                    self.session.config, self.state.params, self.session.layout, options.prompt,
                    self.session.corpus.held_out, options.sample_bytes, options.seed,
                )
            )  # fmt: skip

    def write(self) -> None:
        """Write the plot, and say what else was written."""
        plot = write_plot(self.session, self.record, self.held)
        self.screen.wrote([self.session.options.out / "metrics.jsonl", plot])

    def how_to_go_on(self, interrupt: Interrupt) -> str:
        """Say where the run stopped and how to go on."""
        options = self.session.options
        word = "preempted" if interrupt.preempted else "interrupted"
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
    kinds = {
        "parameters": state.params,
        "masters": state.masters,
        "optimizer": state.opt_state,
    }

    def count(tree: PyTree, *, hosted: bool) -> int:
        return sum(
            x.addressable_data(0).nbytes
            for x in jax.tree.leaves(tree)
            if (x.sharding.memory_kind == HOST_MEMORY) == hosted
        )

    held = {kind: count(tree, hosted=False) for kind, tree in kinds.items()}
    return held, count(state, hosted=True)
