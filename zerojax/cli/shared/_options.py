"""The options of a step: the model, what is partitioned and how it is computed; and optimizers."""

import dataclasses
from collections.abc import Callable, Container
from typing import Literal

import jax
import optax
from jax.sharding import Mesh

import zerojax
from zerojax._types import PyTree
from zerojax.cli.shared._command import PANELS, CommandOptions, option
from zerojax.layout import STAGES, Layout, make_layout
from zerojax.models import gpt
from zerojax.recipe import LAYER_INPUT, Recipe, Reduce, Remat, RematPolicy

#: The peak learning rate for a model of that width; wider ones want one that is smaller in
#: proportion (arXiv 2203.03466, table 3).
BASE_RATE, BASE_WIDTH = 3e-3, 128
#: Leaves that weight decay applies to; biases and norms are left alone.
DECAYED = ("embed", "positions", "kernel")


def make_schedule(rate: float | None, warmup: int, steps: int, width: int) -> optax.Schedule:
    """Make the schedule: a linear warmup, then half a cosine down to a tenth of the peak.

    `rate` is the peak; None is what suits a model of that width.
    """
    if rate is None:
        rate = BASE_RATE * BASE_WIDTH / width
    if not warmup < steps:
        raise ValueError(f"--warmup {warmup} leaves none of --steps {steps}; give a smaller warmup")
    first = rate / (warmup + 1)  # not 0, which would waste the first step
    return optax.warmup_cosine_decay_schedule(first, rate, warmup, steps, end_value=rate / 10)


def _decayed(params: PyTree, names: Container[str] = DECAYED) -> PyTree:
    """Mark the leaves whose last key is one of the names; a lone leaf has none."""
    return jax.tree.map_with_path(lambda path, _: bool(path) and path[-1].key in names, params)


def _adamw(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=0.98, weight_decay=decay, mask=_decayed)


def _muon(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    # The last two dims of kernels are orthogonalised as one matrix per layer.
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return optax.contrib.muon(
        rate,
        weight_decay=decay,
        weight_decay_mask=_decayed,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda is_kernel: matrix if is_kernel else None, _decayed(params, ("kernel",))
        ),
        consistent_rms=0.2,  # updates as large as Adam's, so that one rate suits both of its halves
    )


