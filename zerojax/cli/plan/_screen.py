"""What `zerojax plan` prints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from zerojax.cli.plan._largest import Largest
from zerojax.cli.plan._request import BY_SHAPE, PlanQuestion
from zerojax.models import gpt
from zerojax.planner import CONFIGURATIONS, Plan, find_hardware

#: Columns where there is no terminal to say how many: those of the widest table.
WIDTH = 132
#: Columns from which on the table of stages has all of its own.
ROOMY = 112
UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1.0))
#: A unit is small enough where the largest figure has two digits before the point.
LEAST = 10
PRECISIONS = {"bf16": "bf16 with fp32 masters", "fp16": "fp16 with fp32 masters"}


class PlanScreen:
    """Prints the question and its answer to stdout, all at once: `| grep -q` may stop listening."""

    def __init__(self, *, quiet: bool = False) -> None:
        given = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(highlight=False, width=None if given else WIDTH, quiet=quiet)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Print what the block shows, in one piece."""
        with self.console:
            yield

    def start(self, question: PlanQuestion, network: str | None = None) -> None:
        """Show model, hardware, network and step."""
        options, one = question.options, question.hardware
        limit = f"{one.memory / 1e9:,.1f} GB each"
        if options.memory_limit is not None:
            limit += f" allowed of {find_hardware(one.name).memory / 1e9:,.1f}"
        rows = {"hardware": f"{options.devices:,} x {one.name}, {limit}"}
        if network is not None:
            rows["network"] = network.replace("\n", "\n" + " " * 10)
        if question.params is not None:
            rows = {"model": _model(question), **rows, "step": _step(question)}
        for name, text in rows.items():
            self.show(Text.assemble((f"{name:<10}", "bold"), text))

    def show(self, what: RenderableType) -> None:
        """Print something."""
        self.console.print(what, soft_wrap=isinstance(what, Text))

    def title(self, text: str) -> None:
        """Print the title of a table."""
        self.show(Text(f"\n{text}", style="bold"))

    def say(self, text: str) -> None:
        """Print one line of what a reader may skip."""
        self.show(Text(text, style="dim"))

    def stages(self, question: PlanQuestion, plans: Sequence[Plan]) -> None:
        """Show the stages side by side, and what the figures rest on."""
        unit, _ = _unit(plans)
        self.title(f"one device, in {unit}" + (" (1e9 bytes)" if unit == "GB" else ""))
        self.show(stages_table(plans, self.console.width))
        for line in notes(question, plans):
            self.say(line)

    def largest(self, largest: Largest) -> None:
        """Show the largest models."""
        options = largest.question.options
        self.title(
            f"the most parameters whose states fit, in 1e9 ({options.optimizer}, "
            f"{PRECISIONS.get(options.precision, options.precision)}, {_axis(largest.model_axis)})"
        )
        self.show(params_table(largest))
        many = "s" if options.batch > 1 else ""
        self.title(
            f"the largest GPT with its activations, in 1e9 parameters ({_axis(largest.gpt_axis)}, "
            f"{options.batch} sequence{many} in a microbatch)"
        )
        self.show(gpts_table(largest))
        for line in _largest_notes(largest):
            self.say(line)

    def wrote(self, paths: Sequence[Path]) -> None:
        """Show which files were written."""
        if paths:
            self.say("wrote " + ", ".join(map(str, paths)))


def stages_table(plans: Sequence[Plan], width: int) -> Table:
    """Lay stages out below each other; less than `ROOMY` columns leave out what can be spared."""
    _, size = _unit(plans)
    roomy = width >= ROOMY
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1 if roomy else 0))
    numbers = ["stage", "params", "grads", "optimizer", "states", "peak"]
    numbers += ["of device"] if roomy else []
    numbers += ["on host"] if any(one.bytes.host for one in plans) else []
    for name in (*numbers, "volume", "ms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by")
    for one in plans:
        held = one.bytes
        style = "green" if one.fits else "red"
        cells: dict[str, str | Text] = {
            "stage": str(one.stage),
            "params": amount(held.parameters / size),
            "grads": amount(held.gradients / size),
            "optimizer": amount(held.optimizer / size),
            "states": Text(amount(held.theory / size), style="bold"),
            "peak": Text(amount(held.total / size), style=style),
            "of device": Text(f"{held.total / one.hardware.memory:.1%}", style=style),
            "on host": amount(held.host / size),
        }
        shown = (cells[name] for name in numbers)
        table.add_row(*shown, f"{one.volume:.3f}", _milliseconds(one.step_time), one.bound_by)
    return table


