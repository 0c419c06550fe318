"""The text of compiled programs as records; it knows nothing of ZeRO."""

from zerojax.hlo._collectives import Collective, Collectives, Groups, mesh_axes, sum_moved
from zerojax.hlo._memory import Result, find_host_moves, largest_results, most_alive, operand_of
from zerojax.hlo._module import Module, element_bits, parse_module
from zerojax.hlo._parse import is_collective, parse_collectives
from zerojax.hlo._schedule import Cost, Operation, parse_schedule
from zerojax.hlo._values import HANDS_ON, Frame, Value, arguments_of, source_of, uses_of
from zerojax.hlo._walk import Carry, Loop, find_carries
