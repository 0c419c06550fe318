"""What `zerojax plan` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from zerojax.cli.plan._largest import LargestModels, LargestRow
from zerojax.cli.plan._request import BY_SHAPE, PlanRequest
from zerojax.cli.shared._screen import PRECISIONS, Screen
from zerojax.cli.shared._units import Unit, amount, decimal_unit
from zerojax.models import gpt
from zerojax.planner import CONFIGURATIONS, Plan, find_hardware

#: Columns where there is no terminal to say how many: those of the widest table.
WIDTH = 132
#: Columns from which on the table of stages has all of its own.
ROOMY = 112


class PlanScreen(Screen):
    """Prints the request and its answer."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(width=WIDTH, quiet=quiet)

    def start(self, request: PlanRequest, network: str | None = None) -> None:
        """Show model, hardware, network and step."""
        options, one = request.options, request.hardware
        limit = f"{one.memory / 1e9:,.1f} GB each"
        if options.memory_limit is not None:
            limit += f" allowed of {find_hardware(one.name).memory / 1e9:,.1f}"
        rows = {"hardware": f"{options.devices:,} x {one.name}, {limit}"}
        if network is not None:
            rows["network"] = network
        if request.params is not None:
            rows = {"model": _model(request), **rows, "step": _step(request)}
        self.facts(rows)

    def stages(self, request: PlanRequest, plans: Sequence[Plan]) -> None:
        """Show the stages side by side, and what the figures rest on."""
        unit = _unit(plans)
        self.title(f"one device, in {unit.name}" + (" (1e9 bytes)" if unit.size == 1e9 else ""))
        self.show(stages_table(plans, self.console.width))
        for line in notes(request, plans):
            self.say(line)

    def largest(self, found: LargestModels) -> None:
        """Show the largest models."""
        options = found.request.options
        self.title(
            f"the most parameters whose states fit, in 1e9 ({options.optimizer}, "
            f"{PRECISIONS[options.precision]}, {_axis(found.model_axis)})"
        )
        stages = [f"stage {stage}" for stage in found.rows[0].params]
        self.show(_largest_table(found, stages, lambda row: list(row.params.values())))
        many = "s" if found.examples > 1 else ""
        self.title(
            f"the largest GPT with its activations, in 1e9 parameters ({_axis(found.gpt_axis)}, "
            f"{found.examples} sequence{many} in a microbatch)"
        )
        self.show(
            _largest_table(
                found,
                CONFIGURATIONS,
                lambda row: [one and one.num_params for one in row.gpts.values()],
            )
        )
        for line in _largest_notes(found):
            self.say(line)

    def chart_title(self, request: PlanRequest, num_params: int) -> str:
        """Return what the drawing is of."""
        options, examples = request.options, request.examples_per_group
        return (
            f"{options.model or 'a GPT'}, {num_params:,} parameters, {options.optimizer}, "
            f"{PRECISIONS[options.precision]}, {options.devices:,} x {request.hardware.name}, "
            f"{examples} x {request.context:,} tokens in a microbatch"
        )


def stages_table(plans: Sequence[Plan], width: int) -> Table:
    """Make the table of stages; less than `ROOMY` columns leave out what can be spared."""
    size, roomy = _unit(plans).size, width >= ROOMY
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


def notes(request: PlanRequest, plans: Sequence[Plan]) -> list[str]:
    """Return what the columns mean where their names don't tell, and what the figures rest on."""
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
    if tight := ", ".join(str(one.stage) for one in plans if not one.fits):
        lines.append(f"does not fit {plans[0].hardware.memory / 1e9:,.1f} GB: stage {tight}")
    assumed = dict.fromkeys(line for one in plans for line in one.assumptions)
    return [*lines, *assumed, *_by_shape(request)]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.1 else f"{1e3 * seconds:#.4g}"


def _model(request: PlanRequest) -> str:
    config = request.config
    if config is None:
        return f"{request.params:,} parameters"
    layers = f"{config.num_layers} layers of width {config.width}"
    return f"{request.options.model}, {gpt.num_params(config):,} parameters, {layers}"


def _step(request: PlanRequest) -> str:
    options = request.options
    text = f"{options.num_examples:,} examples of {request.context:,} tokens"
    if options.accumulate > 1:
        text += f" in {options.accumulate} microbatches"
    text += f", {options.optimizer}, {PRECISIONS[options.precision]}"
    # What else the plan holds is in its title.
    return f"{text}, configuration {options.config}" if options.config is not None else text


def _by_shape(request: PlanRequest) -> list[str]:
    options = request.options
    if options.optimizer not in BY_SHAPE or options.model is not None:
        return []
    why = "keeps less of matrices than of vectors, and a number of parameters is taken for a vector"
    return [f"{options.optimizer} {why}: --model counts it as it is"]


def _unit(plans: Sequence[Plan]) -> Unit:
    return decimal_unit(max(one.bytes.theory for one in plans))


def _largest_table(
    found: LargestModels, columns: Iterable[str], counts: Callable[[LargestRow], list[int | None]]
) -> Table:
    """Make a table of numbers of parameters by devices, rows without any left out."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("devices", *columns):
        table.add_column(name, justify="right")
    for row in found.rows:
        cells = counts(row)
        if any(cells):
            style = "bold" if row.num_devices == found.request.options.devices else ""
            shown = ("-" if not count else amount(count / 1e9) for count in cells)
            table.add_row(Text(f"{row.num_devices:,}", style=style), *shown)
    return table


def _largest_notes(found: LargestModels) -> list[str]:
    parameters, gradients, optimizer = found.bytes_per_param
    configurations = ", ".join(
        f"{name} stage {one.stage}"
        + (" + Pa" if one.partitioned_checkpoints else "")
        + ("+cpu" if one.offloaded_checkpoints else "")
        for name, one in CONFIGURATIONS.items()
    )
    memory = f"{found.request.hardware.memory / 1e9:,.1f} GB"
    held = (
        f"bytes per parameter: {parameters:g} for itself, {gradients:g} for its gradient, "
        f"{optimizer:g} for the optimizer; all of {memory} usable"
    )
    chosen = (
        f"configurations (arXiv 1910.02054, table 3): {configurations}; Pa cuts checkpoints over "
        "the model axis, cpu keeps them on the host; layers are recomputed"
    )
    return [held, chosen, *_by_shape(found.request)]


def _axis(size: int) -> str:
    return "no model parallelism" if size == 1 else f"a model axis of {size}"
