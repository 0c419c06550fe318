"""What a plan reads off a recipe, and what of a recipe it can't count."""

from __future__ import annotations

from zerojax.recipe import LAYER_INPUT, Recipe


def hosts_inputs(recipe: Recipe) -> bool:
    """Return whether layer inputs wait for the backward pass in the host's memory."""
    return recipe.remat is not None and LAYER_INPUT in recipe.remat.offload


def check_recipe(recipe: Recipe, model_axis: int) -> None:
    """Refuse what a plan can't count."""
    remat = recipe.remat
    if remat is None:
        return
    if remat.partition is not None and model_axis == 1:
        raise ValueError(
            f"RematPolicy(partition={remat.partition!r}) cuts checkpoints over the model axis, and "
            "model_axis is 1; give Placement(model_axis=...), or leave partition out"
        )
    if others := [name for name in remat.offload if name != LAYER_INPUT]:
        raise ValueError(
            f"RematPolicy(offload={others}): a plan moves layer inputs to the host and no other "
            f"values; give offload=({LAYER_INPUT!r},), or keep={tuple(others)}"
        )
