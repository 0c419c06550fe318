"""Options beside the model states: ZeRO-R, model parallelism, what the host keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer

from zerojax.cli.shared._optimizers import Choice
from zerojax.cli.shared._step_options import MODEL, ZERO
from zerojax.memory import has_host_memory
from zerojax.models import gpt
from zerojax.planner import CONFIGURATIONS, Configuration, find_configuration
from zerojax.recipe import HOST_MEMORY, OffloadPolicy, Remat, RematPolicy

#: The mesh axis of model parallelism.
MODEL_AXIS = "model"
#: What the host can keep, and the kinds that this means.
OFFLOADS = {"optimizer": ("optimizer", "master"), "activations": ("activation",)}
REMATS = get_args(Remat)
#: The stage where neither it nor a configuration is given.
DEFAULT_STAGE = 2
#: Rows of an embedding that a model axis does not divide are filled up to a multiple of this.
VOCAB_MULTIPLE = 128

Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="|".join(CONFIGURATIONS),
        help="The ZeRO paper's configuration: C1 stage 1; C2 stage 1 with Pa, activation "
        "checkpoints cut over the model axis; C3 stage 2; C4 stage 2 with Pa; C5 stage 2 with "
        "Pa+cpu, checkpoints on the host. Sets the stage.",
        show_default="none",
        rich_help_panel=ZERO,
    ),
]
ModelAxis = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Devices of model parallelism, which share each layer and the examples of one; ZeRO "
        "partitions over the others. Has to divide the devices and the model's heads.",
        show_default="1",
        rich_help_panel=ZERO,
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel",
        help="Cut what goes from layer to layer along the tokens, over the model axis (2 or more). "
        "Checkpoints are cut already then, and Pa adds nothing: it is left out.",
        rich_help_panel=ZERO,
    ),
]
Offload = Annotated[
    list[str] | None,
    typer.Option(
        metavar="|".join(OFFLOADS),
        help="What the host keeps: the optimizer's states with the masters, or activation "
        "checkpoints; may be given twice.",
        show_default="nothing, or the configuration's",
        rich_help_panel=ZERO,
    ),
]
KeepsRemat = Annotated[
    bool | None,
    typer.Option(
        "--remat/--no-remat",
        help="Recompute each layer in the backward pass, or keep its activations.",
        show_default="remat",
        rich_help_panel=MODEL,
    ),
]
RematName = Annotated[
    str | None,
    typer.Option(
        "--remat-policy",
        metavar="|".join(REMATS),
        help="What is recomputed: nothing, all but products with weights, or each layer from its "
        "input.",
        show_default="as the model has it: full",
        rich_help_panel=MODEL,
    ),
]
LossChunk = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Logits per token that the loss holds at a time; the vocabulary's are never whole.",
        show_default="all of the vocabulary's",
        rich_help_panel=MODEL,
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Residual:
    """What was asked for beside the model states; None leaves a choice to the command.

    Attributes:
        config: the name of a configuration.
        model_axis: devices of model parallelism.
        remat_policy: what is recomputed, "none" also for `--no-remat`.
        offload: names of what the host keeps.
        loss_chunk: logits per token at a time.

    Raises:
        ValueError: an unknown name, or options that contradict each other.
    """

    config: str | None = None
    model_axis: int | None = None
    sequence_parallel: bool = False
    remat_policy: str | None = None
    offload: tuple[str, ...] = ()
    loss_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.config is not None and self.config not in CONFIGURATIONS:
            raise ValueError(f"--config {self.config}: give one of {', '.join(CONFIGURATIONS)}")
        if unknown := sorted(set(self.offload) - set(OFFLOADS)):
            raise ValueError(f"--offload {unknown[0]}: the host can keep {' and '.join(OFFLOADS)}")
        if self.remat_policy != "none":
            find_remat(None, self.remat_policy)
        elif self.cuts_checkpoints:
            raise ValueError(
                f"--config {self.config} keeps each layer's input alone, and --remat-policy none "
                "keeps everything: give full or dots, or --config C1 or C3"
            )

    @property
    def configuration(self) -> Configuration | None:
        """The configuration, where one was named."""
        return None if self.config is None else find_configuration(self.config)

    @property
    def cuts_checkpoints(self) -> bool:
        """Whether the configuration cuts activation checkpoints over the model axis (Pa)."""
        return self.configuration is not None and self.configuration.partitioned_checkpoints

    @property
    def on_host(self) -> tuple[str, ...]:
        """What the host keeps, by these options or by the configuration."""
        by_config = self.configuration is not None and self.configuration.offloaded_checkpoints
        asked = {*self.offload, *(("activations",) if by_config else ())}
        return tuple(name for name in OFFLOADS if name in asked)

    @property
    def num_parts(self) -> int:
        """Devices of model parallelism."""
        return self.model_axis or 1

    @property
    def model_axes(self) -> dict[str, int]:
        """The axis of model parallelism and its size; empty where nothing needs one."""
        needed = self.num_parts > 1 or self.cuts_checkpoints
        return {MODEL_AXIS: self.num_parts} if needed else {}

    def stage(self, given: int | None) -> int:
        """Give the stage: that of `--stage`, of the configuration, or the default.

        Raises:
            ValueError: two that differ.
        """
        if self.configuration is None:
            return DEFAULT_STAGE if given is None else given
        stage = self.configuration.stage
        if given not in (None, stage):
            raise ValueError(
                f"--config {self.config} is stage {stage}, and --stage {given} another: give one "
                "of them"
            )
        return stage

    def axes(self, num_devices: int) -> dict[str, int]:
        """Share devices out between data and model.

        Raises:
            ValueError: the model axis does not divide them.
        """
        if num_devices % self.num_parts:
            fits = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
            raise ValueError(
                f"--model-axis {self.num_parts} does not divide {num_devices} devices; these "
                f"do: {fits}"
            )
        return {"data": num_devices // self.num_parts, **self.model_axes}

    def model(self, config: gpt.Config) -> gpt.Config:
        """Give the model as these options have it.

        Raises:
            ValueError: the model axis does not divide the heads or the tokens.
        """
        parts = self.num_parts
        if self.sequence_parallel and parts < 2:
            raise ValueError(
                "--sequence-parallel cuts tokens over the model axis: give --model-axis 2 or more"
            )
        changes: dict[str, Any] = {"loss_chunk": self.loss_chunk}
        if self.remat_policy == "none":
            changes["remat"] = False
        if self.model_axes:
            changes |= {"model_axis": MODEL_AXIS, "sequence_parallel": self.sequence_parallel}
        if config.vocab_size % parts:
            changes["vocab_multiple"] = parts if VOCAB_MULTIPLE % parts else VOCAB_MULTIPLE
        config = dataclasses.replace(config, **changes)
        gpt.check_parts(config, parts)
        if self.sequence_parallel and config.context % parts:
            near = -(-config.context // parts) * parts
            raise ValueError(
                f"--sequence-parallel: --model-axis {parts} does not divide {config.context} "
                f"tokens; give --context {near}, say"
            )
        return config

    def remat(self) -> RematPolicy | None:
        """Give the policy of the train step; None where the model does the same by itself.

        Raises:
            ValueError: checkpoints are to lie on the host, and everything is kept.
        """
        if self.remat_policy == "none":
            if "activations" in self.on_host:
                raise ValueError(
                    "--offload activations moves layers' inputs to the host, and all else is "
                    "recomputed from them: leave --no-remat and --remat-policy none out"
                )
            return None
        asked = self.configuration
        policy = RematPolicy() if asked is None else asked.remat(MODEL_AXIS)
        # A residual stream that is cut along the tokens is what a layer's input is.
        partition = None if self.sequence_parallel else policy.partition
        policy = dataclasses.replace(
            policy, partition=partition, recompute=self.remat_policy or policy.recompute
        )
        return None if policy == RematPolicy() else policy

    def offloads(self, choice: Choice, devices: Sequence[Any]) -> OffloadPolicy | None:
        """Give the policy of the train step for what `--offload` names.

        Args:
            choice: the optimizer, which the host runs where it computes element by element.
            devices: of the mesh.

        Raises:
            ValueError: the host's memory is asked for, and the devices can't reach it.
        """
        if self.on_host and not has_host_memory(devices[0]):
            by = f"--offload {self.offload[0]}" if self.offload else f"--config {self.config}"
            raise ValueError(
                f"{by} keeps {' and '.join(self.on_host)} in the host's memory ({HOST_MEMORY}), "
                f"and the backend {devices[0].platform!r} ({devices[0].device_kind}) has none: "
                f"leave it out"
            )
        kinds: Any = tuple(kind for name in self.offload for kind in OFFLOADS[name])
        if not kinds:
            return None
        update = "host" if choice.elementwise else "device"
        return OffloadPolicy(kinds=tuple(dict.fromkeys(kinds)), update=update)

    def in_words(self) -> str:
        """Say in a line what is done; empty where nothing was asked for."""
        found = []
        if self.configuration is not None:
            found.append(f"{self.config}: stage {self.configuration.stage}")
        if self.sequence_parallel:
            found.append("tokens cut over the model axis")
        elif self.cuts_checkpoints:
            found.append("activation checkpoints cut over the model axis (Pa)")
        if self.on_host:
            found.append(f"on the host: {' and '.join(self.on_host)}")
        if self.remat_policy is not None:
            found.append(f"recomputed: {_RECOMPUTED[self.remat_policy]}")
        if self.loss_chunk is not None:
            found.append(f"{self.loss_chunk:,} logits of a token at a time")
        return ", ".join(found)


_RECOMPUTED = {"none": "nothing", "dots": "all but products", "full": "each layer"}


def find_remat(keeps: bool | None, policy: str | None) -> str | None:
    """Read `--remat/--no-remat` and `--remat-policy` as one; None is as the model has it.

    Raises:
        ValueError: an unknown policy, or one that the other option contradicts.
    """
    if policy is not None and policy not in REMATS:
        raise ValueError(f"--remat-policy {policy}: give one of {', '.join(REMATS)}")
    if keeps is not None and policy is not None and keeps == (policy == "none"):
        given = "--remat" if keeps else "--no-remat"
        raise ValueError(f"{given} and --remat-policy {policy} contradict each other: give one")
    return "none" if keeps is False else policy
