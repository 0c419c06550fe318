"""`zerojax train`: the loop of steps, evaluations and checkpoints, and an orderly end."""

import math
import shlex
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import absl.logging  # which orbax logs with
import jax
from rich.text import Text

from zerojax import charts
from zerojax.checkpoint import PendingSave
from zerojax.cli.shared._command import INTERRUPTED, PREEMPTED, Failure, command, refusing
from zerojax.cli.shared._machine import CHECKPOINTS
from zerojax.cli.train._options import TrainOptions
from zerojax.cli.train._run import TrainRun, sole_run, take_up
from zerojax.cli.train._screen import Metrics, TrainScreen, measure
from zerojax.cli.train._signals import LOSSES, UNWRITTEN, Signals
from zerojax.processes import ProcessError, agree, has_started, initialize, leave, set_remedy
from zerojax.recipe import DynamicLossScale

#: Steps that may wait for an accelerator while the next is prepared. Virtual devices share one pool
#: of threads, where queued steps can wait for each other's collectives for ever: none wait there.
QUEUED_STEPS = 2


@command
def train(options: TrainOptions) -> None:
    r"""Train a GPT on text under a ZeRO stage.

    Shows the bytes that one device holds of each kind, beside the theory and beside plain data
    parallelism; trains; evaluates on held-out text; writes metrics.jsonl and training.png to the
    folder `--out`. Ctrl-C finishes the step and draws what there is.

    Without an accelerator devices are virtual ones on the CPU, which hold what real ones would.

    Examples: the tiny model on Python's standard library; everything partitioned, in bf16; the
    paper's configuration C4, with each layer shared by two devices; text of one's own, with
    checkpoints; and going on from them, also on another number of devices.

    ```
    zerojax train
    zerojax train --stage 3 --precision bf16
    zerojax train --stage 2 --model-axis 2 --partition-activations
    zerojax train --data 'books/*.txt' --steps 2000 --save-every 500 \
      --out runs/books
    zerojax train --resume --steps 4000 --out runs/books
    ```
    """
    with refusing():
        run = TrainRun(*take_up(options), _connect(options))
        asked = (f"{name}: {value}" for name, value in run.options.kept().items())
        agree("training", {"options": "\n".join(asked), "text": str(run.batches.get_state())})
    queued = 0 if run.devices[0].platform == "cpu" else QUEUED_STEPS
    absl.logging.set_verbosity(absl.logging.FATAL)  # orbax logs what it raises, many times
    try:
        with sole_run(options.out), Signals(queued) as signals:
            screen = TrainScreen(signals, quiet=jax.process_index() > 0)
            screen.start(run)
            _Training(run, screen, signals, queued).go()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise Failure(
            "out of memory; give a higher --stage, a smaller --batch-size or --context, or more "
            f"microbatches with --accumulate ({str(error).splitlines()[0]})",
            status=1,
        ) from error


def _connect(options: TrainOptions) -> int:
    places = options.coordinator, options.num_processes, options.process_id
    if places == (None, None, None) and has_started():  # called from Python, in a notebook say
        return jax.process_count()
    return initialize(*places, patience=options.patience, wait=options.wait)


