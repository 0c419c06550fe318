"""The paper's arithmetic: model states and volumes."""

from zerojax.planner.formulas._states import BytesPerParam, model_state_bytes
from zerojax.planner.formulas._volume import Theory, ring_share, theory_of

__all__ = ["BytesPerParam", "Theory", "model_state_bytes", "ring_share", "theory_of"]
