"""What can't be saved or restored is refused before anything is written, and nothing is cut off."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.checkpoint import (
    Checkpoints,
    IncompatibleCheckpointError,
    _save,
    export_safetensors,
    import_safetensors,
    restore,
    save,
    start_save,
    verify,
)
from zerojax.checkpoint._safetensors import write_safetensors


@pytest.fixture
def layout(mesh8):
    return zerojax.make_layout({"w": jax.ShapeDtypeStruct((8193,), jnp.float32)}, mesh8, stage=3)


PROGRAM = """
import sys, jax.numpy as jnp, zerojax
mesh = zerojax.make_mesh({"data": 1})
layout = zerojax.make_layout({"w": jnp.ones((2000, 1000))}, mesh, stage=2)
zerojax.Checkpoints(sys.argv[1]).save(3, {"w": jnp.ones((2000, 1000))}, layout)
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python 3.12 starts no threads then, which orbax needs"
)
def test_a_program_that_ends_waits_for_what_it_saves(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert verify(tmp_path / "3").step == 3


LEAVES = {
    "a text": ("hello", TypeError, "leaf 'x' is a str and no array"),
    "a function": (len, TypeError, r"eqx\.filter"),
    "64 bits": (np.int64(2**40 + 5), ValueError, "leaf 'x' is int64 and would lose values"),
    "a double beside NaN": (np.array([0.1, np.nan]), ValueError, "float64 and would lose values"),
    **{
        dtype: (jnp.ones((2, 3), dtype), TypeError, f"leaf 'x' is {dtype}, which.*in a wider dtype")
        for dtype in ("uint2", "uint4", "float8_e4m3")
    },
    "a double": (np.full(3, 0.1), ValueError, "float64 and would lose values as float32"),
}


@pytest.mark.parametrize("name", LEAVES)
def test_leaves_that_cannot_be_kept_are_refused_by_path(tmp_path, layout, name):
    leaf, error, said = LEAVES[name]
    with pytest.raises(error, match=said):
        save(tmp_path / "here", {"x": leaf}, layout)
    assert not (tmp_path / "here").exists()


def test_without_locks_of_files_a_state_is_saved_all_the_same(tmp_path, layout, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    importlib.reload(_save).save(tmp_path, {"w": jnp.ones(3)}, layout)
    assert verify(tmp_path).leaves["w"].shape == (3,)


def test_a_leaf_that_was_donated_is_named(tmp_path, layout):
    given = {"w": jnp.ones(8), "old": jnp.ones(8)}
    given["old"].delete()
    with pytest.raises(ValueError, match=r"leaf 'old' is deleted.*save what the step returned"):
        save(tmp_path / "here", given, layout)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "told", [{"data": {"a": {"b": jnp.ones(2)}}}, {"metadata": {"a": np.int64(1)}}]
)
def test_what_json_has_not_is_told_with_the_remedy(tmp_path, layout, told):
    with pytest.raises(TypeError, match=r"data= or metadata= holds a \w+, which.*x\.tolist\(\)"):
        save(tmp_path / "here", {"w": jnp.ones(3)}, layout, **told)
    assert not (tmp_path / "here").exists()


def test_what_holds_itself_and_metadata_that_is_no_dict_are_refused(tmp_path, layout):
    endless = {}
    endless["a"] = [endless]
    refused = {"holds itself": {"data": endless}, "metadata is a list; give a": {"metadata": [1]}}
    for said, told in refused.items():
        with pytest.raises(TypeError, match=said):
            save(tmp_path / "here", {"w": jnp.ones(3)}, layout, **told)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "told", [{"data": {7: "a"}}, {"metadata": {"a": [{"b": ({1: "x", "1": "y"},)}]}}]
)
def test_keys_that_json_would_make_texts_of_are_refused(tmp_path, layout, told):
    with pytest.raises(TypeError, match=r"has the key \d, and keys of JSON are texts; give pairs"):
        save(tmp_path / "here", {"w": jnp.ones(3)}, layout, **told)
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("state", [None, {}, {"params": []}])
def test_a_state_without_leaves_is_refused_and_the_last_checkpoint_stays(tmp_path, layout, state):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {"w": jnp.ones(8193)}, layout).wait()
    with pytest.raises(ValueError, match="has no leaf; give the tree to save"):
        checkpoints.save(2, state, layout)
    assert [*checkpoints.steps()] == [1]
    checkpoints.save(3, optax.sgd(1.0).init({}), layout).wait()  # of an optimizer without a state
    assert [*checkpoints.steps()] == [3]


