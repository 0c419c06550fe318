"""`zerojax plan`: ask the planner, show."""

import json
from collections.abc import Sequence

import jax
import typer
from rich.table import Table
from rich.text import Text

from zerojax import charts
from zerojax._display import DECIMAL, amount, make_table, unit_for
from zerojax.cli.plan._question import PlanOptions, PlanQuestion
from zerojax.cli.shared._command import Failure, command, refusing
from zerojax.cli.shared._screen import Screen
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.planner import Plan, find_hardware

#: Columns where there is no terminal to say how many: those of the widest table.
WIDTH = 132


@command
def plan(options: PlanOptions) -> None:
    """Plan a training step: bytes, volume and time, before anything runs.

    Without --stage, all four stages are shown side by side: what one device holds of each kind, the
    sum by ZeRO's formula, the planned peak, what a device moves, how long a step takes at least and
    what it waits for. With --stage, one of them in full. GB are 1e9 bytes; hardware is
    h100 unless you say otherwise.

    The model's loss is traced; nothing is computed and no accelerator is touched.

    Exit status: 0 done; 2 asked for what can't be done, such as a --memory-limit that nothing
    meets: then the smallest need and how it is met are named.

    Examples: the paper's figure 1; GPT-2 XL on a node, with a drawing; one stage in full, 4
    examples a device, sharded within each node; the paper's C4 as it was run; the fastest way to
    train under a limit; and the figures as JSON.

    ```
    zerojax plan --params 7.5e9 --devices 64
    zerojax plan --model gpt2-xl --devices 8 --plot gpt2-xl.png
    zerojax plan --model zero-8b --devices 64 --stage 3 --shards 8 --batch-size 256
    zerojax plan --model zero-100b --devices 400 --stage 2 --model-axis 16 --partition-activations
    zerojax plan --model gpt2-xl --batch-size 64 --search --memory-limit 20
    zerojax plan --params 1e12 --devices 1024 --hardware b200 --json
    ```
    """
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator
    with refusing():
        asked = PlanQuestion(options)
    screen = Screen(width=WIDTH, quiet=options.json)
    with screen.console:  # all at once: `| grep -q` may stop listening
        (_show_search if options.search else _show_stages)(asked, screen)


def _show_stages(asked: PlanQuestion, screen: Screen) -> None:
    with refusing():
        plans = [asked.plan(stage) for stage in asked.options.stages]
    _show_question(asked, screen)
    if len(plans) > 1:
        unit = unit_for(max(one.bytes.theory for one in plans), DECIMAL)
        screen.title(f"one device, in {unit.name}" + (" (1e9 bytes)" if unit.size == 1e9 else ""))
        screen.show(stages_table(plans, unit.size))
        for line in notes(plans):
            screen.say(line)
    else:
        screen.show(plans[0])
    _keep(plans, asked, screen)
    if asked.options.memory_limit is not None and not any(one.fits for one in plans):
        raise Failure(_shortage(plans))


def _shortage(plans: Sequence[Plan]) -> str:
    least = min(plans, key=lambda one: one.bytes.total)
    return (
        f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need is "
        f"{least.bytes.total / 1e9:,.3f} GB: {least.title}; --search goes through more ways"
    )


def _show_search(asked: PlanQuestion, screen: Screen) -> None:
    with refusing():
        choices = asked.search()
    _show_question(asked, screen)
    screen.show(choices)
    _keep(choices.plans, asked, screen)


def _keep(found: Sequence[Plan], asked: PlanQuestion, screen: Screen) -> None:
    """Print JSON and draw all stages, where that was asked for."""
    options = asked.options
    if options.json:
        typer.echo(json.dumps([one.to_dict() for one in found], indent=2))
    if options.plot is None:
        return
    plans = {f"stage {stage}": asked.plan(stage) for stage in STAGES}
    hardware = f"{options.devices:,} x {asked.hardware.name}"
    step = options.step_in_words(asked.num_examples, asked.config.context)
    title = f"{plans['stage 0'].num_params:,} parameters, {hardware}\n{step}"
    charts.write(charts.compare(plans, title=title), options.plot)
    screen.wrote(options.plot)


def _show_question(asked: PlanQuestion, screen: Screen) -> None:
    """Show model, hardware and step."""
    options, one = asked.options, asked.hardware
    limit = f"{one.memory / 1e9:,.1f} GB each"
    if options.memory_limit is not None:
        limit += f" allowed of {find_hardware(one.name).memory / 1e9:,.1f}"
    step = options.step_in_words(asked.num_examples, asked.config.context)
    hardware = f"{options.devices:,} x {one.name}, {limit}"
    screen.facts({"model": _model(asked), "hardware": hardware, "step": step})


def stages_table(plans: Sequence[Plan], size: float) -> Table:
    """Make the table of stages, on at most 80 columns."""
    hosted = any(one.bytes.host for one in plans)
    columns = [">stage", ">params", ">grads", ">optimizer", ">states", ">peak"]
    columns += [">on host"] * hosted + [">volume", ">ms", "bound by"]
    made = make_table(*columns, padding=0)
    for one in plans:
        held, style = one.bytes, "green" if one.fits else "red"
        cells: list[str | Text] = [
            str(one.stage),
            *(amount(count / size) for count in (held.parameters, held.gradients, held.optimizer)),
            Text(amount(held.theory / size), style="bold"),
            Text(amount(held.total / size), style=style),
        ]
        cells += [amount(held.host / size)] * hosted
        made.add_row(*cells, f"{one.volume:.3f}", _milliseconds(one.step_time), one.time.bound_by)
    return made


def notes(plans: Sequence[Plan]) -> list[str]:
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
    return lines


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}" if seconds >= 0.1 else f"{1e3 * seconds:#.4g}"


def _model(asked: PlanQuestion) -> str:
    config, name = asked.config, asked.options.model or "a GPT"
    layers = f"{config.num_layers} layers of width {config.width}"
    return f"{name}, {gpt.num_params(config):,} parameters, {layers}"
