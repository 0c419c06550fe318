"""The arithmetic of ZeRO: model states, volume, traffic with the host.

Numbers in, numbers out. Psi is the number of parameters, N the number of shards. Where the formulas
meet a real model (leaves that no shard divides, optimizers other than Adam) a layout counts.

Sources: "ZeRO" arXiv 1910.02054, "ZeRO-Offload" arXiv 2101.06840.
"""

from __future__ import annotations

from collections.abc import Collection

from zerojax._types import Kind
from zerojax.layout import STAGES, check_stage
from zerojax.planner._arguments import as_amount, as_count

#: Bytes per parameter of the optimizer in mixed precision with Adam: fp32 master and two moments.
ADAM_BYTES = 12


def ring_share(num_shards: int) -> float:
    """Return (N-1)/N: what a device moves of a tensor that a ring gathers or reduce-scatters.

    Raises:
        ValueError: N is no count.
    """
    num_shards = as_count("num_shards", num_shards)
    return (num_shards - 1) / num_shards


def moved_per_param(kinds: Collection[Kind]) -> int:
    """Return the elements per parameter that a device moves in a step, in (N-1)/N.

    Gradients are reduced once. Parameters are gathered once, or, where they are partitioned, once
    for the forward and once for the backward pass. With nothing partitioned both together are an
    all-reduce. Source: ZeRO, section 7.

    Args:
        kinds: what is partitioned, as `STAGES` has it.
    """
    return 3 if "parameter" in kinds else 2


def model_state_bytes(
    num_params: float,
    *,
    stage: int,
    num_shards: int,
    optimizer_bytes_per_param: float = ADAM_BYTES,
    param_bytes: float = 2,
    grad_bytes: float = 2,
) -> float:
    """Return the bytes of model states per device: parameters, gradients, optimizer and master.

    With two bytes each for parameters and gradients: (4+K) Psi at stage 0, 4 Psi + K Psi/N at 1,
    2 Psi + (2+K) Psi/N at 2, (4+K) Psi/N at 3. Source: ZeRO, section 5, figure 1 and table 1.

    Args:
        num_params: Psi, a whole number; a float such as 7.5e9 too.
        stage: 0 to 3.
        num_shards: N, the devices over which a stage partitions.
        optimizer_bytes_per_param: K; the default is Adam in mixed precision: an fp32 master and two
            fp32 moments.
        param_bytes: bytes of a parameter that the loss reads.
        grad_bytes: bytes of a gradient; 0 where none is kept.

    Raises:
        ValueError: a count is not whole and positive, a width is negative, or no such stage.
    """
    num_params = as_count("num_params", num_params)
    num_shards = as_count("num_shards", num_shards)
    partitioned = STAGES[check_stage(stage)]
    widths: dict[Kind, float] = {
        "parameter": as_amount("param_bytes", param_bytes, above_zero=True),
        "gradient": as_amount("grad_bytes", grad_bytes),
        "optimizer": as_amount("optimizer_bytes_per_param", optimizer_bytes_per_param),
    }
    return sum(
        width * num_params / (num_shards if kind in partitioned else 1)
        for kind, width in widths.items()
    )


def step_volume(num_params: float, *, stage: int, num_shards: int) -> float:
    """Return the elements that a device moves per step: 2, 2, 2 and 3 Psi, times (N-1)/N.

    Source: ZeRO, section 7, for one microbatch.

    Raises:
        ValueError: a count is not whole and positive, or no such stage.
    """
    psi = as_count("num_params", num_params)
    return moved_per_param(STAGES[check_stage(stage)]) * psi * ring_share(num_shards)


def offload_traffic_bytes(num_params: float, *, num_shards: int = 1) -> float:
    """Return the bytes between a device and its host per step, optimizer on the host: 4 Psi / N.

    Two bytes a parameter for gradients on their way down and two for updated parameters on their
    way up: the least of all ways to cut Adam between the two. Source: ZeRO-Offload, section 3.

    Raises:
        ValueError: a count is not whole and positive.
    """
    return 4 * as_count("num_params", num_params) / as_count("num_shards", num_shards)
