"""Plans, reports and layouts as matplotlib figures, for notebooks, documents and commands."""

from zerojax.charts._bars import Bar, bytes_of, write
from zerojax.charts._figures import compare, pareto, schedule, training

__all__ = ["Bar", "bytes_of", "compare", "pareto", "schedule", "training", "write"]
