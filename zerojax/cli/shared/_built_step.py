"""The options of a step that is built, and what they make: model, mesh axes, recipe, layout."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import Mesh

from zerojax._types import PyTree
from zerojax.cli.shared._command import option
from zerojax.cli.shared._options import MODEL, MODEL_AXIS, ZERO, StepOptions
from zerojax.layout import Layout, make_layout
from zerojax.models import gpt

#: Rows of an embedding that a model axis does not divide are filled up to a multiple of this.
VOCAB_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltStepOptions(StepOptions):
    """A step that is run or compiled."""

    loss_chunk: int | None = option(
        None, min=1, show_default="all of the vocabulary's", panel=MODEL
    )
    """Logits per token that the loss holds at a time; the vocabulary's are never whole."""
    sequence_parallel: bool = option(False, panel=ZERO)
    """Cut what goes from layer to layer along the tokens, over the model axis (2 or more).
    Checkpoints are cut already then, and Pa adds nothing: it is left out."""

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        """Share devices out between data and model."""
        parts = self.model_parts
        if num_devices % parts:
            fits = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
            raise ValueError(
                f"--model-axis {parts} does not divide {num_devices} devices; these do: {fits}"
            )
        return {"data": num_devices // parts, **({MODEL_AXIS: parts} if parts > 1 else {})}

    @property
    def chosen_model(self) -> gpt.Config:
        """The model as these options have it."""
        config, parts = super().chosen_model, self.model_parts
        multiple = parts if VOCAB_MULTIPLE % parts else VOCAB_MULTIPLE
        config = dataclasses.replace(
            config,
            loss_chunk=self.loss_chunk,
            model_axis=MODEL_AXIS if parts > 1 else None,
            sequence_parallel=self.sequence_parallel,
            vocab_multiple=multiple if config.vocab_size % parts else 1,
        )
        gpt.check_parts(config, parts)
        if self.sequence_parallel and config.context % parts:
            raise ValueError(
                f"--sequence-parallel: --model-axis {parts} does not divide {config.context} "
                "tokens; give a --context that it divides"
            )
        return config

    def in_words(self) -> str:
        """Return the options that decide more of a step than its stage; empty where none does."""
        names = ("config", "sequence_parallel", "offload", "remat", "loss_chunk")
        asked = {name.replace("_", " "): getattr(self, name) for name in names}
        asked["offload"] = " and ".join(self.offload)
        told = {name: "" if x is True else f" {x}" for name, x in asked.items() if x}
        return ", ".join(f"{name}{value}" for name, value in told.items())


def gpt_shapes(config: gpt.Config) -> PyTree:
    """Return the shapes of a GPT's parameters; starts no backend."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(functools.partial(gpt.init, config), key)


def gpt_layout(config: gpt.Config, mesh: Mesh, stage: int) -> Layout:
    """Place a GPT: ZeRO partitions over the axis of data, beside that of model parallelism."""
    specs = None if config.model_axis is None else gpt.specs(config)
    return make_layout(gpt_shapes(config), mesh, stage=stage, specs=specs)
