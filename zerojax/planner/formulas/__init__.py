"""The papers' arithmetic: model states, volumes, activations, the largest model that fits."""

from zerojax.planner.formulas._configurations import (
    CONFIGURATIONS,
    Configuration,
    find_configuration,
)
from zerojax.planner.formulas._largest import PAPER_USABLE, max_params, max_transformer
from zerojax.planner.formulas._states import (
    model_state_bytes,
    offload_traffic_bytes,
    ring_share,
    step_volume,
)
from zerojax.planner.formulas._transformer import ActivationBytes, Transformer
from zerojax.planner.formulas._volume import Theory, theory_of

__all__ = [
    "CONFIGURATIONS",
    "PAPER_USABLE",
    "ActivationBytes",
    "Configuration",
    "Theory",
    "Transformer",
    "find_configuration",
    "max_params",
    "max_transformer",
    "model_state_bytes",
    "offload_traffic_bytes",
    "ring_share",
    "step_volume",
    "theory_of",
]
