"""Chips as plain data: what one computes, holds and moves, and what its collectives may span."""

from zerojax.hardware._hardware import HARDWARE as HARDWARE
from zerojax.hardware._hardware import Hardware, find_hardware, hardware_of
