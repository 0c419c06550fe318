"""What a run takes of its devices, where they say."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax

from zerojax.models import gpt
from zerojax.planner import find_hardware


def measure(
    config: gpt.Config, devices: Sequence[Any], precision: str, tokens_per_second: float
) -> dict[str, float]:
    """Return the model's share of the peak FLOP/s (`mfu`) and the largest peak of memory.

    A token takes 6 N + 12 L D T FLOP (PaLM, arXiv 2204.02311, appendix B), whatever is recomputed.
    The peak is the data sheet's, of bf16 or of fp32 as JAX multiplies. What is unknown is left out.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(ValueError):  # hardware that is not in the table
        hardware = find_hardware(devices[0].device_kind)
        rate = hardware.flops_fp32 if precision == "fp32" else hardware.flops
        attention = 12 * config.num_layers * config.width * config.context
        flops = 6 * gpt.num_params(config) + attention
        found["mfu"] = round(tokens_per_second * flops / (rate * len(devices)), 4)
    stats = [
        one.memory_stats() or {} for one in devices if one.process_index == jax.process_index()
    ]
    if peaks := [one["peak_bytes_in_use"] for one in stats if "peak_bytes_in_use" in one]:
        found["peak_bytes"] = max(peaks)
    return found
