"""What `zerojax plan` was asked, checked, and put to the planner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax import planner
from zerojax._types import PyTree
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
    search_plans,
)
from zerojax.recipe import Recipe

#: Optimizers whose state depends on the shapes of leaves, which a number of parameters has not.
BY_SHAPE = ("adafactor", "muon")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A step to plan.

    Attributes:
        hardware: the device; its memory is the limit, where there is one.
        params: shapes, or their number; None where --largest looks for it.
        config: the model; None where there is a number alone.
        transformer: the GPT that a number stands for; None where there is a model.
    """

    options: PlanOptions
    hardware: Hardware
    params: PyTree | int | None
    config: gpt.Config | None
    transformer: Transformer | None
    tx: optax.GradientTransformation

    @property
    def context(self) -> int:
        """Tokens of an example."""
        model = self.config or self.transformer
        return 1 if model is None else model.context

    @property
    def examples_per_group(self) -> int:
        """Examples of a microbatch for each group of devices along the model axis."""
        return self.options.num_examples // (self.options.num_groups * self.options.accumulate)

    def plan(self, stage: int) -> Plan:
        """Plan one stage."""
        return planner.plan(
            self.params,
            self.tx,
            stage=stage,
            num_devices=self.options.devices,
            hardware=self.hardware,
            recipe=self.options.recipe(),
            workload=self._workload(self.options.num_examples),
            placement=self._placement,
        )

    def sweep(
        self, counts: Sequence[int], networks: Sequence[Hardware]
    ) -> list[dict[int, list[Plan]]]:
        """Plan all stages for every number of devices; for each network, by stage."""
        return planner.sweep(
            self.params,
            self.tx,
            num_devices=counts,
            hardware=networks,
            recipe=self.options.recipe(),
            workload=self._workload(self.examples_per_group),
            placement=self._placement,
        )

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
            remats=None if options.remat is None else (options.remat,),  # pyright: ignore[reportArgumentType]
        )
        if options.offload or options.verify:
            space = dataclasses.replace(space, offloads=(options.recipe().offload,))
        choices = search_plans(
            self.params,
            self.tx,
            num_devices=options.devices,
            hardware=self.hardware,
            recipe=Recipe(precision=options.precision),
            workload=self._workload(options.num_examples),
            space=space,
        )
        return verify_plans(choices) if options.verify else choices

    def to_dict(self) -> dict[str, Any]:
        """Return what was asked as plain data, outputs left out."""
        asked = dataclasses.asdict(self.options)
        for name in ("given", "json", "plot"):
            del asked[name]
        asked |= {"hardware": self.hardware.name, "memory": self.hardware.memory}
        if not self.options.largest:
            asked |= {"context": self.context, "num_examples": self.options.num_examples}
        return asked

    @property
    def _placement(self) -> Placement:
        """How devices are shared out."""
        return Placement(num_shards=self.options.shards, model_axis=self.options.model_parts)

    def _workload(self, num_examples: int) -> Workload:
        """Return what devices compute: a model's loss of so many examples, or a device's tokens."""
        if self.config is None:
            tokens = self.examples_per_group * self.context
            return Workload(transformer=self._told, tokens_per_device=tokens)
        batch = jax.ShapeDtypeStruct((num_examples, self.context + 1), jnp.int32)
        return Workload(loss_fn=functools.partial(gpt.loss, self.config), batch=batch)

    @property
    def _told(self) -> Transformer | None:
        """The GPT where more is known of it than the number implies."""
        return self.transformer if self.options.context is not None else None


def read_request(options: PlanOptions) -> PlanRequest:
    """Check what was asked."""
    hardware = _limited(find_hardware(options.hardware), options)
    params, config, transformer = None, None, None
    if options.params is not None:
        params = read_count("--params", options.params)
        transformer = Transformer.of(params, context=options.context)
    elif options.model is not None:
        config = options.chosen_model
        params = gpt_shapes(config)
    json = None if options.prints_json else options.json
    request = PlanRequest(
        options=options,
        hardware=hardware,
        params=params,
        config=config,
        transformer=transformer,
        tx=options.chosen_optimizer.unscheduled(1 if config is None else config.width),
    )
    if not options.largest:
        request.options.num_examples  # noqa: B018 - refuses examples that can't be split
    check_outputs({"--plot": options.plot, "--json": json})
    return request


def _limited(hardware: Hardware, options: PlanOptions) -> Hardware:
    """Return hardware with as much memory as may be used."""
    if options.memory_limit is None:
        return hardware
    limit = read_bytes("--memory-limit", options.memory_limit)
    if limit > hardware.memory:
        raise ValueError(
            f"--memory-limit {options.memory_limit} is more than the "
            f"{hardware.memory / 1e9:,.1f} GB that a program has of {hardware.name}; give less"
        )
    return dataclasses.replace(hardware, memory=max(1, int(limit)))


def slower(hardware: Hardware, factor: float) -> Hardware:
    """Return hardware whose links, fast and slow, bring so many times less."""
    names = ("link_bandwidth", "chip_bandwidth", "slow_bandwidth")
    return dataclasses.replace(hardware, **{x: getattr(hardware, x) / factor for x in names})


def shortage(plans: Sequence[Plan]) -> str | None:
    """Return what the smallest plan needs, where none fits."""
    if any(one.fits for one in plans):
        return None
    least = min(plans, key=lambda one: one.bytes.total)
    return (
        f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need is "
        f"{least.bytes.total / 1e9:,.3f} GB: {least.title}; --search goes through more ways"
    )
