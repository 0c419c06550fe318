"""What `zerojax plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from zerojax.cli.plan._question import PlanQuestion
from zerojax.cli.shared._screen import Screen, table
from zerojax.cli.shared._units import DECIMAL, amount, unit_for
from zerojax.models import gpt
from zerojax.planner import Plan, find_hardware

#: Columns where there is no terminal to say how many: those of the widest table.
WIDTH = 132
#: Columns from which on the table of stages has all of its own.
ROOMY = 112
#: Optimizers whose state depends on the shapes of leaves, which a number of parameters has not.
BY_SHAPE = ("adafactor", "muon")


class PlanScreen(Screen):
    """Prints a question and its answer."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(width=WIDTH, quiet=quiet)

    def start(self, asked: PlanQuestion, network: str | None = None) -> None:
        """Show model, hardware, network and step."""
        options, one = asked.options, asked.hardware
        limit = f"{one.memory / 1e9:,.1f} GB each"
        if options.memory_limit is not None:
            limit += f" allowed of {find_hardware(one.name).memory / 1e9:,.1f}"
        rows = {"model": _model(asked), "hardware": f"{options.devices:,} x {one.name}, {limit}"}
        if network is not None:
            rows["network"] = network
        rows["step"] = options.step_in_words(asked.num_examples, asked.context)
        if options.config is not None:
            rows["step"] += f", configuration {options.config}"
        self.facts(rows)

    def stages(self, asked: PlanQuestion, plans: Sequence[Plan]) -> None:
        """Show the stages side by side, and what the figures rest on."""
        unit = unit_for(max(one.bytes.theory for one in plans), DECIMAL)
        self.title(f"one device, in {unit.name}" + (" (1e9 bytes)" if unit.size == 1e9 else ""))
        self.show(stages_table(plans, self.console.width))
        for line in notes(asked, plans):
            self.say(line)


def stages_table(plans: Sequence[Plan], width: int) -> Table:
    """Make the table of stages; less than `ROOMY` columns leave out what can be spared."""
    size = unit_for(max(one.bytes.theory for one in plans), DECIMAL).size
    roomy, hosted = width >= ROOMY, any(one.bytes.host for one in plans)
    columns = [">stage", ">params", ">grads", ">optimizer", ">states", ">peak"]
    columns += [">of device"] * roomy + [">on host"] * hosted + [">volume", ">ms", "bound by"]
    made = table(*columns, padding=1 if roomy else 0)
    for one in plans:
        held, style = one.bytes, "green" if one.fits else "red"
        cells: list[str | Text] = [
            str(one.stage),
            *(amount(count / size) for count in (held.parameters, held.gradients, held.optimizer)),
            Text(amount(held.theory / size), style="bold"),
            Text(amount(held.total / size), style=style),
        ]
        cells += [Text(f"{held.total / one.hardware.memory:.1%}", style=style)] * roomy
        cells += [amount(held.host / size)] * hosted
        made.add_row(*cells, f"{one.volume:.3f}", _milliseconds(one.step_time), one.bound_by)
    return made


def notes(asked: PlanQuestion, plans: Sequence[Plan]) -> list[str]:
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
    lines += dict.fromkeys(line for one in plans for line in one.assumptions)
    if asked.config is None and asked.options.optimizer in BY_SHAPE:
        lines.append(
            f"{asked.options.optimizer} keeps less of matrices than of vectors, and a number of "
            "parameters is taken for a vector: --model counts it as it is"
        )
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.1 else f"{1e3 * seconds:#.4g}"


def _model(asked: PlanQuestion) -> str:
    config = asked.config
    if config is None:
        return f"{asked.params:,} parameters"
    layers = f"{config.num_layers} layers of width {config.width}"
    return f"{asked.options.model}, {gpt.num_params(config):,} parameters, {layers}"