def notes(question: PlanQuestion, plans: Sequence[Plan]) -> list[str]:
    """Say what the columns mean where their names don't, and what the figures rest on."""
    memory = f"{plans[0].hardware.memory / 1e9:,.1f} GB"
    kinds = (
        "parameters, gradients, optimizer: as the layout places them, masters with the optimizer"
    )
    lines = [
        f"{kinds}; states: their sum by the formula of the stage",
        "volume: elements that a device moves in a step, per parameter of the model",
    ]
    if any(one.bytes.total < one.bytes.states for one in plans):
        lines.append(
            "peak: less than the states where gradients are scattered at once, or take the buffers "
            "of weights that are done"
        )
    tight = [str(one.stage) for one in plans if not one.fits]
    if tight:
        lines.append(f"does not fit {memory}: stage {', '.join(tight)}")
    said = dict.fromkeys(line for one in plans for line in one.assumptions)
    return [*lines, *said, *_by_shape(question)]


def params_table(largest: Largest) -> Table:
    """Lay out the most parameters by stage."""
    table = _largest_table()
    for stage in largest.rows[0].params:
        table.add_column(f"stage {stage}", justify="right")
    for row in largest.rows:
        found = row.params.values()
        if any(found):
            cells = (_billions(count) for count in found)
            table.add_row(_devices(largest, row.num_devices), *cells)
    return table


def gpts_table(largest: Largest) -> Table:
    """Lay out the largest GPTs by configuration."""
    table = _largest_table()
    for name in CONFIGURATIONS:
        table.add_column(name, justify="right")
    for row in largest.rows:
        found = row.gpts.values()
        if any(found):
            cells = (_billions(one and one.num_params) for one in found)
            table.add_row(_devices(largest, row.num_devices), *cells)
    return table


def unit_of(largest: float) -> tuple[str, float]:
    """Give the decimal unit that suits figures of which this is the largest."""
    return next((unit for unit in UNITS if largest >= LEAST * unit[1]), UNITS[-1])


def amount(value: float) -> str:
    """Write a figure as the paper does: 120, 31.4, 1.9; below one with three digits."""
    if value and value < 1:
        return f"{value:.3g}"
    return f"{value:,.1f}".removesuffix(".0")


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.1 else f"{1e3 * seconds:#.4g}"


def _model(question: PlanQuestion) -> str:
    config, options = question.config, question.options
    if config is None:
        return f"{question.params:,} parameters"
    return (
        f"{options.model}, {gpt.num_params(config):,} parameters, {config.num_layers} layers of "
        f"width {config.width}"
    )


def _step(question: PlanQuestion) -> str:
    options = question.options
    text = f"{question.num_examples:,} examples of {question.context:,} tokens"
    if options.accumulate > 1 and not options.search:
        text += f" in {options.accumulate} microbatches"
    text += f", {options.optimizer}, {PRECISIONS.get(options.precision, options.precision)}"
    # What else the plan holds is in its title.
    return f"{text}, configuration {options.config}" if options.config is not None else text


def _by_shape(question: PlanQuestion) -> list[str]:
    options = question.options
    if options.optimizer not in BY_SHAPE or options.model is not None:
        return []
    text = (
        "keeps less of matrices than of vectors, and a number of parameters is taken for a vector"
    )
    return [f"{options.optimizer} {text}: --model counts it as it is"]


def _unit(plans: Sequence[Plan]) -> tuple[str, float]:
    return unit_of(max(one.bytes.theory for one in plans))


def _largest_table() -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("devices", justify="right")
    return table


def _largest_notes(largest: Largest) -> list[str]:
    question = largest.question
    parameters, gradients, optimizer = largest.bytes_per_param
    configurations = ", ".join(
        f"{name} stage {one.stage}"
        + (" + Pa" if one.partitioned_checkpoints else "")
        + ("+cpu" if one.offloaded_checkpoints else "")
        for name, one in CONFIGURATIONS.items()
    )
    held = (
        f"bytes per parameter: {parameters:g} for itself, {gradients:g} for its gradient, "
        f"{optimizer:g} for the optimizer; all of {question.hardware.memory / 1e9:,.1f} GB usable"
    )
    chosen = (
        f"configurations (arXiv 1910.02054, table 3): {configurations}; Pa cuts checkpoints over "
        "the model axis, cpu keeps them on the host; layers are recomputed"
    )
    return [held, chosen, *_by_shape(question)]


def _axis(size: int) -> str:
    return "no model parallelism" if size == 1 else f"a model axis of {size}"


def _devices(largest: Largest, count: int) -> Text:
    style = "bold" if count == largest.question.options.devices else ""
    return Text(f"{count:,}", style=style)


def _billions(count: int | None) -> str:
    return "-" if not count else amount(count / 1e9)
