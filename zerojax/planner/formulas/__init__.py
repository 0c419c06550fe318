"""The paper's arithmetic: model states and volumes."""

from zerojax.planner.formulas._states import model_state_bytes
from zerojax.planner.formulas._volume import Theory, ring_share, theory_of

__all__ = ["Theory", "model_state_bytes", "ring_share", "theory_of"]
