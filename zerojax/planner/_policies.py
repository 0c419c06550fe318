"""What a plan reads off a recipe, and what of a recipe it can't count."""

from __future__ import annotations

import dataclasses

from zerojax.recipe import LAYER_INPUT, OffloadKind, Recipe, RematPolicy


def remat_of(recipe: Recipe) -> RematPolicy | None:
    """Return what is rematerialised; an offload of activations is one of every layer's input."""
    offload, remat = recipe.offload, recipe.remat
    if offload is None or "activation" not in offload.kinds:
        return remat
    remat = remat or RematPolicy()
    if remat.recompute == "none":
        raise ValueError(
            "OffloadPolicy.kinds names 'activation', and remat='none' keeps no checkpoints to "
            "move; give remat='full' or 'dots'"
        )
    return dataclasses.replace(remat, offload=tuple({*remat.offload, LAYER_INPUT}))


def hosts_states(recipe: Recipe) -> bool:
    """Return whether optimizer states, and masters with them, live in the host's memory."""
    wanted = () if recipe.offload is None else recipe.offload.kinds
    states = {"optimizer"} if recipe.precision.master is None else {"optimizer", "master"}
    hosted = states.intersection(wanted)
    if hosted and hosted != states:
        raise ValueError(
            f"a plan moves optimizer states and masters to the host together, and "
            f"OffloadPolicy.kinds names {hosted.pop()!r} alone; give kinds=('optimizer', 'master')"
        )
    return bool(hosted)


def check_recipe(recipe: Recipe, model_axis: int) -> None:
    """Refuse what a plan can't count."""
    hosts_states(recipe)
    remat = remat_of(recipe)
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


def offloaded(recipe: Recipe) -> tuple[OffloadKind, ...]:
    """Return what the host keeps: "activation", "optimizer" (masters go with it), both or none."""
    remat = remat_of(recipe)
    moves = remat is not None and LAYER_INPUT in remat.offload
    return ("activation",) * moves + ("optimizer",) * hosts_states(recipe)
