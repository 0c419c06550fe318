"""Hardware as plain data, and how long its links take for a collective."""

from zerojax.planner.hardware._hardware import Hardware
from zerojax.planner.hardware._links import Collective, Network, Seconds
from zerojax.planner.hardware._slice import torus_shape
from zerojax.planner.hardware._table import HARDWARE, find_hardware

__all__ = [
    "HARDWARE",
    "Collective",
    "Hardware",
    "Network",
    "Seconds",
    "find_hardware",
    "torus_shape",
]
