"""`plan`: what a training step will hold, move and take, before anything runs."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import num_bytes
from zerojax._types import LossFn, PyTree
from zerojax.layout import Rule
from zerojax.layout._stages import check_stage
from zerojax.planner._counts import as_amount, as_count
from zerojax.planner._demand import Demand, DescribedGpt, Matrices, TracedLoss, Unknown
from zerojax.planner._estimate import Step, estimate
from zerojax.planner._hardware import Hardware, find_hardware
from zerojax.planner._placement import Devices, mixed_precision, place, share_out
from zerojax.planner._report import Plan
from zerojax.planner._trace import trace_loss
from zerojax.planner._transformer import Transformer
from zerojax.planner._volume import Reduce
from zerojax.recipe import Precision, Recipe, Remat, as_remat

#: What a plan can move to the host's memory.
Offload = Literal["optimizer", "activations"]


def plan(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    stage: int,
    num_devices: int,
    hardware: str | Hardware,
    precision: Precision | None = None,
    num_shards: int | None = None,
    model_axis: int = 1,
    loss_fn: LossFn | None = None,
    batch: PyTree = None,
    has_aux: bool = False,
    transformer: Transformer | None = None,
    tokens_per_device: float | None = None,
    accumulate: int = 1,
    reduce: Reduce | None = None,
    remat: Remat | None = None,
    partition_activations: bool = False,
    offload: Sequence[Offload] | Offload = (),
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int | None = None,
    overlap: float = 1.0,
) -> Plan:
    """Plan a training step: bytes, volume and time per device, from shapes alone.

    Activations come from the best source there is, and the plan names it: `loss_fn` and `batch` are
    traced; a `transformer`, and the GPT that a bare number of parameters implies, go by
    Megatron-LM's formulas; shapes and `tokens_per_device` by what matrices keep.

    Args:
        params: the parameters as arrays or shapes; or their number.
        tx: the optimizer, not wrapped; its real state is counted.
        stage: 0 to 3.
        num_devices: devices, as JAX counts them, of `hardware`: a name ("h100") or a `Hardware`.
        precision: dtypes of the train step; a bare number is planned in bf16 with fp32 masters.
        num_shards: N; less than all devices is hybrid sharding: each group holds everything.
        model_axis: devices of model parallelism, which cut layers between them.
        loss_fn: `loss_fn(params, batch)`; `has_aux` as for `make_train_step`.
        batch: arrays or shapes of the global batch: all devices and microbatches together.
        transformer: the model by its numbers, in the place of `loss_fn`.
        tokens_per_device: tokens of a device's microbatch, where there is no `loss_fn`.
        accumulate: microbatches per step; `reduce` as for `make_train_step`.
        remat: "none", "dots" or "full"; None is as the traced model has it, and "full" elsewhere.
        partition_activations: Pa, cut checkpoints over the model axis (section 6.1).
        offload: to the host: "optimizer" (ZeRO-Offload), "activations" (Pa+cpu).
        specs: PartitionSpecs over the axis "model"; None cuts every matrix along its longer dim.
        rules: as for `make_layout`, like `min_size`.
        overlap: the share of communication taken to run beside computation, 0 to 1.

    Raises:
        ValueError: an option that can't be meant: what, and what is expected.
    """
    one = find_hardware(hardware)
    devices = share_out(num_devices, num_shards, model_axis)
    model = read_model(params, precision, transformer)
    step = Step(
        accumulate=as_count("accumulate", accumulate),
        reduce=_check_reduce(reduce, check_stage(stage)),
        partitions_activations=_check_pa(partition_activations, devices),
        offload=check_offload(offload),
        overlap=check_overlap(overlap),
    )
    load = Workload(loss_fn, batch, has_aux, tokens_per_device)
    demand, count = find_demand(model, load, devices, step, remat)
    layout = place(model.params, devices, stage=stage, specs=specs, rules=rules, min_size=min_size)
    states = layout.describe(tx, Recipe(precision=model.precision))
    return estimate(layout, states, devices, one, model.precision, demand, count, step)


@dataclasses.dataclass(frozen=True)
class Model:
    """What is planned.

    Attributes:
        params: shapes.
        precision: dtypes.
        transformer: its description, None where there is none.
        is_number: whether a number of parameters is all that is known.
    """

    params: PyTree
    precision: Precision
    transformer: Transformer | None
    is_number: bool


def read_model(
    params: PyTree | float, precision: Precision | None, transformer: Transformer | None
) -> Model:
    """Read parameters, or their number, which implies a GPT and mixed precision.

    Raises:
        ValueError: the number is no count, or there are no parameters.
    """
    if isinstance(params, numbers.Number):
        count = as_count("params", params)
        gpt = Transformer.of(count) if transformer is None else transformer
        shape = jax.ShapeDtypeStruct((count,), jnp.float32)
        return Model(shape, precision or mixed_precision(), gpt, transformer is None)
    if not jax.tree.leaves(params):
        raise ValueError("params hold no leaves; give a pytree of arrays or shapes, or a number")
    return Model(params, precision or Precision(), transformer, False)


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """What is known of what a device computes; the fields are arguments of `plan`."""

    loss_fn: LossFn | None
    batch: PyTree
    has_aux: bool
    tokens_per_device: float | None


def find_demand(
    model: Model, load: Workload, devices: Devices, step: Step, remat: Remat | None
) -> tuple[Demand, float]:
    """Find the best source of activations, and the units in a device's microbatch.

    Raises:
        ValueError: a loss without a batch, a batch that devices and microbatches don't divide, or
            two sources at once.
    """
    as_remat(remat)
    loss_fn, tokens_per_device = load.loss_fn, load.tokens_per_device
    if (loss_fn is None) != (load.batch is None):
        raise ValueError("give loss_fn and batch together: one is traced with the other's shapes")
    if loss_fn is not None:
        if tokens_per_device is not None or model.transformer is not None:
            raise ValueError(
                "loss_fn says what a device computes; leave tokens_per_device and transformer out, "
                "and give the parameters as shapes"
            )
        trace = trace_loss(
            loss_fn,
            model.params,
            load.batch,
            dtype=model.precision.params,
            remat=remat,
            has_aux=load.has_aux,
        )
        parts = devices.num_batch_parts * step.accumulate
        if trace.num_examples % parts:
            raise ValueError(
                f"the batch has {trace.num_examples} examples; {devices.num_batch_parts} devices "
                f"times {step.accumulate} microbatches need a multiple of {parts}"
            )
        return TracedLoss(trace), trace.num_examples // parts
    if model.transformer is not None:
        gpt = model.transformer
        tokens = gpt.context if tokens_per_device is None else tokens_per_device
        tokens = as_count("tokens_per_device", tokens)
        length = min(tokens, gpt.context)
        demand = DescribedGpt(gpt, remat or "full", length, model.is_number)
        return demand, tokens / length
    if tokens_per_device is not None:
        tokens = as_count("tokens_per_device", tokens_per_device)
        if remat == "dots":
            raise ValueError(
                "remat='dots' needs to know which products follow each other: give loss_fn and "
                "batch, or a transformer; shapes and tokens tell 'none' from 'full'"
            )
        dtype = model.precision.params
        leaf = jax.tree.leaves(model.params)[0]
        item = num_bytes((), leaf.dtype if dtype is None else dtype)
        return Matrices(recomputes=remat != "none", item_bytes=item), tokens
    return Unknown(), 1.0


def check_offload(offload: Sequence[Offload] | Offload) -> frozenset[str]:
    """Refuse what a plan can't move to the host."""
    names = frozenset((offload,) if isinstance(offload, str) else offload)
    if unknown := names - set(get_args(Offload)):
        raise ValueError(
            f"offload names {sorted(unknown)}; these can go to the host: "
            f"{', '.join(get_args(Offload))}"
        )
    return names


def _check_reduce(reduce: Any, stage: int) -> Reduce | None:
    if reduce not in (None, *get_args(Reduce)):
        raise ValueError(f"reduce must be 'once', 'each' or None, got {reduce!r}")
    if reduce == "once" and stage == 3:
        raise ValueError("reduce='once' needs a whole gradient on each device; stage 3 holds none")
    return reduce


def _check_pa(wanted: bool, devices: Devices) -> bool:
    if wanted and devices.model_axis == 1:
        raise ValueError(
            "partition_activations cuts checkpoints over the model axis, and model_axis is 1"
        )
    return wanted


def check_overlap(overlap: Any) -> float:
    """Refuse what is no share."""
    share = as_amount("overlap", overlap)
    if share > 1:
        raise ValueError(f"overlap is a share of communication, 0 to 1, got {overlap!r}")
    return share
