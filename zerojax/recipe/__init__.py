"""How a step is computed: frozen policies, each checked when it is made."""

from zerojax.recipe._policies import (
    HOST_MEMORY,
    LAYER_INPUT,
    PRECISIONS,
    DynamicLossScale,
    Precision,
    Remat,
    RematPolicy,
    as_remat,
)
from zerojax.recipe._recipe import Recipe, Reduce, as_recipe
