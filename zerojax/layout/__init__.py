"""Where every leaf lives: decided once, from shapes and a mesh, as plain data."""

from zerojax.layout._describe import Description
from zerojax.layout._layout import MIN_SIZE, Layout, make_layout
from zerojax.layout._leaf import LeafLayout
from zerojax.layout._mesh import make_mesh
from zerojax.layout._optimizer import OptimizerLayout
from zerojax.layout._rule import Rule
from zerojax.layout._stages import STAGES
from zerojax.layout._torus import DIMS, SPANS, Phases, in_order

__all__ = [
    "DIMS",
    "MIN_SIZE",
    "SPANS",
    "STAGES",
    "Description",
    "Layout",
    "LeafLayout",
    "OptimizerLayout",
    "Phases",
    "Rule",
    "in_order",
    "make_layout",
    "make_mesh",
]
