"""`zerojax plan`: ask the planner, show."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import typer
from rich.table import Table
from rich.text import Text

from zerojax import charts, planner
from zerojax._display import DECIMAL, amount, make_table, unit_for
from zerojax.cli.shared import _options
from zerojax.cli.shared._command import Failure, Screen, command, option, refusing
from zerojax.cli.shared._machine import check_output
from zerojax.hardware import HARDWARE as KNOWN
from zerojax.hardware import find_hardware
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.planner import Choices, Placement, Plan, Space, Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(_options.StepOptions):
    params: float | None = option(None, min=1e7, max=1e15, metavar="COUNT", panel=_options.MODEL)
    """A number of parameters, 7.5e9, in the place of a model: a GPT of about that size."""
    hardware: str = option("h100", help=", ".join(KNOWN), metavar="NAME", panel=_options.HARDWARE)
    devices: int = option(8, min=1, panel=_options.HARDWARE)
    """All devices together."""
    memory_limit: float | None = option(
        None, min=1e-6, metavar="GB", show_default="all of its memory", panel=_options.HARDWARE
    )
    """What a step may take of a device, in GB (1e9 bytes)."""
    shards: int | None = option(
        None, min=1, show_default="what --model-axis leaves; --search: more", panel=_options.ZERO
    )
    """N, the devices that share one copy of the model states; fewer than all is hybrid sharding:
    copies of the group split the batch between them."""
    search: bool = option(False, panel=_options.SEARCH)
    """Search for the fastest way to train under the memory limit: stage, shard group, model axis,
    recomputation, what the host keeps, microbatches. Options that are given hold, and --shards
    holds the model axis as well."""
    json: bool = option(False, panel=_options.OUTPUT)
    """Print the figures of each plan as JSON in the place of tables."""
    plot: Path | None = option(None, metavar="FILE.png", panel=_options.OUTPUT)
    """Draw what a device holds and moves under each stage, or by the fastest four of a search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.params is None) == (self.model is None):
            raise ValueError("plan one of the two: --model gpt2-xl, or --params 7.5e9")

    @property
    def chosen_model(self) -> gpt.Config:
        if self.params is None:
            return super().chosen_model
        return self.resized(gpt.of_size(round(self.params)))

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(STAGES) if self.stage is None else (self.stage,)


