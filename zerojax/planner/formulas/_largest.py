"""The largest model that memory holds: the paper's table 2 and figure 6, for any hardware."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

from zerojax.planner._arguments import as_amount, as_count
from zerojax.planner.formulas._configurations import Configuration, find_configuration
from zerojax.planner.formulas._states import ADAM_BYTES, model_state_bytes
from zerojax.planner.formulas._transformer import FAMILY, Transformer
from zerojax.planner.hardware import Hardware, find_hardware

#: What the paper's own runs reached of the memory that its formulas fill: at stage 1, measured over
#: theoretical size is 0.82 in all rows of table 2. The rest were buffers and fragments.
PAPER_USABLE = 0.82
#: More layers than any memory holds.
_MANY_LAYERS = 2**40


def memory_bytes(memory: float | str | Hardware) -> float:
    """Return the bytes of one device: those given, or those of hardware or its name.

    Raises:
        ValueError: bytes that are not above 0, or hardware that is unknown.
    """
    if isinstance(memory, str | Hardware):
        return float(find_hardware(memory).memory)
    return as_amount("memory", memory, above_zero=True)


def max_params(
    memory: float | str | Hardware,
    *,
    stage: int,
    num_shards: int,
    model_axis: int = 1,
    optimizer_bytes_per_param: float = ADAM_BYTES,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> int:
    """Return the most parameters whose model states fit, activations left out.

    Memory over the bytes that a parameter takes on a device, times the model axis. Source: arXiv
    1910.02054, table 2, its theoretical half (32 GB, N = 64); its runs reached `PAPER_USABLE` of
    the memory.

    Args:
        memory: bytes of one device, or hardware, or its name.
        stage: 0 to 3.
        num_shards: N; devices are N times the model axis.
        model_axis: devices over which model parallelism cuts every parameter.
        optimizer_bytes_per_param: K.
        param_bytes: bytes of a parameter that the loss reads.
        grad_bytes: bytes of a gradient.

    Raises:
        ValueError: a count is not whole and positive, or not one parameter fits.
    """
    limit = memory_bytes(memory)
    each = model_state_bytes(
        1,
        stage=stage,
        num_shards=num_shards,
        optimizer_bytes_per_param=optimizer_bytes_per_param,
        param_bytes=param_bytes,
        grad_bytes=grad_bytes,
    ) / as_count("model_axis", model_axis)
    if limit < each:
        raise ValueError(f"{limit:g} bytes hold no parameter; one takes {each:g}")
    return int(limit / each)


def max_transformer(
    memory: float | str | Hardware,
    configuration: str | Configuration,
    *,
    num_shards: int,
    batch: int,
    model_axis: int = 1,
    num_tokens: int | None = None,
    like: Transformer | None = None,
    bytes_per_param: tuple[float, float, float] = (2, 2, ADAM_BYTES),
) -> Transformer:
    """Return the largest GPT that fits with the activations of a fixed batch.

    Each layer is computed again from its input, as in the paper. Source: arXiv 1910.02054, figure 6
    (V100 32 GB, a model axis of 16).

    Args:
        memory: bytes of one device, or hardware, or its name; for hardware, offloaded checkpoints
            have to fit in its host's memory.
        configuration: C1 to C5, or one of your own.
        num_shards: N; devices are N times the model axis.
        batch: sequences in the microbatch of a device, or of its group along the model axis.
        model_axis: devices over which model parallelism cuts every parameter.
        num_tokens: tokens in a sequence; None is the context.
        like: a GPT whose number of layers is the only thing to change, as the paper varies it at
            a width of 8192; None looks among all that `Transformer.of` gives.
        bytes_per_param: bytes of a parameter, of its gradient, and K.

    Raises:
        ValueError: a count is not whole and positive, hardware or configuration is unknown, or
            the smallest of these GPTs does not fit; the message says what it takes.
    """
    limit, host_limit = memory_bytes(memory), _host_bytes(memory)
    choice = find_configuration(configuration)
    model_axis = as_count("model_axis", model_axis)
    of_param, of_gradient, of_optimizer = bytes_per_param

    def taken(model: Transformer) -> tuple[float, float]:  # on the device, on the host
        activations = model.activation_bytes(
            batch,
            num_tokens=num_tokens,
            model_axis=model_axis,
            partitioned=choice.partitioned_checkpoints,
            offloaded=choice.offloaded_checkpoints,
        )
        states = model_state_bytes(
            model.num_params,
            stage=choice.stage,
            num_shards=num_shards,
            optimizer_bytes_per_param=of_optimizer,
            param_bytes=of_param,
            grad_bytes=of_gradient,
        )
        return states / model_axis + activations.total, activations.host

    def fits(model: Transformer) -> bool:
        device, host = taken(model)
        return device <= limit and host <= host_limit

    ranges = _family_ranges() if like is None else [(like, 1, None)]
    for member, least, most in ranges:
        layers = _most_layers(member, most, fits)
        if layers >= least:
            return dataclasses.replace(member, num_layers=layers)
    smallest = dataclasses.replace(ranges[-1][0], num_layers=1)
    raise ValueError(_shortage(smallest, *taken(smallest), limit, host_limit))


def _shortage(
    smallest: Transformer, device: float, host: float, limit: float, host_limit: float
) -> str:
    where, room, taken = "of the device's", limit, device
    if device <= limit:
        where, room, taken = "of the host's", host_limit, host
    return (
        f"no GPT fits in {room:g} {where} bytes: the smallest, of {smallest.num_params:,} "
        f"parameters, takes {math.ceil(taken):,}; give more memory or shards, or a smaller batch"
    )


def _host_bytes(memory: float | str | Hardware) -> float:
    if isinstance(memory, str | Hardware):
        return float(find_hardware(memory).host_memory)
    return math.inf


def _family_ranges() -> list[tuple[Transformer, int, int | None]]:
    """List each width's GPT with the fewest and most layers that FAMILY has it at; widest first."""
    ranges: list[tuple[Transformer, int, int | None]] = []
    below = 0.0
    for i, member in enumerate(FAMILY):
        wider = FAMILY[i + 1] if i + 1 < len(FAMILY) else None
        if wider is not None and wider.width == member.width:
            continue
        most = None
        end = math.inf
        if wider is not None:  # halfway between the two, by ratio, as Transformer.of decides
            end = math.sqrt(member.num_params * wider.num_params)
            most = math.floor((end - member.end_params) / member.layer_params)
        least = max(1, math.ceil((below - member.end_params) / member.layer_params))
        ranges.append((member, least, most))
        below = end
    return ranges[::-1]


def _most_layers(member: Transformer, most: int | None, fits: Callable[[Transformer], bool]) -> int:
    """Find the most layers that fit, at most `most`; 0 where one does not fit."""

    def is_too_large(layers: int) -> bool:
        return not fits(dataclasses.replace(member, num_layers=layers))

    counts = range(1, 1 + (_MANY_LAYERS if most is None else most))
    return bisect.bisect_left(counts, True, key=is_too_large)
