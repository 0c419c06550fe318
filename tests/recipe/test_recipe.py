"""A recipe is plain data: checked when it is made, equal by value, to and from JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from zerojax.recipe import PRECISIONS, Recipe, as_recipe

RECIPES = (
    Recipe(),
    *(Recipe(precision=name) for name in PRECISIONS),
    Recipe(accumulate=4, reduce="once", clip_norm=1.0, bucket_bytes=2**20),
    Recipe(remat="dots"),
    Recipe(reshard_after_forward=False),
    Recipe(
        precision=zerojax.Precision(params=jnp.bfloat16, master=jnp.float32, reduce=jnp.float32),
        remat=zerojax.RematPolicy(keep=("a",), offload=("layer_input",), partition="model"),
        offload=True,
    ),
)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_written_as_json(recipe):
    read = json.loads(json.dumps(recipe.to_dict()))
    assert read.keys() == {field.name for field in dataclasses.fields(recipe)}


def test_names_stand_for_policies():
    mixed = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
    assert Recipe(precision="bf16") == Recipe(precision=mixed)
    assert Recipe(remat="full") == Recipe(remat=zerojax.RematPolicy())
    assert Recipe(precision="fp16").precision.loss_scale == zerojax.DynamicLossScale()
    assert as_recipe(None) == Recipe() == Recipe(precision="fp32")
    assert len(set(RECIPES)) == len(RECIPES) - 1  # "fp32" is the default


def test_a_recipe_can_not_be_changed_but_replaced():
    recipe: Any = Recipe(precision="bf16", accumulate=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.accumulate = 4
    assert dataclasses.replace(recipe, accumulate=4) == Recipe(precision="bf16", accumulate=4)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"accumulate": 0}, "accumulate must be a whole number of at least 1, got 0"),
        ({"accumulate": 1.5}, "accumulate"),
        ({"accumulate": True}, "accumulate"),
        ({"clip_norm": 0.0}, "clip_norm must be a finite number above 0"),
        ({"clip_norm": "1"}, "clip_norm must be a finite number above 0"),
        ({"reduce": "twice"}, "'once', 'each'"),
        ({"bucket_bytes": -1}, "bucket_bytes"),
        ({"precision": "bfloat16"}, "fp32, bf16, fp16"),
        ({"remat": "most"}, "none, dots, full"),
        ({"offload": "optimizer"}, "offload must be True or False"),
        ({"reshard_after_forward": None}, "reshard_after_forward must be True or False"),
        ({"clip_norm": True}, "clip_norm must be a finite number above 0"),
        ({"precision": {}}, "fp32, bf16, fp16"),
    ],
)
def test_what_can_not_be_meant_is_refused(given, match):
    with pytest.raises(ValueError, match=match):
        Recipe(**given)


def test_a_precision_takes_floating_dtypes_only():
    with pytest.raises(ValueError, match=r"Precision\.params needs a floating dtype, got int8"):
        zerojax.Precision(params=jnp.int8)
    with pytest.raises(ValueError, match=r"Precision\.master needs a dtype"):
        zerojax.Precision(master="no such")


def test_numbers_of_numpy_are_plain_numbers():
    numbers: Any = {"clip_norm": np.float32(1), "accumulate": np.int64(2)}
    recipe = Recipe(**numbers)
    assert recipe == Recipe(clip_norm=1.0, accumulate=2)
    assert json.dumps(recipe.to_dict()) == json.dumps(Recipe(clip_norm=1.0, accumulate=2).to_dict())


@pytest.mark.parametrize(
    ("policy", "given", "match"),
    [
        (zerojax.RematPolicy, {"keep": None}, "keep must be a tuple of names"),
        (zerojax.RematPolicy, {"partition": ("data",)}, "partition must name one mesh axis"),
    ],
)
def test_policies_of_the_wrong_type_are_refused(policy, given, match):
    with pytest.raises(ValueError, match=match):
        policy(**given)


def test_what_is_no_recipe_is_refused():
    precision: Any = zerojax.Precision()
    with pytest.raises(TypeError, match="a Recipe is expected, got Precision"):
        as_recipe(precision)


@pytest.mark.parametrize("kinds", [(), ("optimizer", "master")])
def test_several_microbatches_are_reduced_once_where_gradients_stay_whole(kinds):
    assert Recipe(accumulate=2).reduction(kinds) == "once"
    assert Recipe().reduction(kinds) == "each"
    assert Recipe(accumulate=2, reduce="each").reduction(kinds) == "each"
    assert Recipe(accumulate=2).reduction((*kinds, "gradient")) == "each"


def test_once_is_refused_where_parameters_are_partitioned():
    with pytest.raises(ValueError, match="stage 3 never holds one"):
        Recipe(reduce="once").reduction(("parameter", "gradient", "optimizer", "master"))


@pytest.mark.parametrize("kinds", [(), ("optimizer", "gradient")])
def test_weights_that_are_whole_can_not_be_kept_gathered(kinds):
    assert not Recipe().keeps_gathered(kinds)
    assert Recipe(reduce="once", prefetch=0).fits(kinds)
    assert not Recipe(reduce="once").fits((*kinds, "parameter"))
    gather = zerojax.Precision(gather="int8")
    for chosen in ({"prefetch": 1}, {"reshard_after_forward": False}, {"precision": gather}):
        assert Recipe(**chosen).fits((*kinds, "parameter")) > Recipe(**chosen).fits(kinds)
    assert Recipe(reshard_after_forward=False).keeps_gathered((*kinds, "parameter"))
    with pytest.raises(ValueError, match="has them whole; use stage 3"):
        Recipe(reshard_after_forward=False).keeps_gathered(kinds)
