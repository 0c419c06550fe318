"""Model states by number: Psi parameters on N shards, Adam in mixed precision.

Where the formula meets a real model (leaves that no shard divides, other optimizers and dtypes) a
layout counts, or a plan.
"""

from collections.abc import Mapping

from zerojax._arguments import as_count
from zerojax.layout import STAGES, check_stage

#: Bytes of one parameter by kind; K is 12, an fp32 master and two fp32 moments.
MIXED_ADAM: Mapping[str, int] = {"parameter": 2, "gradient": 2, "optimizer": 12}


def model_state_bytes(num_params: float, *, stage: int, num_shards: int) -> float:
    """Return the bytes of model states per device: parameters, gradients, optimizer and master.

    They are (4+K) Psi at stage 0, 4 Psi + K Psi/N at 1, 2 Psi + (2+K) Psi/N at 2, (4+K) Psi/N at 3,
    with K = 12. Source: ZeRO, arXiv 1910.02054, section 5, figure 1 and table 1.

    Args:
        num_params: Psi, a whole number; a float such as 7.5e9 too.
        stage: 0 to 3.
        num_shards: N, the devices over which a stage partitions.

    Raises:
        ValueError: a count is not whole and positive, or no such stage.
    """
    num_params = as_count("num_params", num_params)
    num_shards = as_count("num_shards", num_shards)
    partitioned = STAGES[check_stage(stage)]
    return sum(
        width * num_params / (num_shards if kind in partitioned else 1)
        for kind, width in MIXED_ADAM.items()
    )
