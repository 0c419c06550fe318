"""What `zerojax plan` was asked, checked, and put to the planner."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._types import LossFn, PyTree
from zerojax.aot import search_plans
from zerojax.cli.compile._outputs import check_file, check_png
from zerojax.cli.compile._request import STEPS, WARMUP, WEIGHT_DECAY
from zerojax.cli.plan._options import PlanOptions, read_bytes, read_count
from zerojax.cli.shared._optimizers import find_optimizer, make_schedule
from zerojax.cli.shared._residual_options import find_remat
from zerojax.cli.train._run import PRECISIONS
from zerojax.models import gpt
from zerojax.planner import Choices, Hardware, Plan, Space, Transformer, find_hardware, plan
from zerojax.recipe import Precision

#: Optimizers whose state depends on the shapes of leaves, which a number of parameters has not.
BY_SHAPE = ("adafactor", "muon")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanQuestion:
    """A step to plan.

    Attributes:
        hardware: the device; its memory is the limit, where there is one.
        params: shapes, or their number; None where --largest looks for it.
        config: the model; None where there is a number alone.
        transformer: the GPT that a number stands for; None where there is a model.
        context: tokens of an example.
        remat: what is recomputed; None is as the model has it.
    """

    options: PlanOptions
    hardware: Hardware
    params: PyTree | int | None
    config: gpt.Config | None
    transformer: Transformer | None
    context: int
    remat: Any
    tx: optax.GradientTransformation
    precision: Precision

    @property
    def model_axis(self) -> int:
        """Devices of model parallelism."""
        return self.options.model_axis or 1

    @property
    def loss_fn(self) -> LossFn | None:
        """The loss that is traced, where there is a model."""
        return None if self.config is None else functools.partial(gpt.loss, self.config)

    def batch(self, num_examples: int) -> jax.ShapeDtypeStruct | None:
        """Shape a batch, where there is a model to take one."""
        shape = (num_examples, self.context + 1)
        return None if self.config is None else jax.ShapeDtypeStruct(shape, jnp.int32)

    @property
    def num_examples(self) -> int:
        """Examples of a step: those of all devices, or of all groups along a model axis."""
        options = self.options
        parts = 1 if options.search else self.model_axis
        return options.batch * options.accumulate * max(1, options.devices // parts)

    def plan(self, stage: int) -> Plan:
        """Plan one stage.

        Raises:
            ValueError: an option that can't be met.
        """
        assert self.params is not None
        options = self.options
        return plan(
            self.params, self.tx, stage=stage, num_devices=options.devices,
            hardware=self.hardware, precision=self.precision, num_shards=options.shards,
            model_axis=self.model_axis, loss_fn=self.loss_fn, batch=self.batch(self.num_examples),
            transformer=self.told, tokens_per_device=self._tokens(options.batch),
            accumulate=options.accumulate, reduce=options.reduce,  # pyright: ignore[reportArgumentType]
            remat=self.remat, offload=options.residual.on_host,  # pyright: ignore[reportArgumentType]
            partition_activations=self.cuts_checkpoints,
        )  # fmt: skip

    @property
    def cuts_checkpoints(self) -> bool:
        """Whether checkpoints are cut (Pa): over a model axis of one device nothing is."""
        return self.options.residual.cuts_checkpoints and self.model_axis > 1

    def search(self) -> Choices:
        """Search among all that the options leave open, and compile the winners if asked to.

        Raises:
            ValueError: nothing fits, or an option can't be met.
        """
        assert self.params is not None
        options = self.options
        # A group that was asked for has to divide what each model axis leaves: 1 leaves all. And
        # what is to be compiled is a train step, without model parallelism and all on the device.
        free = options.model_axis is None and options.shards is None and not options.verify
        space = Space(
            stages=options.stages,
            num_shards=None if options.shards is None else (options.shards,),
            model_axes=None if free else (self.model_axis,),
            remats=None if self.remat is None else (self.remat,),
        )
        if options.offload or options.verify:
            space = dataclasses.replace(space, offloads=(options.offload,))
        return search_plans(
            self.params, self.tx, num_devices=options.devices, hardware=self.hardware,
            precision=self.precision, loss_fn=self.loss_fn, batch=self.batch(self.num_examples),
            transformer=self.told,
            tokens_per_device=self._tokens(options.batch * options.accumulate), space=space,
            verify=options.verify,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Give what was asked as plain data, outputs left out."""
        asked = dataclasses.asdict(self.options)
        for name in ("json", "plot"):
            del asked[name]
        asked |= {
            "hardware": self.hardware.name, "memory": self.hardware.memory,
            "context": self.context, "num_examples": self.num_examples,
        }  # fmt: skip
        return asked

    @property
    def told(self) -> Transformer | None:
        """The GPT where more is known of it than the number implies."""
        return self.transformer if self.options.context is not None else None

    def _tokens(self, num_examples: int) -> int | None:
        return None if self.config is not None else num_examples * self.context


