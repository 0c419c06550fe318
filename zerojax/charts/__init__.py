"""Plans, reports and layouts as matplotlib figures, for notebooks, documents and commands."""

from zerojax.charts._figures import Bar, bytes_of, compare, pareto, schedule, training, write

__all__ = ["Bar", "bytes_of", "compare", "pareto", "schedule", "training", "write"]
