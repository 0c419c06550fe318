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
from zerojax._types import LossFn, PyTree
from zerojax.aot import search_plans
from zerojax.cli.plan._numbers import read_bytes, read_count
from zerojax.cli.plan._options import PlanOptions
from zerojax.cli.shared._built_step import gpt_shapes
from zerojax.cli.shared._files import check_outputs
from zerojax.models import gpt
from zerojax.planner import Choices, Hardware, Plan, Space, Transformer, find_hardware
from zerojax.recipe import PRECISIONS, Precision

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
    def precision(self) -> Precision:
        """The dtypes of the step."""
        return PRECISIONS[self.options.precision]

    @property
    def context(self) -> int:
        """Tokens of an example."""
        model = self.config or self.transformer
        return 1 if model is None else model.context

    @property
    def examples_per_group(self) -> int:
        """Examples of a microbatch for each group of devices along the model axis."""
        return self.options.num_examples // (self.options.num_groups * self.options.accumulate)

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss that is traced, where there is a model."""
        return None if self.config is None else functools.partial(gpt.loss, self.config)

    def plan(self, stage: int) -> Plan:
        """Plan one stage.

        Raises:
            ValueError: an option that can't be met.
        """
        options = self.options
        return planner.plan(
            self.params,
            self.tx,
            stage=stage,
            num_devices=options.devices,
            hardware=self.hardware,
            batch=self._batch(options.num_examples),
            # Over a model axis of one device nothing is cut (Pa).
            partition_activations=options.cuts_checkpoints and options.model_parts > 1,
            **self._shared(),
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
            batch=self._batch(self.examples_per_group),
            **self._shared(),
        )

    def search(self) -> Choices:
        """Search among all that the options leave open, and compile the winners if asked to.

        Raises:
            ValueError: nothing fits, or an option can't be met.
        """
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
            space = dataclasses.replace(space, offloads=(options.offload,))
        return search_plans(
            self.params,
            self.tx,
            num_devices=options.devices,
            hardware=self.hardware,
            precision=self.precision,
            loss_fn=self.loss_fn,
            batch=self._batch(options.num_examples),
            transformer=self._told,
            tokens_per_device=self._tokens(),
            space=space,
            verify=options.verify,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what was asked as plain data, outputs left out."""
        asked = dataclasses.asdict(self.options)
        for name in ("given", "json", "plot"):
            del asked[name]
        return asked | {
            "hardware": self.hardware.name,
            "memory": self.hardware.memory,
            "context": self.context,
            "num_examples": self.options.num_examples,
        }

    def _shared(self) -> dict[str, Any]:
        """Return what a plan and a sweep are told alike."""
        options = self.options
        return {
            "precision": self.precision,
            "num_shards": options.shards,
            "model_axis": options.model_parts,
            "loss_fn": self.loss_fn,
            "transformer": self._told,
            "tokens_per_device": self._tokens(),
            "accumulate": options.accumulate,
            "reduce": options.reduce,
            "remat": options.remat,
            "offload": options.on_host,
        }

    def _batch(self, num_examples: int) -> jax.ShapeDtypeStruct | None:
        """Return the shape of a batch, where there is a model to take one."""
        shape = (num_examples, self.context + 1)
        return None if self.config is None else jax.ShapeDtypeStruct(shape, jnp.int32)

    def _tokens(self) -> int | None:
        """Return the tokens of a microbatch on a device, where there is no batch to tell."""
        return None if self.config is not None else self.examples_per_group * self.context

    @property
    def _told(self) -> Transformer | None:
        """The GPT where more is known of it than the number implies."""
        return self.transformer if self.options.context is not None else None


def read_request(options: PlanOptions) -> PlanRequest:
    """Check what was asked.

    Raises:
        ValueError: an option that can't be met.
        OSError: an output can't be written.
    """
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


def shortage(plans: Sequence[Plan]) -> str | None:
    """Return what the smallest plan needs, where none fits."""
    if any(one.fits for one in plans):
        return None
    least = min(plans, key=lambda one: one.bytes.total)
    return (
        f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need is "
        f"{least.bytes.total / 1e9:,.3f} GB: {least.title}; --search goes through more ways"
    )
