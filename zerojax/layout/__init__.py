"""Where every leaf lives: decided once, from shapes and a mesh, as plain data."""

from zerojax.layout._describe import Description
from zerojax.layout._layout import MIN_SIZE, Layout, make_layout
from zerojax.layout._leaf import Entries, LeafLayout, as_spec
from zerojax.layout._mesh import make_mesh
from zerojax.layout._optimizer import OptimizerLayout
from zerojax.layout._rule import Rule
from zerojax.layout._stacked import stacked_rules
from zerojax.layout._stages import STAGES
from zerojax.layout._torus import DIMS, SPANS, Phases, in_order

__all__ = [
    "DIMS",
    "MIN_SIZE",
    "SPANS",
    "STAGES",
    "Description",
    "Entries",
    "Layout",
    "LeafLayout",
    "OptimizerLayout",
    "Phases",
    "Rule",
    "as_spec",
    "in_order",
    "make_layout",
    "make_mesh",
    "stacked_rules",
]
