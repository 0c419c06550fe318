"""What `zerojax train` shows: live on a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.filesize import decimal
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zerojax.checkpoint import Restored
from zerojax.cli.shared._screen import Screen
from zerojax.cli.train._metrics import Metrics
from zerojax.cli.train._run import TrainRun

#: Seconds between lines about steps where the output is no terminal.
LINE_EVERY = 10.0


class TrainScreen(Screen):
    """Prints a run, from its mesh to the sample of what was learned."""

    def __init__(self) -> None:
        super().__init__()
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._last_line = -LINE_EVERY
        self._rates: deque[float] = deque(maxlen=10)

    def start(self, run: TrainRun) -> None:
        """Show model, data, mesh and the bytes per device."""
        options, corpus = run.options, run.corpus
        rows = {
            "mesh": _mesh(run),
            "model": f"{options.model}, {run.layout.num_params:,} parameters",
            "data": f"{corpus.source}: {corpus.num_files:,} files, {decimal(corpus.num_bytes)}, "
            f"{decimal(corpus.held_out.size)} of them held out",
            "step": options.step_in_words(run.batch_size, run.config.context)
            + f", learning rate up to {run.rates.max():.3g}",
        }
        if run.checkpoint is not None:
            rows["start"] = f"from {run.checkpoint}"
        self.facts(rows)
        self._task = self._progress.add_task("train", total=options.steps, status="compiling")
        self.console.print()
        if options.layout:
            self._leaves(run)
        self.show(bytes_table(run))
        self.say(
            "theory: whole / N for what the stage partitions (arXiv 1910.02054); MB = 1e6 bytes"
        )

    def _leaves(self, run: TrainRun) -> None:
        if self.console.is_terminal:
            self.console.print(run.description)
        else:  # as wide as it is, for a file or a pipe
            self.console.print(str(run.description), soft_wrap=True, markup=False)

    def restored(self, restored: Restored, step: int) -> None:
        """Show which checkpoint the run goes on from, and which were no good."""
        for why in restored.passed_over.values():
            self.show(Text(f"passed over: {why}", style="yellow"))
        self._progress.update(self._task, completed=step)
        self.say(f"going on from step {step}, {restored.path}")

    def held(self, held: dict[str, int], on_host: int = 0) -> None:
        """Show what the first device really holds, and what the host keeps for it."""
        kinds = ", ".join(f"{kind} {decimal(count)}" for kind, count in held.items() if count)
        text = f"device 0 holds {decimal(sum(held.values()))} between steps ({kinds})"
        text += f", and {decimal(on_host)} in the host's memory" if on_host else ""
        self.show(Text.assemble(("measured: ", "bold"), text))

    @contextmanager
    def training(self) -> Iterator[None]:
        """Show the progress while the block runs."""
        with self._progress:
            yield

    def step(self, line: dict[str, Any]) -> None:
        """Show a step that is done."""
        task = self._progress.tasks[0]
        self._progress.update(task.id, completed=line["step"])
        self._rates.append(line["tokens_per_second"])
        rate = statistics.harmonic_mean(self._rates)
        status = (
            f"loss {line['loss']:.3f} ({line['train_bits_per_byte']:.2f} bits/byte)  "
            f"{rate:,.0f} tokens/s"
        )
        self._progress.update(task.id, status=status)
        now, is_last = time.monotonic(), line["step"] == task.total
        if self._progress.disable and (is_last or now - self._last_line >= LINE_EVERY):
            self._last_line = now
            seconds = int(task.time_remaining or 0)
            left = f"  ETA {timedelta(seconds=seconds)}" if seconds else ""
            self.console.print(f"step {line['step']}/{task.total}  {status}{left}", soft_wrap=True)

    def evaluated(self, number: int, found: float) -> None:
        """Show an evaluation."""
        self.console.print(f"step {number}: [bold]{found:.3f}[/] bits per held-out byte")

    def finished(self, metrics: Metrics) -> None:
        """Show what was learned."""
        steps, found = metrics.column("validation_bits_per_byte")
        start = f", {found[0]:.2f} at the start" if steps[0] == 0 else ""
        self.console.print(
            f"\n[bold green]validation: {found[-1]:.3f} bits per byte[/] after {steps[-1]} "
            f"steps{start}"
        )

    def sampled(self, prompt: str, text: str) -> None:
        """Show what the model writes after a prompt."""
        title = "sample: the prompt, then what the model wrote"
        written = Text.assemble((prompt, "dim"), (text, "bold"))
        self.console.print(Panel(written, title=title, title_align="left"))


def _mesh(run: TrainRun) -> str:
    devices, chosen = run.devices, run.options.in_words()
    kind = "virtual CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    axes = ", ".join(f"{name}={size}" for name, size in run.layout.mesh.shape.items())
    return f"{len(devices)} {kind} ({axes})" + (f"; {chosen}" if chosen else "")


def bytes_table(run: TrainRun) -> Table:
    """Make the table of bytes per device, beside the theory and beside plain data parallelism."""
    description, plain, layout = run.description, run.stage_bytes[0], run.layout
    table = Table(
        title=f"bytes per device, ZeRO stage {layout.stage} over {layout.num_shards} shards",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("kind")
    plainly = "plain data parallel" if layout.num_shards == len(run.devices) else "stage 0"
    for name in ("this run", "theory", plainly, "saved"):
        table.add_column(name, justify="right")
    for kind, count in description.bytes.items():
        if plain[kind]:
            table.add_row(
                kind,
                decimal(count),
                decimal(description.theory[kind]),
                decimal(plain[kind]),
                f"{1 - count / plain[kind]:.0%}",
                style="bold" if kind == "total" else "",
            )
    return table
