"""Model states by number: Psi parameters, N shards, some bytes for each parameter.

Where the formula meets a real model (leaves that no shard divides, other optimizers) a layout
counts. Source: "ZeRO" arXiv 1910.02054.
"""

from __future__ import annotations

import dataclasses

from zerojax._arguments import as_amount, as_count
from zerojax.layout import STAGES, check_stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class BytesPerParam:
    """Count the bytes of one parameter; the defaults are Adam in mixed precision.

    Raises:
        ValueError: a figure is negative or not finite, or a parameter takes nothing.
    """

    parameter: float = 2  # what the loss reads
    gradient: float = 2  # 0 where none is kept
    optimizer: float = 12  # K, masters included: an fp32 master and two fp32 moments are 12

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            as_amount(f"BytesPerParam: {name}", value, above_zero=name == "parameter")


#: Adam in mixed precision.
MIXED_ADAM = BytesPerParam()


def model_state_bytes(
    num_params: float, *, stage: int, num_shards: int, bytes_per_param: BytesPerParam = MIXED_ADAM
) -> float:
    """Return the bytes of model states per device: parameters, gradients, optimizer and master.

    With two bytes each for parameters and gradients: (4+K) Psi at stage 0, 4 Psi + K Psi/N at 1,
    2 Psi + (2+K) Psi/N at 2, (4+K) Psi/N at 3. Source: ZeRO, section 5, figure 1 and table 1.

    Args:
        num_params: Psi, a whole number; a float such as 7.5e9 too.
        stage: 0 to 3.
        num_shards: N, the devices over which a stage partitions.
        bytes_per_param: of parameter, gradient and optimizer.

    Raises:
        ValueError: a count is not whole and positive, or no such stage.
    """
    num_params = as_count("num_params", num_params)
    num_shards = as_count("num_shards", num_shards)
    partitioned = STAGES[check_stage(stage)]
    return sum(
        width * num_params / (num_shards if kind in partitioned else 1)
        for kind, width in dataclasses.asdict(bytes_per_param).items()
    )
