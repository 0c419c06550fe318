"""What `zerojax train` shows, live or as plain lines, and what it keeps in metrics.jsonl."""

from __future__ import annotations

import io
import json
import math
import statistics
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from zerojax._display import make_table
from zerojax.checkpoint import Restored
from zerojax.cli.shared._screen import Screen
from zerojax.cli.train._run import TrainRun
from zerojax.recipe import HOST_MEMORY
from zerojax.train import TrainState

#: Seconds between lines about steps where the output is no terminal.
LINE_EVERY = 10.0


class TrainScreen(Screen):
    """Prints a run, from its mesh to the sample of what was learned."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.progress = Progress(
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
        self.facts(
            {
                "mesh": _mesh(run),
                "model": f"{options.model}, {run.layout.num_params:,} parameters",
                "data": f"{corpus.source}: {corpus.num_files:,} files, "
                f"{decimal(corpus.num_bytes)}, {decimal(corpus.held_out.size)} of them held out",
                "step": options.step_in_words(run.batch_size, run.config.context)
                + f", learning rate up to {run.rates.max():.3g}",
                "start": f"from {run.checkpoint}" if run.checkpoint is not None else "",
            }
        )
        self._task = self.progress.add_task("train", total=options.steps, status="compiling")
        if options.layout:
            self.console.print(run.description)
        over = f"over {run.layout.num_shards} shards"
        self.title(f"bytes per device, ZeRO stage {run.layout.stage} {over}")
        self.show(bytes_table(run))
        self.say(
            "theory: whole / N for what the stage partitions (arXiv 1910.02054); MB = 1e6 bytes"
        )

    def restored(self, restored: Restored, step: int) -> None:
        """Show which checkpoint the run goes on from, and which were no good."""
        for why in restored.passed_over.values():
            self.show(Text(f"passed over: {why}", style="yellow"))
        self.progress.update(self._task, completed=step)
        self.say(f"going on from step {step}, {restored.path}")

    def held(self, state: TrainState) -> None:
        """Show what the first device really holds between steps, by kind, and the host for it."""
        parts = {"parameters": state.params, "masters": state.masters, "optimizer": state.opt_state}
        sizes = {
            kind: [
                (x.addressable_data(0).nbytes, x.sharding.memory_kind == HOST_MEMORY)
                for x in jax.tree.leaves(part)
            ]
            for kind, part in parts.items()
        }
        held = {kind: sum(n for n, hosted in each if not hosted) for kind, each in sizes.items()}
        on_host = sum(n for each in sizes.values() for n, hosted in each if hosted)
        kinds = ", ".join(f"{kind} {decimal(count)}" for kind, count in held.items() if count)
        text = f"device 0 holds {decimal(sum(held.values()))} between steps ({kinds})"
        text += f", and {decimal(on_host)} in the host's memory" if on_host else ""
        self.facts({"measured:": text})

    def step(self, line: dict[str, Any]) -> None:
        """Show a step that is done."""
        task = self.progress.tasks[0]
        self._rates.append(line["tokens_per_second"])
        status = (
            f"loss {line['loss']:.3f} ({line['train_bits_per_byte']:.2f} bits/byte)  "
            f"{statistics.harmonic_mean(self._rates):,.0f} tokens/s"
        )
        self.progress.update(task.id, completed=line["step"], status=status)
        now, is_last = time.monotonic(), line["step"] == task.total
        if self.progress.disable and (is_last or now - self._last_line >= LINE_EVERY):
            self._last_line = now
            seconds = int(task.time_remaining or 0)
            left = f"  ETA {timedelta(seconds=seconds)}" if seconds else ""
            self.console.print(f"step {line['step']}/{task.total}  {status}{left}", soft_wrap=True)


def _mesh(run: TrainRun) -> str:
    devices, chosen = run.devices, run.options.in_words()
    kind = "virtual CPU devices" if devices[0].platform == "cpu" else devices[0].device_kind
    axes = ", ".join(f"{name}={size}" for name, size in run.layout.mesh.shape.items())
    return f"{len(devices)} {kind} ({axes})" + (f"; {chosen}" if chosen else "")


def bytes_table(run: TrainRun) -> Table:
    """Make the table of bytes per device, beside the theory and beside plain data parallelism."""
    description = run.description
    plainly = "plain data parallel" if run.layout.num_shards == len(run.devices) else "stage 0"
    made = make_table("kind", ">this run", ">theory", f">{plainly}", ">saved")
    for kind, count in description.bytes.items():
        if whole := run.plain[kind]:
            counts = map(decimal, (count, description.theory[kind], whole))
            style = "bold" if kind == "total" else ""
            made.add_row(kind, *counts, f"{1 - count / whole:.0%}", style=style)
    return made


class Metrics:
    """The metrics of a run, in memory and on disk; a line is on disk when `add` returns.

    Args:
        path: the file.
        first_step: lines up to this step are kept, as a resumed run needs; others are dropped.
        is_kept: whether to write them, as one of several processes does.
    """

    def __init__(self, path: Path, first_step: int, *, is_kept: bool = True) -> None:
        self.lines = _read(path, first_step)
        if is_kept:
            partial = path.with_suffix(".partial")
            partial.write_text("".join(map(_as_json, self.lines)))
            partial.replace(path)
        self._file = path.open("a") if is_kept else io.StringIO()

    def add(self, **values: Any) -> None:
        """Add one line."""
        self.lines.append(values)
        self._file.write(_as_json(values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of the lines that have a metric."""
        found = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]


def _as_json(values: dict[str, Any]) -> str:
    """Write a line; numbers that JSON does not know become null."""
    known = {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(known) + "\n"


def _read(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Read the lines up to a step; a last line that a crash cut short is dropped."""
    if not first_step or not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict) and line.get("step", math.inf) <= first_step:
            lines.append(line)
    return lines
