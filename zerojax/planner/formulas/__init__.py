"""The papers' arithmetic: model states, volumes, activations, the largest model that fits."""

from zerojax.planner.formulas._configurations import (
    CONFIGURATIONS,
    Configuration,
    max_params,
)
from zerojax.planner.formulas._states import BytesPerParam, model_state_bytes
from zerojax.planner.formulas._transformer import ActivationBytes, Transformer
from zerojax.planner.formulas._volume import Theory, ring_share, theory_of

__all__ = [
    "CONFIGURATIONS",
    "ActivationBytes",
    "BytesPerParam",
    "Configuration",
    "Theory",
    "Transformer",
    "max_params",
    "model_state_bytes",
    "ring_share",
    "theory_of",
]
