"""Bytes, volume and time of a training step, from shapes alone."""

from zerojax.planner._choices import Choices, Space
from zerojax.planner._formulas import Theory, model_state_bytes, theory_of
from zerojax.planner._plan import plan, search_plans
from zerojax.planner._report import Plan, PlannedBytes
from zerojax.planner._time import StepTime
from zerojax.planner._workload import Placement, Workload
from zerojax.planner.hardware import HARDWARE, Hardware, Places, Transfer, find_hardware

__all__ = [
    "HARDWARE",
    "Choices",
    "Hardware",
    "Placement",
    "Places",
    "Plan",
    "PlannedBytes",
    "Space",
    "StepTime",
    "Theory",
    "Transfer",
    "Workload",
    "find_hardware",
    "model_state_bytes",
    "plan",
    "search_plans",
    "theory_of",
]