Optimizer = Literal["adamw", "adamw_8bit", "muon"]
#: From schedule and weight decay to the transformation.
OPTIMIZERS: dict[Optimizer, Callable[[optax.Schedule, float], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adamw_8bit": lambda *given: zerojax.quantized(_adamw(*given)),
    "muon": _muon,
}


MODEL, HARDWARE, ZERO, TRAINING, DATA, SEARCH, OUTPUT, PROCESSES = PANELS
#: The mesh axis of model parallelism.
MODEL_AXIS = "model"
#: What the host can keep.
OFFLOADS = ("optimizer", "activations")
#: Standard deviation of first weights times the square root of the width; gpt2-small has 0.02.
INIT_SCALE = 0.02 * 768**0.5
Precision = Literal["bf16", "fp16", "fp32"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions(CommandOptions):
    """A step: the model, what is partitioned, and how it is computed.

    None leaves a choice to the model or to the command.
    """

    model: str | None = option(
        None, help=f"A GPT: {', '.join(gpt.PRESETS)}.", metavar="NAME", panel=MODEL
    )
    layers: int | None = option(None, min=1, show_default="the model's own", panel=MODEL)
    """Layers, for a model of a size of your own."""
    width: int | None = option(None, min=1, show_default="the model's own", panel=MODEL)
    """Its width; layers are initialised for it."""
    heads: int | None = option(None, min=1, show_default="the model's own", panel=MODEL)
    """Its attention heads, which have to divide the width."""
    context: int | None = option(None, min=1, show_default="the model's own", panel=MODEL)
    """Tokens of an example."""
    remat: Remat | None = option(None, show_default="as the model has it: full", panel=MODEL)
    """What the backward pass recomputes: nothing, all but products with weights, or each layer from
    its input."""
    stage: int | None = option(None, min=0, max=3, metavar="0..3", show_default="all", panel=ZERO)
    """What is partitioned: 0 nothing (plain data parallelism), 1 optimizer states, 2 also
    gradients, 3 also parameters."""
    model_axis: int = option(1, min=1, panel=ZERO)
    """Devices of model parallelism, which share each layer and the examples of one; ZeRO partitions
    over the others. Has to divide the devices and the model's heads."""
    partition_activations: bool = option(False, panel=ZERO)
    """Cut activation checkpoints over the model axis, the paper's Pa; with --offload activations
    its Pa+cpu."""
    offload: tuple[str, ...] = option((), metavar="WHAT", show_default="nothing", panel=ZERO)
    """What the host keeps: `optimizer`, its states with the masters, or `activations`, their
    checkpoints; may be given twice."""
    precision: Precision = option("bf16", panel=ZERO)
    """bf16 or fp16 parameters and gradients with partitioned fp32 masters (fp16 with a dynamic loss
    scale), or fp32."""
    reduce: Reduce | None = option(
        None, show_default="once at stages 0 and 1 with several microbatches, else each", panel=ZERO
    )
    """Sum gradients over devices once per step, or for each microbatch."""
    prefetch: float | None = option(
        None, min=0, max=1, metavar="PART", show_default="0.5, on CPUs 0", panel=ZERO
    )
    """Part of the next layer's weights that stage 3 gathers while a layer computes."""
    keep_gathered: bool = option(False, panel=ZERO)
    """Keep the weights that stage 3 gathers in the forward pass until the backward pass has used
    them (FSDP2 without reshard_after_forward): moves 2 Psi instead of 3, takes stage 2's memory."""
    batch_size: int | None = option(
        None, min=1, show_default="one on each device in a microbatch", panel=TRAINING
    )
    """Examples per step, over all devices and microbatches together."""
    accumulate: int = option(1, min=1, panel=TRAINING)
    """Microbatches per step."""
    optimizer: Optimizer = option(
        "adamw", help=f"Optax's {', '.join(OPTIMIZERS)}.", metavar="NAME", panel=TRAINING
    )

    def __post_init__(self) -> None:
        if unknown := [name for name in self.offload if name not in OFFLOADS]:
            raise ValueError(f"--offload {unknown[0]}: the host can keep {' and '.join(OFFLOADS)}")
        if "optimizer" in self.offload and self.optimizer != "adamw":
            told = f"the host updates element by element, and {self.optimizer} does not; ask for"
            raise ValueError(f"--offload optimizer: {told} --optimizer adamw, or leave that out")
        if self.partition_activations and self.model_axis == 1:
            told = "--partition-activations cuts checkpoints over the model axis"
            raise ValueError(f"{told}: give --model-axis of at least 2, or leave it out")
        self.recipe()  # refuses what contradicts itself

    def unscheduled(self, width: int) -> optax.GradientTransformation:
        """Make the optimizer of a step that is planned or compiled, where rates change no byte."""
        return OPTIMIZERS[self.optimizer](make_schedule(None, 100, 1000, width), 0.1)

    @property
    def chosen_model(self) -> gpt.Config:
        return self.resized(gpt.preset(self.model or ""))

    def resized(self, config: gpt.Config) -> gpt.Config:
        scale = None if self.width is None else INIT_SCALE * self.width**-0.5
        asked = {"num_layers": self.layers, "width": self.width, "num_heads": self.heads}
        asked |= {"context": self.context, "init_scale": scale}
        return dataclasses.replace(config, **{k: x for k, x in asked.items() if x is not None})

    def recipe(self, clip_norm: float | None = None) -> Recipe:
        """Return how the step is computed, its gradients clipped to a largest norm if at all."""
        remat: RematPolicy | Remat | None = self.remat
        inputs = (LAYER_INPUT,) if "activations" in self.offload else ()
        if inputs or self.partition_activations:
            axis = MODEL_AXIS if self.partition_activations else None
            remat = RematPolicy(recompute=self.remat or "full", offload=inputs, partition=axis)
        return Recipe(
            precision=self.precision,
            accumulate=self.accumulate,
            reduce=self.reduce,
            clip_norm=clip_norm,
            remat=remat,
            offload="optimizer" in self.offload,
            prefetch=self.prefetch,
            reshard_after_forward=not self.keep_gathered,
        )

    def examples(self, num_groups: int, default: int = 1) -> int:
        """Return the examples per step, divided by groups (devices / model axis) and batches."""
        multiple = num_groups * self.accumulate
        asked = self.batch_size or default
        fitting = -(-asked // multiple) * multiple
        if self.batch_size in (None, fitting):
            return fitting
        groups = "devices" if self.model_axis == 1 else "groups along the model axis"
        told = f"--batch-size {asked} has to be a multiple of {multiple}, such as {fitting}: "
        raise ValueError(f"{told}{groups} times microbatches, {num_groups} x {self.accumulate}")

    def step_in_words(self, num_examples: int, context: int) -> str:
        batch = f"{num_examples:,} example{'s' if num_examples > 1 else ''} of {context:,} tokens"
        parts = f" in {self.accumulate} microbatches" if self.accumulate > 1 else ""
        masters = " with fp32 masters" * (self.precision != "fp32")
        return f"{batch}{parts}, {self.optimizer}, {self.precision}{masters}"


#: Rows of an embedding that a model axis does not divide are filled up to a multiple of this.
VOCAB_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltStepOptions(StepOptions):
    stage: int = option(2, min=0, max=3, metavar="0..3", panel=ZERO)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep_gathered and "parameter" not in STAGES[self.stage]:
            raise ValueError("--keep-gathered keeps what stage 3 gathers: give --stage 3")

    def mesh_axes(self, num_devices: int) -> dict[str, int]:
        parts = self.model_axis
        if num_devices % parts:
            fits = ", ".join(str(n) for n in range(1, num_devices + 1) if num_devices % n == 0)
            told = f"--model-axis {parts} does not divide {num_devices} devices; these do: {fits}"
            raise ValueError(told)
        return {"data": num_devices // parts, **({MODEL_AXIS: parts} if parts > 1 else {})}

    @property
    def chosen_model(self) -> gpt.Config:
        config, parts = super().chosen_model, self.model_axis
        multiple = parts if VOCAB_MULTIPLE % parts else VOCAB_MULTIPLE
        multiple = multiple if config.vocab_size % parts else 1
        axis = MODEL_AXIS if parts > 1 else None
        config = dataclasses.replace(config, model_axis=axis, vocab_multiple=multiple)
        gpt.check_parts(config, parts)
        return config

    def in_words(self) -> str:
        """Return the options that decide more of a step than its stage; empty where none does."""
        asked = {"offload": " and ".join(self.offload), "remat": self.remat}
        words = [f"{name} {value}" for name, value in asked.items() if value]
        return ", ".join([*words, *["checkpoints partitioned"] * self.partition_activations])


def gpt_shapes(config: gpt.Config) -> PyTree:
    return jax.eval_shape(lambda: gpt.init(config, jax.random.key(0)))


def gpt_layout(config: gpt.Config, mesh: Mesh, stage: int) -> Layout:
    """Place a GPT: ZeRO partitions over the axis of data, beside that of model parallelism."""
    specs = None if config.model_axis is None else gpt.specs(config)
    return make_layout(gpt_shapes(config), mesh, stage=stage, specs=specs)
