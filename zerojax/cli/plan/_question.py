"""What `zerojax plan` was asked, checked, and put to the planner."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import planner
from zerojax.cli.shared._command import option
from zerojax.cli.shared._machine import check_output
from zerojax.cli.shared._options import (
    HARDWARE,
    MODEL,
    OUTPUT,
    SEARCH,
    ZERO,
    StepOptions,
    gpt_shapes,
)
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.planner import HARDWARE as KNOWN
from zerojax.planner import (
    Choices,
    Hardware,
    Placement,
    Plan,
    Space,
    Workload,
    find_hardware,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """What `zerojax plan` was asked for; None leaves a choice to it."""

    params: float | None = option(None, min=1e7, max=1e15, metavar="COUNT", panel=MODEL)
    """A number of parameters, 7.5e9, in the place of a model: a GPT of about that size."""
    hardware: str = option("h100", help=f"{', '.join(KNOWN)}.", metavar="NAME", panel=HARDWARE)
    devices: int = option(8, min=1, panel=HARDWARE)
    """All devices together."""
    memory_limit: float | None = option(
        None, min=1e-6, metavar="GB", show_default="all of its memory", panel=HARDWARE
    )
    """What a step may take of a device, in GB (1e9 bytes)."""
    shards: int | None = option(
        None, min=1, show_default="what the model axis leaves; --search tries nodes too", panel=ZERO
    )
    """N, the devices that share one copy of the model states; fewer than all is hybrid sharding:
    copies of the group split the batch between them."""
    search: bool = option(False, panel=SEARCH)
    """Search for the fastest way to train under the memory limit: stage, shard group, model axis,
    recomputation, what the host keeps, microbatches. Options that are given hold, and --shards
    holds the model axis as well."""
    json: bool = option(False, panel=OUTPUT)
    """Print the figures of each plan as JSON in the place of tables."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds under each stage, and the time of a step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.params is None) == (self.model is None):
            raise ValueError(
                "say what to plan: --model gpt2-xl, or --params 7.5e9 (one of the two)"
            )

    @property
    def chosen_model(self) -> gpt.Config:
        """The model of that name or of that size."""
        if self.params is None:
            return super().chosen_model
        return self.resized(gpt.of_size(round(self.params)))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to plan."""
        return tuple(STAGES) if self.stage is None else (self.stage,)


class PlanQuestion:
    """A step to plan, as the planner takes it.

    Attributes:
        hardware: the device; its memory is the limit, where there is one.
        config: the model.
        num_examples: of a step.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self.hardware = _limited(find_hardware(options.hardware), options.memory_limit)
        self.config = config = options.chosen_model
        # A search cuts no layer before it starts.
        groups = max(1, options.devices // (1 if options.search else options.model_axis))
        self.num_examples = options.examples(groups)
        batch = jax.ShapeDtypeStruct((self.num_examples, config.context + 1), jnp.int32)
        #: what a plan and a search are asked alike
        self._given: dict[str, Any] = {
            "params": gpt_shapes(config),
            "tx": options.chosen_optimizer.unscheduled(config.width),
            "num_devices": options.devices,
            "hardware": self.hardware,
            "recipe": options.recipe(),
            "workload": Workload(loss_fn=functools.partial(gpt.loss, config), batch=batch),
        }
        check_output("--plot", options.plot)

    def plan(self, stage: int) -> Plan:
        """Plan one stage."""
        options = self.options
        placement = Placement(num_shards=options.shards, model_axis=options.model_axis)
        return planner.plan(stage=stage, placement=placement, **self._given)

    def search(self) -> Choices:
        """Search among all that the options leave open."""
        options = self.options
        # A group that was asked for has to divide what each model axis leaves: 1 leaves all.
        free = "model_axis" not in options.given and options.shards is None
        space = Space(
            stages=options.stages,
            num_shards=None if options.shards is None else (options.shards,),
            model_axes=None if free else (options.model_axis,),
        )
        return planner.search_plans(space=space, **self._given)


def _limited(hardware: Hardware, limit: float | None) -> Hardware:
    """Return hardware with as much memory as may be used."""
    if limit is None:
        return hardware
    if limit * 1e9 > hardware.memory:
        raise ValueError(
            f"--memory-limit {limit:g} is more than the {hardware.memory / 1e9:,.1f} GB that a "
            f"program has of {hardware.name}; give less"
        )
    return dataclasses.replace(hardware, memory=round(limit * 1e9))
