"""C1 to C5, the combinations of ZeRO-DP and ZeRO-R that the paper measures, and what memory holds.

Source: arXiv 1910.02054, tables 2 and 3 and figure 6, for any hardware.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from zerojax.planner._arguments import as_amount, as_count
from zerojax.planner.formulas._states import MIXED_ADAM, BytesPerParam, model_state_bytes
from zerojax.planner.hardware import Hardware, find_hardware
from zerojax.recipe import LAYER_INPUT, RematPolicy


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Choose what is partitioned and where activation checkpoints lie.

    All five have constant-size buffers (CB) and no fragmentation (MD) as well. Under XLA the first
    is `Recipe(bucket_bytes=)`, and the second holds for every step: buffers are assigned before it
    runs.
    """

    stage: int  # the ZeRO stage
    partitioned_checkpoints: bool = False  # Pa: checkpoints are partitioned over the model axis
    #: the `+cpu` of Pa+cpu: checkpoints lie in the host's memory
    offloaded_checkpoints: bool = False
    #: the largest model that the paper trained with it, in parameters; None where it does not say
    reported_params: float | None = None

    def remat(self, model_axis: str) -> RematPolicy:
        """Return the policy of a recipe; Pa partitions checkpoints over the mesh axis."""
        return RematPolicy(
            partition=model_axis if self.partitioned_checkpoints else None,
            offload=(LAYER_INPUT,) if self.offloaded_checkpoints else (),
        )


#: The paper's five, each with the largest model of figure 6: a model axis of 16 and a fixed batch.
#: That of C3 is read off the figure; the text names the others.
CONFIGURATIONS: Mapping[str, Configuration] = MappingProxyType(
    {
        "C1": Configuration(1, reported_params=40e9),
        "C2": Configuration(1, partitioned_checkpoints=True, reported_params=60e9),
        "C3": Configuration(2, reported_params=50e9),
        "C4": Configuration(2, partitioned_checkpoints=True, reported_params=140e9),
        "C5": Configuration(
            2, partitioned_checkpoints=True, offloaded_checkpoints=True, reported_params=150e9
        ),
    }
)


def max_params(
    memory: float | str | Hardware,
    *,
    stage: int,
    num_shards: int,
    model_axis: int = 1,
    bytes_per_param: BytesPerParam = MIXED_ADAM,
) -> int:
    """Return the most parameters whose model states fit, activations left out.

    Source: arXiv 1910.02054, table 2, its theoretical half (32 GB, N = 64); its runs reached 82% of
    the memory, the rest were buffers and fragments.

    Args:
        memory: bytes of one device, or hardware, or its name.
        stage, num_shards, bytes_per_param: as for `model_state_bytes`.
        model_axis: devices over which model parallelism cuts every parameter.

    Raises:
        ValueError: as `model_state_bytes` does, or not one parameter fits.
    """
    if isinstance(memory, str | Hardware):
        memory = find_hardware(memory).memory
    limit = as_amount("memory", memory, above_zero=True)
    one = model_state_bytes(1, stage=stage, num_shards=num_shards, bytes_per_param=bytes_per_param)
    each = one / as_count("model_axis", model_axis)
    if limit < each:
        raise ValueError(f"{limit:g} bytes hold no parameter; one takes {each:g}")
    return int(limit / each)
