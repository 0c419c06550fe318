"""What can be wrong with a compiled step: a table of small functions, one per kind of problem."""

from zerojax.audit.checks._table import CHECKS, NOTES, find_problems
from zerojax.audit.checks._traffic import EXPOSED
