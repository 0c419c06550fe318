"""A state that was made under another layout is refused before anything is written."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax._tree import unwrapped
from zerojax.checkpoint import Checkpoints, IncompatibleCheckpointError, restore, save


def init(key, name="w"):
    return {name: jax.random.normal(key, (1009, 7)), "even": jnp.ones((64, 32))}


def make(stage, num_devices=8, name="w", precision="fp32"):
    mesh = zerojax.make_mesh({"data": num_devices}, devices=jax.devices()[:num_devices])
    params = jax.eval_shape(lambda key: init(key, name), jax.random.key(0))
    layout = zerojax.make_layout(params, mesh, stage=stage)
    recipe = zerojax.Recipe(precision=precision)
    step = zerojax.make_train_step(lambda p, b: 0.0, optax.adam(1e-3), layout, recipe)
    return step.layout, step.init(lambda key: init(key, name), jax.random.key(0))


REFUSED = {
    "other padding": (
        make(3, 8),
        make(3, 5)[0],
        "leaf 'params/w': state (1016, 7), layout (1009, 7), stored (1010, 7); ",
    ),
    "masters padded otherwise": (
        make(1, 8, precision="bf16"),
        make(1, 5)[0],
        "leaf 'masters/w': state (1016, 7), layout (1009, 7), stored (1010, 7); ",
    ),
    "padded at stage 3, not at stage 0": (make(3), make(0)[0], "leaf 'params/"),
    "another structure": (
        make(3),
        make(3, name="v")[0],
        "leaf 'params/w': state (1016, 7), layout None; ",
    ),
    "partitioned, at a stage that keeps it whole": (
        make(3),
        make(1)[0],
        "leaf 'params/even' is partitioned; at the layout's stage 1 it is whole; ",
    ),
    "whole, at a stage that partitions it": (
        make(2),
        make(3)[0],
        "leaf 'params/even' is whole; at the layout's stage 3 it is partitioned; ",
    ),
    "whole moments, at a stage that partitions them": (
        make(0),
        make(1)[0],
        "leaf 'opt_state/0/mu/even' is whole; at the layout's stage 1 it is partitioned; ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_layout_is_refused_and_nothing_is_written(tmp_path, name):
    (_, state), other, said = REFUSED[name]
    remedy = "pass the layout that the state was made under: step.layout"
    with pytest.raises(ValueError, match=f"{re.escape(said)}.*{re.escape(remedy)}"):
        save(tmp_path / "here", state, other)
    with pytest.raises(ValueError, match=re.escape(remedy)):
        save(tmp_path / "here", {"model": state, "key": jax.random.key(0)}, other)
    assert list(tmp_path.iterdir()) == []


def test_states_in_numpy_and_trees_of_the_users_own_are_taken(tmp_path):
    layout, state = make(3)
    other = make(3, 5)[0]
    held = jax.tree.map(np.asarray, state)
    save(tmp_path / "numpy", held, layout)
    back = restore(tmp_path / "numpy", layout, state)
    np.testing.assert_array_equal(*(unwrapped(x.params)["w"] for x in (back, held)))
    save(tmp_path / "none", dataclasses.replace(state, params=None), layout)
    save(tmp_path / "own", {"params": {"x": jnp.ones((1000, 9))}}, other)


def test_the_same_optimizer_elsewhere_is_not_called_another(tmp_path):
    layout, state = make(1)
    save(tmp_path / "here", {"opt_state": state.opt_state}, layout)
    with pytest.raises(IncompatibleCheckpointError, match="is not in it") as error:
        restore(tmp_path / "here", layout, {"inner": state.opt_state})
    assert "its optimizer is" not in str(error.value)


def test_leaves_too_many_are_left_by_a_call_that_is_named(tmp_path):
    layout, state = make(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, layout)
        call = (
            f"leave leaves in it: zerojax.restore({str(tmp_path / '1')!r}, layout, like, partial="
        )
        with pytest.raises(IncompatibleCheckpointError, match=re.escape(call)):
            checkpoints.restore_latest(layout, {"params": state.params})


def test_parameters_alone_are_restored_by_a_call_that_is_named(tmp_path):
    layout, state = make(1)
    save(tmp_path / "1", state, layout)
    call = (
        f"or leave leaves in it: zerojax.restore({str(tmp_path / '1')!r}, layout, "
        "{'params': like}, partial=True): "
    )
    for partial in (False, True):
        with pytest.raises(IncompatibleCheckpointError, match=re.escape(call)):
            restore(tmp_path / "1", layout, state.params, partial=partial)
    back = restore(tmp_path / "1", layout, {"params": state.params}, partial=True)
    assert jnp.array_equal(back["params"]["w"], state.params["w"])


def test_a_layout_in_the_place_of_shapes_is_refused(tmp_path):
    layout, state = make(1)
    save(tmp_path / "1", state, layout)
    with pytest.raises(TypeError, match=r"leaf '\.' of like is a Layout; give a tree of arrays"):
        Checkpoints(tmp_path).restore_latest(layout, layout)


def test_swapped_arguments_are_named_without_their_values(tmp_path):
    layout, state = make(1)
    arguments: Any = (state, 1, layout)
    with pytest.raises(TypeError, match=r"^step is a TrainState; give a whole number$"):
        Checkpoints(tmp_path).save(*arguments)
    with pytest.raises(TypeError, match=r"a Layout is expected, .* restore\(directory, layout,"):
        restore(tmp_path, *arguments[::2])
    with pytest.raises(TypeError, match=r"a Layout is expected, .* save\(directory, state, layout"):
        save(tmp_path / "here", layout, state)  # type: ignore[arg-type]
