"""The options that `train`, `plan` and `compile` share: the model, ZeRO and the step."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from zerojax.cli.shared._command import PANELS, CommandOptions, option
from zerojax.cli.shared._optimizers import OPTIMIZERS, NamedOptimizer, find_optimizer
from zerojax.models import gpt
from zerojax.planner import CONFIGURATIONS, Configuration, find_configuration
from zerojax.recipe import PRECISIONS, OffloadPolicy, Recipe, Reduce, Remat, RematPolicy, as_remat

MODEL, HARDWARE, ZERO, TRAINING, DATA, SEARCH, OUTPUT = PANELS
#: The mesh axis of model parallelism.
MODEL_AXIS = "model"
#: What the host can keep, and the kinds that this means.
OFFLOADS = {"optimizer": ("optimizer", "master"), "activations": ("activation",)}
REMATS = get_args(Remat)
#: The stage where neither it nor a configuration is given.
DEFAULT_STAGE = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(CommandOptions):
    """A step: the model, what is partitioned, and how it is computed.

    None leaves a choice to the model, to the configuration or to the command.
    """

    model: str | None = option(
        None, help=f"A GPT: {', '.join(gpt.PRESETS)}.", metavar="NAME", panel=MODEL
    )
    context: int | None = option(None, min=1, show_default="the model's own", panel=MODEL)
    """Tokens of an example."""
    remat: str | None = option(
        None, metavar="|".join(REMATS), show_default="as the model has it: full", panel=MODEL
    )
    """What the backward pass recomputes: nothing, all but products with weights, or each layer from
    its input."""
    stage: int | None = option(
        None, min=0, max=3, metavar="0|1|2|3", show_default="2, or the configuration's", panel=ZERO
    )
    """What is partitioned: 0 nothing (plain data parallelism), 1 optimizer states, 2 also
    gradients, 3 also parameters."""
    config: str | None = option(
        None, metavar="|".join(CONFIGURATIONS), show_default="none", panel=ZERO
    )
    """The ZeRO paper's configuration: C1 stage 1; C2 stage 1 with Pa, activation checkpoints cut
    over the model axis; C3 stage 2; C4 stage 2 with Pa; C5 stage 2 with Pa+cpu, checkpoints on the
    host. Sets the stage."""
    model_axis: int | None = option(None, min=1, show_default="1", panel=ZERO)
    """Devices of model parallelism, which share each layer and the examples of one; ZeRO partitions
    over the others. Has to divide the devices and the model's heads."""
    offload: tuple[str, ...] = option(
        (), metavar="|".join(OFFLOADS), show_default="nothing, or the configuration's", panel=ZERO
    )
    """What the host keeps: the optimizer's states with the masters, or activation checkpoints; may
    be given twice."""
    precision: str = option("bf16", metavar="bf16|fp16|fp32", panel=ZERO)
    """bf16 or fp16 parameters and gradients with partitioned fp32 masters (fp16 with a dynamic loss
    scale), or fp32."""
    reduce: str | None = option(
        None,
        metavar="once|each",
        show_default="once at stages 0 and 1 with several microbatches, else each",
        panel=ZERO,
    )
    """Sum gradients over devices once per step, or for each microbatch."""
    batch_size: int | None = option(
        None, min=1, show_default="one on each device in a microbatch", panel=TRAINING
    )
    """Examples per step, over all devices and microbatches together."""
    accumulate: int = option(1, min=1, panel=TRAINING)
    """Microbatches per step."""
    optimizer: str = option(
        "adamw", help=f"Optax's {', '.join(OPTIMIZERS)}.", metavar="NAME", panel=TRAINING
    )

    def __post_init__(self) -> None:
        find_optimizer(self.optimizer)
        _check_name("--precision", self.precision, PRECISIONS)
        _check_name("--config", self.config, CONFIGURATIONS)
        _check_name("--remat", self.remat, REMATS)
        _check_name("--reduce", self.reduce, get_args(Reduce))
        for name in self.offload:
            if name not in OFFLOADS:
                raise ValueError(f"--offload {name}: the host can keep {' and '.join(OFFLOADS)}")
        if self.configuration and self.stage not in (None, self.configuration.stage):
            raise ValueError(
                f"--config {self.config} is stage {self.configuration.stage}, and --stage "
                f"{self.stage} another: give one of them"
            )
        asked = self.configuration
        by_config = asked is not None and asked.partitioned_checkpoints
        if self.remat == "none" and (by_config or "activations" in self.on_host):
            option = f"--config {self.config}" if self.config else "--offload activations"
            raise ValueError(
                f"--remat none keeps everything where it is, and {option} keeps each layer's input "
                "alone and recomputes the rest: leave one of them out"
            )

    @property
    def configuration(self) -> Configuration | None:
        """The configuration, where one was named."""
        return None if self.config is None else find_configuration(self.config)

    @property
    def cuts_checkpoints(self) -> bool:
        """Whether activation checkpoints are cut over the model axis, if it has devices (Pa)."""
        asked = self.configuration
        return asked is not None and asked.partitioned_checkpoints and self.model_parts > 1

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the host keeps, by these options or by the configuration."""
        by_config = self.configuration is not None and self.configuration.offloaded_checkpoints
        asked = {*self.offload, *(("activations",) if by_config else ())}
        return tuple(name for name in OFFLOADS if name in asked)

    @property
    def chosen_stage(self) -> int:
        """The stage: that of `--stage`, of the configuration, or the default."""
        if self.configuration is not None:
            return self.configuration.stage
        return DEFAULT_STAGE if self.stage is None else self.stage

    @property
    def model_parts(self) -> int:
        """Devices of model parallelism."""
        return self.model_axis or 1

    @property
    def chosen_optimizer(self) -> NamedOptimizer:
        """The optimizer of that name."""
        return find_optimizer(self.optimizer)

    @property
    def chosen_model(self) -> gpt.Config:
        """The model of that name, with the context that was asked for."""
        config = gpt.preset(self.model or "")
        return dataclasses.replace(config, context=self.context or config.context)

    def recipe(self, clip_norm: float | None = None) -> Recipe:
        """Return how the step is computed, its gradients clipped to a largest norm if at all."""
        reduce: Any = self.reduce
        return Recipe(
            precision=self.precision,
            accumulate=self.accumulate,
            reduce=reduce,
            clip_norm=clip_norm,
            remat=self._remat_policy(),
            offload=self._offload_policy(),
        )

    def _remat_policy(self) -> RematPolicy | None:
        recompute: Any = self.remat
        if self.configuration is None:
            return as_remat(recompute)
        policy = self.configuration.remat(MODEL_AXIS)
        return dataclasses.replace(
            policy,
            partition=MODEL_AXIS if self.cuts_checkpoints else None,
            recompute=recompute or policy.recompute,
        )

    def _offload_policy(self) -> OffloadPolicy | None:
        """Return the policy for what `--offload` names; a configuration's is one of remat."""
        asked = [name for name in OFFLOADS if name in self.offload]
        kinds: Any = tuple(kind for name in asked for kind in OFFLOADS[name])
        if not kinds:
            return None
        # A host updates what an optimizer computes element by element.
        update = "host" if self.chosen_optimizer.elementwise else "device"
        return OffloadPolicy(kinds=kinds, update=update)

    def examples(self, num_groups: int, default: int = 1) -> int:
        """Return the examples per step, which groups and microbatches divide.

        Args:
            num_groups: groups of devices with examples of their own: devices / model axis.
            default: the least number where none was asked for.
        """
        multiple = num_groups * self.accumulate
        asked = self.batch_size or default
        fitting = -(-asked // multiple) * multiple
        if self.batch_size in (None, fitting):
            return fitting
        groups = "devices" if self.model_parts == 1 else "groups along the model axis"
        times = f" times {self.accumulate} microbatches" if self.accumulate > 1 else ""
        raise ValueError(
            f"--batch-size {asked} can't be split evenly over {num_groups} {groups}{times}; give "
            f"a multiple of {multiple}, such as {fitting}"
        )


def _check_name(option: str, name: str | None, known: Any) -> None:
    if name is not None and name not in known:
        raise ValueError(f"{option} {name}: give one of {', '.join(known)}")
