"""What `zerojax plan` was asked, checked, and put to the planner."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from zerojax import planner
from zerojax.aot import verify_plans
from zerojax.cli.plan._numbers import read_bytes, read_count
from zerojax.cli.plan._options import PlanOptions
from zerojax.cli.shared._built_step import gpt_shapes
from zerojax.cli.shared._files import check_outputs
from zerojax.models import gpt
from zerojax.planner import (
    Choices,
    Hardware,
    Placement,
    Plan,
    Space,
    Transformer,
    Workload,
    find_hardware,
)


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
        # A search cuts no layer before it starts.
        groups = max(1, options.devices // (1 if options.search else options.model_parts))
        self.num_examples = options.examples(groups)
        self.per_group = self.num_examples // (groups * options.accumulate)
        json = None if options.prints_json else options.json
        check_outputs({"--plot": options.plot, "--json": json})

    def plan(self, stage: int) -> Plan:
        """Plan one stage."""
        devices, given = self.options.devices, self._given(self.num_examples)
        return planner.plan(self.params, self._tx, stage=stage, num_devices=devices, **given)

    def sweep(self) -> dict[int, list[Plan]]:
        """Plan all stages for every number of devices that is drawn."""
        counts, given = self.options.device_counts, self._given(self.per_group)
        return planner.sweep(self.params, self._tx, num_devices=counts, **given)

    def search(self) -> Choices:
        """Search among all that the options leave open, and compile the winners if asked to."""
        options = self.options
        # A group that was asked for has to divide what each model axis leaves: 1 leaves all. And
        # what is to be compiled is a train step, without model parallelism and all on the device.
        free = options.model_axis is None and options.shards is None and not options.verify
        space = Space(
            stages=options.stages,
            num_shards=None if options.shards is None else (options.shards,),
            model_axes=None if free else (options.model_parts,),
            offloads=(None,) if options.verify else None,
        )
        choices = planner.search_plans(
            self.params,
            self._tx,
            num_devices=options.devices,
            hardware=self.hardware,
            recipe=options.recipe(),
            workload=self._workload(self.num_examples),
            space=space,
        )
        return verify_plans(choices) if options.verify else choices

    def to_dict(self) -> dict[str, Any]:
        """Return what was asked as plain data, outputs left out."""
        return self.options.to_dict("json", "plot") | {
            "hardware": self.hardware.name,
            "memory": self.hardware.memory,
            "context": self.context,
            "num_examples": self.num_examples,
        }

    def _given(self, num_examples: int) -> dict[str, Any]:
        options = self.options
        return {
            "hardware": self.hardware,
            "recipe": options.recipe(),
            "workload": self._workload(num_examples),
            "placement": Placement(num_shards=options.shards, model_axis=options.model_parts),
        }

    def _workload(self, num_examples: int) -> Workload:
        """Return what devices compute: a model's loss of so many examples, or a device's tokens."""
        if self.config is not None:
            batch = jax.ShapeDtypeStruct((num_examples, self.context + 1), jnp.int32)
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