def read_plan_question(options: PlanOptions) -> PlanQuestion:
    """Check what was asked.

    Raises:
        ValueError: an option that can't be met, or two that contradict each other.
        OSError: an output can't be written.
    """
    _check_question(options)
    hardware = _limited(find_hardware(options.hardware), options)
    choice = find_optimizer(options.optimizer)
    if options.precision not in PRECISIONS:
        raise ValueError(f"--precision {options.precision}: give one of {', '.join(PRECISIONS)}")
    options.residual.stage(options.stage)
    params, config, transformer = _read_model(options)
    width = 1 if config is None else config.width
    one = config or transformer
    check_outputs(options)
    return PlanQuestion(
        options=options,
        hardware=hardware,
        params=params,
        config=config,
        transformer=transformer,
        context=1 if one is None else one.context,
        remat=_read_remat(options),
        tx=choice.make(make_schedule(choice, None, WARMUP, STEPS, width), WEIGHT_DECAY),
        precision=PRECISIONS[options.precision],
    )


def check_outputs(options: PlanOptions) -> None:
    """See that what is to be written can be.

    Raises:
        ValueError: the drawing ends in something else than .png, or both have one name.
        OSError: one can't be written.
    """
    check_png(options.plot)
    if options.plot is not None and options.plot == options.json:
        raise ValueError(f"two outputs have one name: {options.plot}")
    named = {"--plot": options.plot, "--json": options.json}
    for option, path in named.items():
        if path is not None and not (path is options.json and options.prints_json):
            check_file(option, path)


def _check_question(options: PlanOptions) -> None:
    """Refuse options that don't go together."""
    if options.verify and not options.search:
        raise ValueError("--verify compiles the winners of --search: give both")
    if options.verify and options.model is None:
        raise ValueError("--verify compiles a model: give --model in the place of --params")
    if options.verify and (options.offload or (options.model_axis or 1) > 1):
        raise ValueError(
            "--verify compiles without model parallelism and with everything on the device: leave "
            "--offload and --model-axis out, or ask `zerojax compile`, which has both"
        )
    if options.search and options.reduce is not None:
        raise ValueError("--search takes the --reduce that suits each choice; leave it out")
    keeps = options.remat is False or options.remat_policy in ("none", "dots")
    if options.search and keeps and "activations" in options.offload:
        raise ValueError(
            "--search moves activations to the host where layers are recomputed from their inputs: "
            "leave --no-remat and --remat-policy out, or --offload activations"
        )
    if options.config is not None and (options.search or options.plot is not None):
        given = "--search goes through" if options.search else "--plot draws"
        raise ValueError(
            f"--config {options.config} is of one stage, and {given} all of them: give one of the "
            "two options"
        )
    if options.largest:
        given = {
            "--params": options.params, "--model": options.model, "--stage": options.stage,
            "--config": options.config, "--shards": options.shards,
            "--search": options.search or None, "--plot": options.plot,
            "--remat-policy": options.remat_policy,
            "--remat/--no-remat": options.remat, "--offload": options.offload or None,
            "--reduce": options.reduce, "--accumulate": options.accumulate if
            options.accumulate > 1 else None,
        }  # fmt: skip
        if wrong := [name for name, value in given.items() if value is not None]:
            raise ValueError(
                f"--largest looks for the model, by stage and configuration: leave {wrong[0]} out"
            )
    elif (options.params is None) == (options.model is None):
        raise ValueError("say what to plan: --model gpt2-xl, or --params 7.5e9 (one of the two)")


def _limited(hardware: Hardware, options: PlanOptions) -> Hardware:
    """Give hardware with as much memory as may be used."""
    if options.memory_limit is None:
        return hardware
    limit = read_bytes("--memory-limit", options.memory_limit)
    if limit > hardware.memory:
        raise ValueError(
            f"--memory-limit {options.memory_limit} is more than the "
            f"{hardware.memory / 1e9:,.1f} GB that a program has of {hardware.name}; give less"
        )
    return dataclasses.replace(hardware, memory=max(1, int(limit)))


def _read_model(
    options: PlanOptions,
) -> tuple[PyTree | int | None, gpt.Config | None, Transformer | None]:
    """Give shapes and the model that they are of, or a number and the GPT that it stands for."""
    if options.params is not None:
        count = read_count("--params", options.params)
        return count, None, Transformer.of(count, context=options.context)
    if options.model is None:
        return None, None, None
    config = gpt.preset(options.model)
    config = dataclasses.replace(config, context=options.context or config.context)
    key = jax.eval_shape(lambda: jax.random.key(0))  # a real key would start a backend
    return jax.eval_shape(functools.partial(gpt.init, config), key), config, None


def _read_remat(options: PlanOptions) -> str | None:
    found = find_remat(options.remat, options.remat_policy)
    return "full" if found is None and options.remat and options.search else found


def shortage(plans: Sequence[Plan]) -> str | None:
    """Say what the smallest plan needs, where none fits."""
    if any(one.fits for one in plans):
        return None
    least = min(plans, key=lambda one: one.bytes.total)
    return (
        f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need is "
        f"{least.bytes.total / 1e9:,.3f} GB: {least.title}; --search goes through more ways"
    )