def test_what_is_no_tree_of_arrays_is_refused(tmp_path, layout):
    with pytest.raises(TypeError, match=r"leaf '\.' of like is a function; give a tree of arrays"):
        restore(tmp_path, layout, restore)


@pytest.mark.parametrize("tree", [{"a/": 1}, {"m": {"": 1}}, {"/a": 1}])
def test_keys_without_a_name_are_refused(tmp_path, layout, tree):
    with pytest.raises(ValueError, match="a part without a name"):
        save(tmp_path / "here", tree, layout)


def test_numbers_and_numpy_arrays_come_back_as_arrays(tmp_path, layout):
    tree = {"step": 0, "rate": 0.1, "on": True, "many": np.arange(3), "scalar": np.float64(0.5)}
    tree |= {"best": np.float32("nan"), "half": np.array([1, np.nan], jnp.bfloat16)}
    tree |= {"complex": np.array([np.nan + 1j, 2], np.complex64)}
    save(tmp_path, tree, layout)
    verify(tmp_path)
    back = restore(tmp_path, layout, tree)
    assert {name: x.dtype.name for name, x in back.items()} == {
        "step": "int32", "rate": "float32", "on": "bool", "many": "int32", "scalar": "float32",
        "best": "float32", "half": "bfloat16", "complex": "complex64",
    }  # fmt: skip
    assert (int(back["step"]), float(back["scalar"])) == (0, 0.5)
    assert float(back["rate"]) == np.float32(0.1)
    for name in ("best", "half", "complex"):
        np.testing.assert_array_equal(np.complex64(back[name]), np.complex64(tree[name]))
    with jax.enable_x64(True):
        save(tmp_path / "wide", {"n": np.int64(2**40 + 5)}, layout)
        assert int(restore(tmp_path / "wide", layout, {"n": np.int64(0)})["n"]) == 2**40 + 5
    with pytest.raises(IncompatibleCheckpointError, match=r"'n' is int64\[\] in it, wanted int32"):
        restore(tmp_path / "wide", layout, {"n": np.int64(0)})


STEPS = {
    "negative": (-1, ValueError),
    "a float": (5.0, TypeError),
    "a bool": (True, TypeError),
    "a name": ("../x", TypeError),
    "nothing": (None, TypeError),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_that_would_not_be_found_are_refused(tmp_path, layout, name):
    step, error = STEPS[name]
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(error, match="step is"):
        checkpoints.save(step, {"w": jnp.ones(3)}, layout)
    assert list(tmp_path.iterdir()) == []


def test_steps_may_be_arrays(tmp_path, layout):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(np.int64(4), {"w": jnp.ones(3)}, layout)
        checkpoints.save(jnp.int32(5), {"w": jnp.ones(3)}, layout)
    assert list(checkpoints.steps()) == [4, 5]


def test_folders_that_hold_no_steps_are_refused(tmp_path, layout):
    save(tmp_path / "one", {"w": jnp.ones(3)}, layout)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="is a checkpoint itself; give the folder above it"):
        Checkpoints(tmp_path / "one")
    with pytest.raises(ValueError, match="is no folder"):
        Checkpoints(tmp_path / "file")
    for keep in (1.5, "3", object(), 0, False):
        with pytest.raises(ValueError, match="keep is"):
            Checkpoints(tmp_path, keep=keep)


