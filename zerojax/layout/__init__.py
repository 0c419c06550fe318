"""Where every leaf lives: decided once, from shapes and a mesh, as plain data."""

from zerojax.layout._describe import PLURALS, Description
from zerojax.layout._layout import MIN_SIZE, Layout, check_layout, make_layout
from zerojax.layout._leaf import Entries, LeafLayout, Placed, Rule, as_entries, as_spec
from zerojax.layout._mesh import check_axes, make_mesh
from zerojax.layout._optimizer import WRAPPED, OptimizerLayout, as_transformation, optimizer_leaves
from zerojax.layout._stages import STAGES, check_stage
from zerojax.layout._torus import (
    DIMS,
    Phases,
    fills_tiles,
    find_phases,
    in_order,
    place_along,
    scattered_size,
)
