"""The stages over numbers of devices and networks, all from one reading of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zerojax import planner
from zerojax.cli.plan._request import PlanQuestion
from zerojax.planner import Hardware, Plan

#: The largest number of devices is the first power of two from here on that is four times as many
#: as were asked for.
AT_LEAST = 1024


def counts_of(question: PlanQuestion) -> list[int]:
    """List numbers of devices: powers of two times what has to divide them."""
    options = question.options
    counts = [question.model_axis * (options.shards or 1)]
    while counts[-1] < max(AT_LEAST, 4 * options.devices):
        counts.append(2 * counts[-1])
    return counts


def slower(hardware: Hardware, factor: float) -> Hardware:
    """Give hardware whose links, fast and slow, bring so many times less."""
    return dataclasses.replace(
        hardware,
        link_bandwidth=hardware.link_bandwidth / factor,
        chip_bandwidth=hardware.chip_bandwidth / factor,
        slow_bandwidth=hardware.slow_bandwidth / factor,
    )


def sweep(
    question: PlanQuestion, counts: Sequence[int], networks: Sequence[Hardware]
) -> list[dict[int, list[Plan]]]:
    """Plan all stages for every number of devices; for each network, by stage."""
    options = question.options
    return planner.sweep(
        question.params,
        question.tx,
        num_devices=counts,
        hardware=networks,
        precision=question.precision,
        num_shards=options.shards,
        model_axis=question.model_axis,
        loss_fn=question.loss_fn,
        batch=question.batch(options.batch),
        transformer=question.told,
        tokens_per_device=None if question.loss_fn else options.batch * question.context,
        accumulate=options.accumulate,
        reduce=options.reduce,  # pyright: ignore[reportArgumentType]
        remat=question.remat,
        offload=options.offload,  # pyright: ignore[reportArgumentType]
    )
