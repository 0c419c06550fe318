"""Hardware as plain data, and how long its links take for a collective."""

from zerojax.planner.hardware._hardware import HARDWARE, Hardware, find_hardware
from zerojax.planner.hardware._links import Collective, Network, Seconds
from zerojax.planner.hardware._slice import torus_shape
from zerojax.planner.hardware._transfer import Place, Transfer, permute_of, transfer_of

__all__ = [
    "HARDWARE",
    "Collective",
    "Hardware",
    "Network",
    "Place",
    "Seconds",
    "Transfer",
    "find_hardware",
    "permute_of",
    "torus_shape",
    "transfer_of",
]