class _Training:
    def __init__(self, run: TrainRun, screen: TrainScreen, signals: Signals, queued: int) -> None:
        self.run, self.options = run, run.options
        self.screen, self.signals, self.queued_steps = screen, signals, queued
        asked = ["--resume", "--out", str(self.options.out)]
        if "devices" in self.options.given:
            asked += ["--devices", str(self.options.devices)]
        self.how = f"go on with: zerojax train {shlex.join(asked)}"
        self.first_step = 0
        with refusing():
            self.state, restored = run.start()
            jax.block_until_ready(self.state)
        if restored is not None:
            self.first_step = restored.manifest.step or 0
            screen.restored(restored, self.first_step)
            set_remedy(self.how)
        self.number = self.saved = self.first_step
        self.saving: PendingSave | None = None
        self.is_first = jax.process_index() == 0  # which alone prints and writes
        path = self.options.out / "metrics.jsonl"
        if not self.first_step and path.exists():
            screen.say(f"replaces the metrics of an earlier run in {self.options.out}")
        ways = {"is_kept": self.is_first, "tensorboard": self.options.tensorboard}
        self.metrics = Metrics(path, self.first_step, **ways)
        self.recording = ExitStack()
        self.evaluated = -1
        self.pending: deque[tuple[int, dict[str, Any]]] = deque()
        self.clock = time.perf_counter()

    def go(self) -> None:
        """Train to the end, or until a signal or a loss that is not finite."""
        self.screen.say(f"measured: {self.state!r}; gradients live within a step alone")
        try:
            self.train()
            if not self.signals.everywhere():
                if self.evaluated < self.number:
                    self.evaluate()
                self.save_if_wanted()  # preempted after the last step
            with self.signals.writing(self.options.out):
                self.draw()
        finally:
            self.recording.close()
            self.end_saving()
            self.metrics.close()
        seen = self.signals.everywhere()
        leave()
        if seen:
            lost = seen & LOSSES
            word, status = ("preempted", PREEMPTED) if lost else ("interrupted", INTERRUPTED)
            if UNWRITTEN in seen:
                word, status = f"{self.signals.unwritten}ended", 1
            stopped = f"{word} after step {self.number} of {self.options.steps}"
            raise Failure(stopped + (f"; {self.how}" if self.saved else ""), status)

    def train(self) -> None:
        options = self.options
        eval_every = options.eval_every or max(options.steps // 10, 10)
        if self.number >= options.steps:
            self.screen.say(f"already at step {self.number}; nothing is left to train")
        if self.number == 0 and not self.signals.end_before(self.number + 1):
            self.evaluate()
        while self.number < options.steps and not self.signals.end_before(self.number + 1):
            self.record()
            self.step()
            if self.number % eval_every == 0:
                self.evaluate()
            if options.save_every and self.number % options.save_every == 0:
                self.save()
        self.settle(0)
        self.recording.close()
        self.save_if_wanted()

    def record(self) -> None:
        """Record the steps that --profile asks for, those after the first two."""
        done, wanted = self.number - self.first_step - 2, self.options.profile
        if wanted is None or done not in (0, wanted) or not self.is_first:
            return
        self.settle(0)
        if done:
            self.recording.close()
        else:
            folder = self.options.out / "profile"
            self.recording.callback(self.screen.wrote, folder)
            self.recording.enter_context(jax.profiler.trace(folder))
        self.clock = time.perf_counter()

    def save_if_wanted(self) -> None:
        """Save what was not saved yet, where checkpoints or a preemption ask for it."""
        seen = self.signals.everywhere()
        wanted = self.options.save_every or seen & LOSSES
        if wanted and self.saved < self.number:
            self.save()
        self.end_saving()

    def step(self) -> None:
        with refusing():
            rows = next(self.run.batches)
        batch = self.run.step.place(rows)
        before = time.perf_counter()
        if self.number == self.first_step:
            self.screen.say("compiling the step ...")
        self.state, metrics = self.run.step(self.state, batch)
        if self.number == self.first_step:
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
            rate, precision = tokens / (now - self.clock), self.options.precision
            line = {
                "step": number,
                "loss": loss,
                "train_bits_per_byte": self.run.bits(loss),
                "grad_norm": norm,
                "learning_rate": float(self.run.rate(number - 1)),
                "tokens_per_second": round(rate, 1),
                **measure(self.run.config, self.run.devices, precision, rate),
            }
            if "loss_scale" in metrics:
                line["loss_scale"] = float(metrics["loss_scale"])
            self.clock = now
            with self.signals.writing(self.metrics.path):
                self.metrics.add(**line)
            self.screen.step(line, self.options.steps, tokens=tokens)
            found = {"the loss": loss, "the norm of the gradients": norm}
            found["the norm of the parameters"] = float(metrics["param_norm"])
            wrong = [f"{name} is {x}" for name, x in found.items() if not math.isfinite(x)]
            may_mend = line.get("loss_scale", math.inf) > DynamicLossScale.smallest
            if wrong and not (metrics.get("skipped", False) and may_mend):
                raise Failure(
                    f"{wrong[0]} at step {number}: training diverged; give a smaller --lr, a "
                    "longer --warmup or a smaller --clip-norm",
                    status=1,
                )

    def evaluate(self) -> None:
        self.settle(0)
        losses, step, batches = list[float](), self.run.step, self.run.held_out
        self.screen.evaluated(0, len(batches))
        for rows in batches:
            losses.append(float(step.evaluate(self.state, step.place(rows))))
            if self.signals.seen and jax.process_count() == 1:
                return  # who preempts gives little time
            self.screen.evaluated(len(losses), len(batches))
        found = self.run.bits(sum(losses) / len(losses))
        self.evaluated = self.number
        with self.signals.writing(self.metrics.path):
            self.metrics.add(step=self.number, validation_bits_per_byte=found)
        self.screen.show(Text(f"step {self.number}: {found:.3f} bits per held-out byte"))
        self.clock = time.perf_counter()

    def save(self) -> None:
        """Start to save a checkpoint: the state, the position in the data, and the options."""
        self.settle(0)
        self.end_saving()
        with self.keeping():
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
            with self.keeping():
                saving.wait()
            self.screen.say(f"saved {self.options.out / CHECKPOINTS / saving.path.name}")
            set_remedy(f"step {saving.path.name} is saved; {self.how}")

    def draw(self) -> None:
        if self.is_first and (lines := self.metrics.read()):
            options, plot = self.options, self.options.out / "training.png"
            title = f"{options.model}, {options.optimizer}, {options.precision}, "
            title += f"ZeRO stage {options.stage}, devices: {len(self.run.devices)}"
            charts.write(charts.training(lines, title=title), plot)
            self.screen.wrote(self.metrics.path, plot)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Turn what keeps a checkpoint from being written, a full disk say, into one line."""
        try:
            yield
        except (ValueError, OSError, ProcessError) as error:
            told = self.signals.unwritten + "can't save a checkpoint: "
            told += " ".join(str(error).split())
            raise Failure(
                f"{told}; mend that, and go on with --resume from an earlier one, if there is one",
                status=1,
            ) from error