class PlanQuestion:
    """A step to plan, as the planner takes it; the limit is the hardware's memory."""

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self.hardware = chip = find_hardware(options.hardware)
        if (limit := options.memory_limit) is not None:
            if limit * 1e9 > chip.memory:
                told = f"--memory-limit {limit:g} is more than the {chip.memory / 1e9:,.1f} GB"
                raise ValueError(f"{told} that a program has of {chip.name}; give less")
            self.hardware = dataclasses.replace(chip, memory=round(limit * 1e9))
        self.config = config = options.chosen_model
        # A search tries other model axes where none is given, which is 1.
        self.num_examples = options.examples(max(1, options.devices // options.model_axis))
        batch = jax.ShapeDtypeStruct((self.num_examples, config.context + 1), jnp.int32)
        #: what a plan and a search are asked alike
        self._given: dict[str, Any] = {
            "params": _options.gpt_shapes(config),
            "tx": options.unscheduled(config.width),
            "num_devices": options.devices,
            "hardware": self.hardware,
            "recipe": options.recipe(),
            "workload": Workload(loss_fn=functools.partial(gpt.loss, config), batch=batch),
        }
        check_output("--plot", options.plot)

    def plan(self, stage: int) -> Plan:
        placement = Placement(num_shards=self.options.shards, model_axis=self.options.model_axis)
        return planner.plan(stage=stage, placement=placement, **self._given)

    def search(self) -> Choices:
        options = self.options
        # A group that was asked for has to divide what each model axis leaves: 1 leaves all.
        free = "model_axis" not in options.given and options.shards is None
        space = Space(
            stages=options.stages,
            num_shards=None if options.shards is None else (options.shards,),
            model_axes=None if free else (options.model_axis,),
            microbatches=(options.accumulate,) if "accumulate" in options.given else None,
        )
        return planner.search_plans(space=space, **self._given)


@command
def plan(options: PlanOptions) -> None:
    r"""Plan a training step: bytes, volume and time, before anything runs.

    Without --stage, all four stages are shown side by side: what one device holds of each kind, the
    sum by ZeRO's formula, the planned peak, what a device moves, how long a step takes at least and
    what it waits for. With --stage, one of them in full. GB are 1e9 bytes; hardware is
    h100 unless you say otherwise.

    The model's loss is traced; nothing is computed and no accelerator is touched.

    Exit status: 0 done; 2 asked for what can't be done, such as a --memory-limit that nothing
    meets: then the smallest need and how it is met are named.

    Examples: the paper's figure 1; GPT-2 XL on a node, with a drawing; one stage in full, 4
    examples a device, sharded within each node; the paper's C4 as it was run; the fastest way to
    train under a limit.

    ```
    zerojax plan --params 7.5e9 --devices 64
    zerojax plan --model gpt2-xl --devices 8 --plot gpt2-xl.png
    zerojax plan --model zero-8b --devices 64 --stage 3 --shards 8 \
      --batch-size 256
    zerojax plan --model zero-100b --devices 400 --stage 2 --model-axis 16 \
      --partition-activations
    zerojax plan --model gpt2-xl --batch-size 64 --search --memory-limit 20
    ```
    """
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator
    with refusing():
        asked = PlanQuestion(options)
    screen = Screen(width=132, quiet=options.json)  # that of the widest table
    with screen.console:  # all at once: `| grep -q` may stop listening
        with refusing():
            choices = asked.search() if options.search else None
            plans = choices.plans if choices else [asked.plan(stage) for stage in options.stages]
        hardware, step = _show_question(asked, screen)
        if choices is not None:
            screen.show(choices)
            ranks = enumerate(plans[:4], 1)  # as the rows of the table
            drawn = {f"{rank}: stage {one.stage}\nN = {one.num_shards}": one for rank, one in ranks}
        else:
            _show_stages(plans, screen)
            drawn = {f"stage {one.stage}": one for one in plans}
        if options.json:
            typer.echo(json.dumps([one.to_dict() for one in plans], indent=2))
        if options.plot is not None:
            title = f"{plans[0].num_params:,} parameters, {hardware}\n{step}"
            charts.write(charts.compare(drawn, title=title), options.plot)
            screen.wrote(options.plot)
        if options.memory_limit is not None and not any(one.fits for one in plans):
            least = min(plans, key=lambda one: one.bytes.total)
            raise Failure(
                f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need "
                f"is {least.bytes.total / 1e9:,.3f} GB: {least.title}; --search tries more"
            )


def _show_question(asked: PlanQuestion, screen: Screen) -> tuple[str, str]:
    options, one, config = asked.options, asked.hardware, asked.config
    limit = f"{one.memory / 1e9:,.1f} GB each"
    if options.memory_limit is not None:
        limit += f" allowed of {find_hardware(one.name).memory / 1e9:,.1f}"
    step = options.step_in_words(asked.num_examples, config.context)
    hardware = f"{options.devices:,} x {one.name}"
    layers = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}"
    model = f"{options.model or 'a GPT'}, {gpt.num_params(config):,} parameters, {layers}"
    model += f" of width {config.width}"
    screen.facts({"model": model, "hardware": f"{hardware}, {limit}", "step": step})
    return hardware, step


def _show_stages(plans: Sequence[Plan], screen: Screen) -> None:
    if len(plans) == 1:
        screen.show(plans[0])
        return
    unit = unit_for(max(one.bytes.theory for one in plans), DECIMAL)
    screen.title(f"one device, in {unit.name}" + (" (1e9 bytes)" if unit.size == 1e9 else ""))
    screen.show(stages_table(plans, unit.size))
    for line in notes(plans):
        screen.say(line)


def stages_table(plans: Sequence[Plan], size: float) -> Table:
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
        time = format(1e3 * one.step_time, ",.1f" if one.step_time >= 0.1 else "#.4g")
        made.add_row(*cells, f"{one.volume:.3f}", time, one.time.bound_by)
    return made


def notes(plans: Sequence[Plan]) -> Iterator[str]:
    """Yield what the columns mean where their names don't tell, and what the figures rest on."""
    yield "params, grads, optimizer: as the layout places them, masters with the optimizer"
    yield "states: their sum by the formula of the stage"
    yield "volume: elements that a device moves in a step, per parameter of the model"
    if any(one.bytes.total < one.bytes.states for one in plans):
        yield "peak: in use at one time; below the states where a gradient is scattered, or"
        yield "takes the place of weights that are done, before the next one is made"
    if tight := ", ".join(str(one.stage) for one in plans if not one.fits):
        yield f"does not fit {plans[0].hardware.memory / 1e9:,.1f} GB: stage {tight}"
    yield from dict.fromkeys(line for one in plans for line in one.assumptions)
