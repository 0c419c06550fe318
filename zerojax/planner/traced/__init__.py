"""A loss traced on shapes: its operations, what lies in memory when, products and traffic."""

from zerojax.planner.traced._peak import peak_of
from zerojax.planner.traced._simulation import HeldLeaf, Sharing, Simulation
from zerojax.planner.traced._trace import Trace, trace_loss
from zerojax.planner.traced._work import Work, work_of

__all__ = [
    "HeldLeaf",
    "Sharing",
    "Simulation",
    "Trace",
    "Work",
    "peak_of",
    "trace_loss",
    "work_of",
]
