"""The combinations of ZeRO-DP and ZeRO-R that the paper measures: C1 to C5.

Source: arXiv 1910.02054, table 3 and figure 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from zerojax.recipe import LAYER_INPUT, RematPolicy


@dataclass(frozen=True)
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


def find_configuration(configuration: str | Configuration) -> Configuration:
    """Return the configuration of that name, or the one given.

    Raises:
        ValueError: no configuration has that name; the message lists those known.
    """
    if isinstance(configuration, Configuration):
        return configuration
    if configuration not in CONFIGURATIONS:
        known = ", ".join(CONFIGURATIONS)
        raise ValueError(f"no configuration named {configuration!r}; known: {known}")
    return CONFIGURATIONS[configuration]
