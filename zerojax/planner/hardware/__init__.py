"""Hardware as plain data, and how long its links take for a collective."""

from zerojax.planner.hardware._hardware import HARDWARE, Hardware, find_hardware
from zerojax.planner.hardware._links import Collective, Network, Seconds
from zerojax.planner.hardware._transfer import Interconnect, Transfer
