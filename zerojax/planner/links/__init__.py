"""How long the links between devices take for a collective."""

from zerojax.planner.links._network import Collective, Network, Seconds
from zerojax.planner.links._transfer import Interconnect, Transfer
