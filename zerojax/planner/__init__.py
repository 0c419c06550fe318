"""Bytes, volume and time of a training step, from shapes alone."""

from zerojax.planner._choices import Choices
from zerojax.planner._choices import Space as Space
from zerojax.planner._formulas import Theory, host_theory, theory_of
from zerojax.planner._formulas import model_state_bytes as model_state_bytes
from zerojax.planner._links import Interconnect, Transfer
from zerojax.planner._plan import plan, search_plans
from zerojax.planner._report import Plan
from zerojax.planner._workload import Placement, Workload
