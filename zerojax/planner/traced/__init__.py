"""A loss traced on shapes: its operations, what lies in memory when, products and traffic."""

from zerojax.planner.traced._lifetimes import lifetimes_of
from zerojax.planner.traced._operations import Operations
from zerojax.planner.traced._peak import HeldLeaf, Sharing, checkpoint_bytes, peak_of
from zerojax.planner.traced._reader import read_operations
from zerojax.planner.traced._work import Work, work_of
