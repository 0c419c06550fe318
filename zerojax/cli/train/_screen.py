"""What `zerojax train` shows and measures, and what it keeps in metrics.jsonl."""

import contextlib
import json
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerojax._display import decimal, make_table
from zerojax._extras import extra
from zerojax.checkpoint import Restored
from zerojax.cli.shared._command import Screen
from zerojax.cli.train._run import TrainRun
from zerojax.cli.train._signals import Signals
from zerojax.hardware import hardware_of
from zerojax.models import gpt

#: Seconds between lines about steps.
LINE_EVERY = 10.0


class TrainScreen(Screen):
    """Prints a run, from its mesh to what was learned."""

    def __init__(self, signals: Signals, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._signals = signals
        self._last_line = -math.inf  # the first step is told at once
        self._since = 0.0  # when an evaluation began, or was told of

    def show(self, what: RenderableType) -> None:
        with self._signals.writing("stdout"):
            super().show(what)

    def start(self, run: TrainRun) -> None:
        options, corpus, config = run.options, run.corpus, run.config
        files = f"{corpus.num_files:,} file{'s' if corpus.num_files > 1 else ''}"
        train, held = corpus.train.size, corpus.held_out.size
        unit = f"tokens of {options.tokenizer}" if options.tokenizer else "bytes"
        sizes = f"layers={config.num_layers}, width={config.width}, tokens={config.vocab_size}"
        devices, chosen = run.devices, options.in_words()
        kind = "virtual CPU" if devices[0].platform == "cpu" else devices[0].device_kind
        axes = ", ".join(f"{name}={size}" for name, size in run.layout.mesh.shape.items())
        step = options.step_in_words(run.batch_size, config.context)
        facts = {
            "mesh": f"{len(devices)} x {kind} ({axes})" + (f"; {chosen}" if chosen else ""),
            "model": f"{options.model} ({sizes}), {run.layout.num_params:,} parameters",
            "data": f"{corpus.source}: {files}, {train + held:,} {unit}, {held:,} held out",
            "step": f"{step}, learning rate up to {float(run.rate(run.warmup)):.3g}",
            "start": f"from {run.checkpoint}" if run.checkpoint is not None else "",
        }
        self.facts(facts)
        self.title(f"bytes per device, stage {run.layout.stage} over N = {run.layout.num_shards}")
        self.show(bytes_table(run))
        self.say("theory: whole / N of what is partitioned (arXiv 1910.02054); MB = 1e6 bytes")

    def restored(self, restored: Restored, step: int) -> None:
        for why in restored.passed_over.values():
            self.show(Text(f"passed over: {why}", style="yellow"))
        self.say(f"going on from step {step}, {restored.path}")

    def evaluated(self, done: int, last: int) -> None:
        """Show how far a long evaluation is, now and then; 0 are done when it begins."""
        if not done or time.monotonic() - self._since >= LINE_EVERY:
            self._since = time.monotonic()
            if done:
                self.say(f"evaluated {done} of {last} batches of held-out text")

    def step(self, line: dict[str, Any], last: int, *, tokens: int) -> None:
        """Show a step that is done, of up to `last`, now and then; each has so many tokens."""
        now, left = time.monotonic(), last - line["step"]
        if left and now - self._last_line < LINE_EVERY:
            return
        self._last_line = now
        rate = line["tokens_per_second"]
        text = f"step {line['step']}/{last}  loss {line['loss']:.3f} "
        text += f"({line['train_bits_per_byte']:.2f} bits/byte)  {rate:,.0f} tokens/s"
        seconds = int(left * tokens / rate) if rate else 0
        self.show(Text(text + (f"  ETA {timedelta(seconds=seconds)}" if seconds else "")))


def bytes_table(run: TrainRun) -> Table:
    """Make the table of bytes per device, beside the theory and beside plain data parallelism."""
    description = run.description
    plainly = "plain data parallel" if run.layout.num_shards == len(run.devices) else "stage 0"
    made = make_table("kind", ">this run", ">theory", f">{plainly}", ">avoided")
    for kind, count in description.bytes.items():
        if whole := run.plain[kind]:
            counts = map(decimal, (count, description.theory[kind], whole))
            style = "bold" if kind == "total" else ""
            made.add_row(kind, *counts, f"{1 - count / whole:.0%}", style=style)
    return made


class Metrics:
    """The metrics of a run; a line is on disk when `add` returns.

    Lines up to `first_step` are kept, to resume. Of several processes one writes (`is_kept`).
    """

    def __init__(
        self, path: Path, first_step: int, *, is_kept: bool = True, tensorboard: bool = False
    ) -> None:
        self.path, self._is_kept, self._board = path, is_kept, None
        if is_kept and tensorboard:
            with extra("tensorboard", "--tensorboard"):
                from tensorboardX import SummaryWriter
            folder = str(path.with_name("tensorboard"))
            self._board = SummaryWriter(folder, purge_step=first_step + 1, flush_secs=10)
        if is_kept:
            is_old = first_step and path.exists()
            kept = [line for line in self.read() if line["step"] <= first_step] if is_old else []
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(path)

    def read(self) -> list[dict[str, Any]]:
        """Read the lines that are whole: a power cut leaves NULs, or a part of a line."""
        found = []
        for text in self.path.read_bytes().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                line = json.loads(text) if text.endswith(b"\n") else None
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    found.append(line)
        return found

    def add(self, **values: Any) -> None:
        """Add one line; numbers that JSON does not know become null."""
        known = {
            name: None if isinstance(x, float) and not math.isfinite(x) else x
            for name, x in values.items()
        }
        if self._is_kept:
            self._is_kept = False  # nothing follows a line that can't be written
            with self.path.open("a") as file:
                file.write(json.dumps(known) + "\n")
            self._is_kept = True
        if self._board:
            for name in values.keys() - {"step"}:
                self._board.add_scalar(name, values[name], values["step"])

    def close(self) -> None:
        """Write what TensorBoard's file, which is up to 10 s late, has not got yet."""
        if self._board:
            self._board.close()


def measure(
    config: gpt.Config, devices: Sequence[Any], precision: str, tokens_per_second: float
) -> dict[str, float]:
    """Return the model's share of the peak FLOP/s (`mfu`) and the largest peak of memory.

    A token takes 6 N + 12 L D T FLOP (PaLM, arXiv 2204.02311, appendix B), whatever is recomputed.
    The peak is the data sheet's, of bf16 or of fp32 as JAX multiplies. What is unknown is left out.
    """
    found: dict[str, float] = {}
    if (hardware := hardware_of(devices[0].device_kind)) is not None:
        rate = hardware.flops_fp32 if precision == "fp32" else hardware.flops
        flops = 6 * gpt.num_params(config) + 12 * config.num_layers * config.width * config.context
        found["mfu"] = round(tokens_per_second * flops / (rate * len(devices)), 4)
    here = jax.process_index()
    stats = [one.memory_stats() or {} for one in devices if one.process_index == here]
    if peaks := [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]:
        found["peak_bytes"] = max(peaks)
    return found
