"""What `zerojax plan` was asked, checked, and put to the planner."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import planner
from zerojax.cli.shared._command import option
from zerojax.cli.shared._machine import check_outputs
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
    Transformer,
    Workload,
    as_amount,
    as_count,
    find_hardware,
)

MOST_PARAMS = 10**18
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
BYTES = {"": 1, "B": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for ending, base in (("B", 1000), ("IB", 1024))
}


#: A number and letters: "7.5B", ".5e3 kB".
NUMBER = r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*"


def read_count(option: str, text: str) -> int:
    """Read a number of parameters: "7.5e9", "7.5B"."""
    value = _read(text, COUNTS, f"{option} {text}: give a number such as 7.5e9 or 7.5B")
    if value > MOST_PARAMS:
        raise ValueError(f"{option} {text}: plans go up to {MOST_PARAMS:.0e} parameters")
    return as_count(option, int(value) if value == int(value) else float(value))


def read_bytes(option: str, text: str) -> float:
    """Read bytes: "20e9", "20GB" (1e9), "18GiB" (2**30)."""
    value = _read(text, BYTES, f"{option} {text}: give bytes such as 20e9, 20GB or 18GiB")
    return as_amount(option, float(value), above_zero=True)


def _read(text: str, units: Mapping[str, int], refusal: str) -> Decimal:
    match = re.fullmatch(NUMBER, text)
    if match is None or match[2].upper() not in units:
        raise ValueError(refusal)
    return Decimal(match[1]) * units[match[2].upper()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(StepOptions):
    """What `zerojax plan` was asked for; None leaves a choice to it."""

    params: str | None = option(None, metavar="COUNT", panel=MODEL)
    """A number of parameters, 7.5e9 or 7.5B, in the place of a model: a plausible GPT of that size
    is planned by formulas."""
    stage: int | None = option(
        None,
        min=0,
        max=3,
        metavar="0|1|2|3",
        show_default="all, or that of --config",
        panel=ZERO,
    )
    hardware: str = option("h100", help=f"{', '.join(KNOWN)}.", metavar="NAME", panel=HARDWARE)
    devices: int = option(8, min=1, panel=HARDWARE)
    """All devices together."""
    memory_limit: str | None = option(
        None, metavar="BYTES", show_default="all of its memory", panel=HARDWARE
    )
    """What a step may take of a device: 20e9, 20GB or 18GiB."""
    shards: int | None = option(
        None, min=1, show_default="what the model axis leaves; --search tries nodes too", panel=ZERO
    )
    """N, the devices that share one copy of the model states; fewer than all is hybrid sharding:
    copies of the group split the batch between them."""
    search: bool = option(False, panel=SEARCH)
    """Search for the fastest way to train under the memory limit: stage, shard group, model axis,
    recomputation, what the host keeps, microbatches. Options that are given hold, and --shards
    holds the model axis as well."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds under each stage, and the time of a step."""
    json: Path | None = option(None, metavar="FILE", panel=OUTPUT)
    """Keep the figures as JSON; - prints them in the place of tables."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.params is None) == (self.model is None):
            raise ValueError(
                "say what to plan: --model gpt2-xl, or --params 7.5e9 (one of the two)"
            )
        if self.config and (self.search or self.plot):
            other = "--search goes through several" if self.search else "--plot draws all stages"
            raise ValueError(
                f"--config {self.config} is one way to train, and {other}: leave --config out"
            )
        if self.search and self.remat == "dots" and "activations" in self.offload:
            raise ValueError(
                "--search moves activations to the host where layers are recomputed from their "
                "inputs: leave --remat dots out, or --offload activations"
            )

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to plan."""
        is_open = self.stage is None and self.config is None
        return tuple(STAGES) if is_open else (self.chosen_stage,)

    @property
    def prints_json(self) -> bool:
        """Whether stdout gets the figures as JSON, and nothing else."""
        return self.json == Path("-")


class PlanQuestion:
    """A step to plan, as the planner takes it.

    Attributes:
        hardware: the device; its memory is the limit, where there is one.
        config: the model; None where there is a number of parameters alone.
        params: shapes, or their number.
        context: tokens of an example.
        num_examples: of a step.
        per_group: examples of a microbatch for each group of devices along the model axis.
    """

    def __init__(self, options: PlanOptions) -> None:
        self.options = options
        self.hardware = _limited(find_hardware(options.hardware), options.memory_limit)
        self.config = None if options.model is None else options.chosen_model
        if self.config is not None:
            self.params, self.context = gpt_shapes(self.config), self.config.context
        else:
            self.params = read_count("--params", options.params or "")
            self.context = Transformer.of(self.params, context=options.context).context
        self._tx = options.chosen_optimizer.unscheduled(self.config.width if self.config else 1)
        self._placement = Placement(num_shards=options.shards, model_axis=options.model_axis)
        # A search cuts no layer before it starts.
        groups = max(1, options.devices // (1 if options.search else options.model_axis))
        self.num_examples = options.examples(groups)
        self.per_group = self.num_examples // (groups * options.accumulate)
        json = None if options.prints_json else options.json
        check_outputs({"--plot": options.plot, "--json": json})

    def plan(self, stage: int) -> Plan:
        """Plan one stage."""
        return planner.plan(
            self.params, self._tx, stage=stage, placement=self._placement, **self._given
        )

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
        return planner.search_plans(self.params, self._tx, space=space, **self._given)

    def to_dict(self) -> dict[str, Any]:
        """Return what was asked as plain data, outputs left out."""
        return self.options.to_dict("json", "plot") | {
            "hardware": self.hardware.name,
            "memory": self.hardware.memory,
            "context": self.context,
            "num_examples": self.num_examples,
        }

    @property
    def _given(self) -> dict[str, Any]:
        """What a plan and a search are asked alike."""
        return {
            "num_devices": self.options.devices,
            "hardware": self.hardware,
            "recipe": self.options.recipe(),
            "workload": self._workload(),
        }

    def _workload(self) -> Workload:
        """Return what devices compute: a model's loss of so many examples, or a device's tokens."""
        if self.config is not None:
            batch = jax.ShapeDtypeStruct((self.num_examples, self.context + 1), jnp.int32)
            return Workload(loss_fn=functools.partial(gpt.loss, self.config), batch=batch)
        # The GPT, where more is known of it than the number implies.
        given = self.options.context
        told = None if given is None else Transformer.of(self.params, context=given)
        return Workload(transformer=told, tokens_per_device=self.per_group * self.context)


def _limited(hardware: Hardware, limit: str | None) -> Hardware:
    """Return hardware with as much memory as may be used."""
    if limit is None:
        return hardware
    memory = read_bytes("--memory-limit", limit)
    if memory > hardware.memory:
        raise ValueError(
            f"--memory-limit {limit} is more than the {hardware.memory / 1e9:,.1f} GB that a "
            f"program has of {hardware.name}; give less"
        )
    return dataclasses.replace(hardware, memory=max(1, int(memory)))
