"""How bytes move: gathers, reductions, and when they happen."""

from zerojax.collectives._options import OPTIONS
from zerojax.collectives._options import compiler_options as compiler_options
from zerojax.collectives.gathers import gather_where_used
