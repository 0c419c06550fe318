"""The text of compiled programs as records; it knows nothing of ZeRO."""

from zerojax.hlo._collectives import Collective, Collectives, parse_collectives, sum_moved
from zerojax.hlo._groups import Groups, mesh_axes
from zerojax.hlo._module import parse_module
from zerojax.hlo._walk import Loop

__all__ = [
    "Collective",
    "Collectives",
    "Groups",
    "Loop",
    "mesh_axes",
    "parse_collectives",
    "parse_module",
    "sum_moved",
]
