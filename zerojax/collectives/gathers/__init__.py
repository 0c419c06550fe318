"""A loss run again, with each weight gathered where it is used."""

from zerojax.collectives.gathers._boxed import REDUCED, makes_gathered
from zerojax.collectives.gathers._gather import gather_where_used, gathering
