"""How a step is computed: frozen policies, each checked when it is made."""

from zerojax.recipe._precision import PRECISIONS, DynamicLossScale, Precision
from zerojax.recipe._recipe import Recipe, Reduce, as_recipe
from zerojax.recipe._remat import HOST_MEMORY, LAYER_INPUT, Remat, RematPolicy, as_remat

__all__ = [
    "HOST_MEMORY",
    "LAYER_INPUT",
    "PRECISIONS",
    "DynamicLossScale",
    "Precision",
    "Recipe",
    "Reduce",
    "Remat",
    "RematPolicy",
    "as_recipe",
    "as_remat",
]