def test_a_save_that_fails_leaves_nothing_behind_and_says_so_every_time(tmp_path, layout):
    pending = start_save(tmp_path / "5", {"w": jnp.ones(3)}, layout, then=lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pending.wait()
    assert list((tmp_path / "5").glob("*tmp*")) == []


def test_only_what_belongs_to_a_parameter_is_cut(tmp_path, layout):
    """`cache/w` is called like a parameter, and has the shape of its padded form by chance."""
    cache = {"w": jnp.arange(8200.0), "count": jnp.ones(())}
    tree = {"params": {"w": jnp.zeros(8200)}, "cache": cache}
    save(tmp_path / "tree", tree, layout)
    out = export_safetensors(tmp_path / "tree", tmp_path / "c.safetensors", part="cache")
    back = import_safetensors(out, layout, cache)
    np.testing.assert_array_equal(back["w"], np.arange(8200.0))


def test_a_list_of_weights_goes_out_and_comes_back(tmp_path, layout):
    weights = [jnp.full(3, float(number)) for number in range(6)]
    save(tmp_path / "list", {"params": weights}, layout)
    out = export_safetensors(tmp_path / "list", tmp_path / "list.safetensors")
    back = import_safetensors(out, layout, weights)
    assert [float(x[0]) for x in back] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_leaves_that_are_one_tensor_by_name_are_refused(tmp_path, layout):
    twice = {"a.b": jnp.zeros(3), "a": {"b": jnp.zeros(3)}}
    save(tmp_path / "twice", {"params": twice}, layout)
    one = tmp_path / "one.safetensors"
    said = r"leaves '(a.b)' and '(?!\1)a.b' are one tensor by name; rename the one that has a dot"
    with pytest.raises(ValueError, match=said):
        export_safetensors(tmp_path / "twice", one)
    write_safetensors(one, twice := {"a.b": twice["a.b"]}, twice.__getitem__)
    with pytest.raises(ValueError, match=said):
        import_safetensors(one, layout, {**twice, "a": {"b": twice["a.b"]}})


STUCK = """
import sys, time, jax.numpy as jnp, zerojax
from zerojax.checkpoint import _save
_save._finish = lambda *given: (print("writing", flush=True), time.sleep(100))
layout = zerojax.make_layout({"w": jnp.ones(3)}, zerojax.make_mesh({"data": 1}), stage=0)
zerojax.save(sys.argv[1], {"w": jnp.ones(3)}, layout)
"""


def test_of_two_saves_of_one_folder_the_later_is_refused(tmp_path, layout, monkeypatch):
    """Each would remove what the other writes, and give its own arrays the other's manifest."""
    finish, go_on = _save._finish, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(_save, "_finish", lambda *given: (go_on.wait(20), finish(*given)))
        pending = start_save(tmp_path / "5", {"w": jnp.ones(3)}, layout)
        said = "5 is being written by another save; save to another directory"
        with pytest.raises(ValueError, match=said):
            save(tmp_path / "5", {"w": jnp.zeros(3)}, layout)
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match=said):
            checkpoints.save(5, {"w": jnp.zeros(3)}, layout)
        go_on.set()
        pending.wait()
    assert verify(tmp_path / "5").step is None
    assert restore(tmp_path / "5", layout, {"w": jnp.zeros(3)})["w"].tolist() == [1, 1, 1]
    assert not (tmp_path / "5" / ".lock").exists()


def test_a_save_of_another_process_is_in_the_way_until_that_is_killed(tmp_path, layout):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STUCK, str(tmp_path)]
    other: Any = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    with other:
        try:
            assert other.stdout.readline() == "writing\n"
            with pytest.raises(ValueError, match="is being written by another save"):
                save(tmp_path, {"w": jnp.zeros(3)}, layout)
        finally:
            other.kill()
    save(tmp_path, {"w": jnp.zeros(3)}, layout)
    assert verify(tmp_path).leaves["w"].shape == (3,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays", "checkpoint.json"]
