"""Bytes, volume and time of a training step, from shapes alone."""

from zerojax.memory import rematerialised
from zerojax.planner._choices import Choices, Rejected, Verified
from zerojax.planner._configurations import CONFIGURATIONS, Configuration, find_configuration
from zerojax.planner._counts import as_amount, as_count
from zerojax.planner._formulas import model_state_bytes, offload_traffic_bytes, step_volume
from zerojax.planner._hardware import HARDWARE, Hardware, find_hardware
from zerojax.planner._largest import PAPER_USABLE, max_params, max_transformer
from zerojax.planner._links import Network
from zerojax.planner._plan import plan
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._search import Space, search
from zerojax.planner._slice import torus_shape
from zerojax.planner._sweep import sweep
from zerojax.planner._time import StepTime
from zerojax.planner._transformer import Transformer
from zerojax.planner._volume import Reduce, Theory, theory_of

__all__ = [
    "CONFIGURATIONS",
    "HARDWARE",
    "PAPER_USABLE",
    "Choices",
    "Configuration",
    "Hardware",
    "Network",
    "Plan",
    "PlannedBytes",
    "Reduce",
    "Rejected",
    "Space",
    "StepTime",
    "Theory",
    "Transformer",
    "Verified",
    "as_amount",
    "as_count",
    "find_configuration",
    "find_hardware",
    "max_params",
    "max_transformer",
    "model_state_bytes",
    "offload_traffic_bytes",
    "plan",
    "rematerialised",
    "search",
    "step_volume",
    "sweep",
    "theory_of",
    "torus_shape",
]
