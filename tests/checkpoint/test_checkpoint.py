"""A state comes back from disk to the bit, or not at all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Precision
from zerojax._tree import unwrapped
from zerojax.checkpoint import Checkpoints, find_checkpoints, read_manifest, restore, save
from zerojax.train import TrainState

MIXED = Precision(params=jnp.bfloat16, master=jnp.float32)


def init(key):
    a, b = jax.random.split(key)
    return {
        "prime": jax.random.normal(a, (1009, 7)),  # no dim divides by 8: stored padded
        "even": jax.random.normal(b, (64, 32)),
        "bias": jnp.zeros(3),
    }


def loss(params, x):
    return jnp.mean(
        (jnp.tanh(x @ params["even"]) - params["prime"][:32, 0] - params["bias"][0]) ** 2
    )


def trained(stage, num_devices=8, precision=None, num_steps=2):
    mesh = zerojax.make_mesh({"data": num_devices})
    key, tx = jax.random.key(0), optax.adamw(1e-2)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)
    step = zerojax.make_train_step(loss, tx, layout, zerojax.Recipe(precision=precision or "fp32"))
    state = step.init(init, key)
    for number in range(num_steps):
        state, _ = step(state, jax.random.normal(jax.random.key(number), (16, 64)))
    return layout, state, step.abstract_state(), step


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, MIXED), (2, None), (3, MIXED)])
def test_a_state_comes_back_to_the_bit_and_goes_on_the_same(tmp_path, stage, precision):
    layout, state, like, step = trained(stage, precision=precision)
    save(tmp_path / "here", state, layout)
    back = restore(tmp_path / "here", layout, like)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_same_bits(back, state)
    assert [x.sharding for x in jax.tree.leaves(back)] == [
        x.sharding for x in jax.tree.leaves(state)
    ]
    batch = jax.random.normal(jax.random.key(9), (16, 64))
    want, _ = step(state, batch)
    got, _ = step(back, batch)
    assert_same_bits(got, want)
    assert step.num_compiled == 1  # what comes back is placed as what went out


def test_a_layout_without_devices_serves_where_like_says_the_places(tmp_path):
    layout, state, like, _ = trained(2, num_steps=1)
    save(tmp_path / "here", state, layout)
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    shapes = jax.eval_shape(init, jax.random.key(0))
    back = restore(tmp_path / "here", zerojax.make_layout(shapes, mesh, stage=2), like)
    assert_same_bits(back, state)


def test_another_stage_and_mesh_where_stored_shapes_agree(tmp_path):
    layout, state, _, _ = trained(1)
    save(tmp_path, {"even": state.params["even"], "moment": state.opt_state[0].mu["even"]}, layout)
    other, _, like, _ = trained(3, num_devices=4, num_steps=0)
    even = unwrapped(like.params)["even"]
    back = restore(tmp_path, other, {"even": even, "moment": like.opt_state[0].mu["even"]})
    assert back["even"].sharding.shard_shape((64, 32)) == (16, 32)
    np.testing.assert_array_equal(back["even"], state.params["even"])
    np.testing.assert_array_equal(back["moment"], state.opt_state[0].mu["even"])


def test_what_does_not_fit_is_named_and_nothing_is_read(tmp_path):
    layout, state, like, _ = trained(2)
    save(tmp_path, state, layout)
    (tmp_path / "arrays").rename(tmp_path / "away")  # reading anything would fail otherwise
    with pytest.raises(ValueError, match=r"'prime' is not in it \(near: 'params/prime'\)"):
        restore(tmp_path, layout, {"prime": unwrapped(like.params)["prime"]})
    _, _, fp16, _ = trained(2, precision=Precision(params=jnp.float16), num_steps=0)
    with pytest.raises(
        ValueError, match=r"'params/even' is float32\[64, 32\] in it, wanted float16"
    ):
        restore(tmp_path, layout, fp16)


def test_any_pytree_of_arrays_and_its_metadata(tmp_path):
    layout, _, _, _ = trained(2, num_steps=0)
    whole = layout.sharding(P())
    tree = {
        "key": jax.device_put(jax.random.key(7), whole),
        "empty": jax.device_put(jnp.zeros((0, 3)), whole),
        "a/b": jax.device_put(jnp.arange(5), whole),
        "nested": [jax.device_put(jnp.ones(4, jnp.bfloat16), whole), None, ()],
    }
    save(tmp_path, tree, layout, metadata={"step": 4, "data": {"next_index": 9}})
    back = restore(
        tmp_path, layout, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    )
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert (jax.random.key_data(back["key"]) == jax.random.key_data(tree["key"])).all()
    np.testing.assert_array_equal(back["a/b"], np.arange(5))
    assert back["empty"].shape == (0, 3)
    assert back["nested"][0].dtype == jnp.bfloat16
    manifest = read_manifest(tmp_path)
    assert manifest.metadata == {"step": 4, "data": {"next_index": 9}}
    assert (manifest.stage, manifest.axis, manifest.mesh) == (2, ("data",), {"data": 8})
    assert (manifest.leaves["nested/0"].shape, manifest.leaves["nested/0"].dtype) == (
        (4,),
        "bfloat16",
    )
    with pytest.raises(ValueError, match="two leaves have the path 'x/y'"):
        save(tmp_path / "twice", {"x/y": back["a/b"], "x": {"y": back["a/b"]}}, layout)


def test_a_save_that_was_cut_short_is_no_checkpoint(tmp_path):
    layout, _, _, _ = trained(2, num_steps=0)
    tree = {"x": jax.device_put(jnp.arange(8.0), layout.sharding(P("data")))}
    for step in (3, 12):
        save(tmp_path / str(step), tree, layout)
    save(tmp_path / "20", tree, layout)
    (tmp_path / "20" / "checkpoint.json").unlink()
    (tmp_path / "notes").mkdir()
    assert list(find_checkpoints(tmp_path)) == [3, 12]
    assert find_checkpoints(tmp_path / "nowhere") == {}
    with pytest.raises(FileNotFoundError, match="one that was saved whole"):
        restore(tmp_path / "20", layout, tree)
    with pytest.raises(FileNotFoundError, match=f"one of {tmp_path / '12'}, {tmp_path / '3'}$"):
        restore(tmp_path, layout, tree)
    save(tmp_path / "20", tree, layout)  # what the cut-short save left is in nobody's way
    np.testing.assert_array_equal(restore(tmp_path / "20", layout, tree)["x"], np.arange(8.0))


def test_a_checkpoint_is_never_overwritten_and_a_foreign_manifest_is_refused(tmp_path):
    layout, _, _, _ = trained(2, num_steps=0)
    tree = {"x": jax.device_put(jnp.arange(8.0), layout.sharding(P("data")))}
    save(tmp_path, tree, layout)
    with pytest.raises(ValueError, match="holds a checkpoint already"):
        save(tmp_path, tree, layout)
    manifest = tmp_path / "checkpoint.json"
    found = json.loads(manifest.read_text())
    del found["digest"]
    manifest.write_text(json.dumps({**found, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        restore(tmp_path, layout, tree)
    manifest.write_text(manifest.read_text()[:40])
    with pytest.raises(ValueError, match=r"checkpoint.json can't be read"):
        restore(tmp_path, layout, tree)


def test_metadata_that_is_not_json_leaves_no_checkpoint(tmp_path):
    layout, _, _, _ = trained(2, num_steps=0)
    with pytest.raises(TypeError, match="JSON"):
        save(tmp_path, {"x": jnp.arange(3)}, layout, metadata={"layout": layout})
    assert not (tmp_path / "checkpoint.json").exists()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(TrainState):
    """A train state with further fields."""

    noise: Any = None
    statistics: Any = None


jax.tree_util.register_dataclass(
    Trained, [x.name for x in dataclasses.fields(Trained) if x.name != "padded"], ["padded"]
)


def test_fields_that_nobody_knows_come_back_and_are_not_taken_for_padded(tmp_path):
    """`statistics/prime` is called like a parameter, and has the shape of its padded form."""
    layout, state, _, _ = trained(2)
    held = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
    rows = jax.device_put(jnp.ones((1016, 7)), layout.sharding(P("data")))
    statistics = {"prime": rows, "count": jnp.ones(3)}
    more = Trained(**held, noise=jax.random.key(3), statistics=statistics)
    save(tmp_path, more, layout)
    other, _, _, _ = trained(3, num_devices=4, num_steps=0)
    back = restore(tmp_path, other, {"statistics": statistics, "noise": more.noise}, partial=True)
    assert_same_bits(back["statistics"], statistics)
    assert (jax.random.key_data(back["noise"]) == jax.random.key_data(more.noise)).all()
    assert_same_bits(restore(tmp_path, layout, more).opt_state, state.opt_state)


def test_the_last_ones_are_kept_and_none_is_saved_below_them(tmp_path):
    """Whoever went back to an older step would be given the newer one after a restart."""
    layout, _, _, _ = trained(2, num_steps=0)
    tree = {"x": jax.device_put(jnp.arange(8.0), layout.sharding(P("data")))}
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 8, 9):
            checkpoints.save(step, tree, layout)
        checkpoints.wait()
        assert list(checkpoints.steps()) == [8, 9]
        with pytest.raises(ValueError, match=r"already; go on from it .* another folder$"):
            checkpoints.save(9, tree, layout)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/9 is of a later step than 4: move it"):
            checkpoints.save(4, tree, layout)
        assert list(checkpoints.steps()) == [8, 9]
        (tmp_path / "9").rename(tmp_path / "9.diverged")
        checkpoints.save(10, tree, layout)
        checkpoints.wait()
        assert list(checkpoints.steps()) == [8, 10]
    for keep in (0, True):
        with pytest.raises(ValueError, match="at least 1"):
            Checkpoints(tmp_path, keep=keep)


@pytest.mark.parametrize("name", ["arrays.unfinished.removed", "arrays.removed"])
def test_what_a_killed_removal_left_is_removed_by_the_next_save(tmp_path, name):
    layout, _, _, _ = trained(2, num_steps=0)
    tree = {"x": jax.device_put(jnp.arange(8.0), layout.sharding(P("data")))}
    for left_over in (name, name.removesuffix(".removed")):
        (tmp_path / "one" / left_over).mkdir(parents=True)
        (tmp_path / "one" / left_over / "_METADATA").write_text("cut short")
    save(tmp_path / "one", tree, layout)
    assert sorted(x.name for x in (tmp_path / "one").iterdir()) == ["arrays", "checkpoint.json"]


def test_what_cannot_be_removed_fails_no_save_and_stops_no_retention(tmp_path, monkeypatch):
    layout, _, _, _ = trained(2, num_steps=0)
    tree = {"x": jax.device_put(jnp.arange(8.0), layout.sharding(P("data")))}
    save(tmp_path / "elsewhere", tree, layout)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1").symlink_to(tmp_path / "elsewhere")  # moved to a larger disk
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(2, tree, layout)
    with pytest.warns(UserWarning, match="1 was a link; remove .*elsewhere yourself"):
        checkpoints.wait()
    assert list(checkpoints.steps()) == [2]
    np.testing.assert_array_equal(restore(tmp_path / "elsewhere", layout, tree)["x"], tree["x"])

    def refuse(path):
        raise PermissionError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("zerojax.checkpoint._files.shutil.rmtree", refuse)
        checkpoints.save(3, tree, layout)
        with pytest.warns(UserWarning, match="2 can't be removed"):
            checkpoints.wait()
    assert list(checkpoints.steps()) == [3]
    checkpoints.save(4, tree, layout)  # what was left is removed now
    checkpoints.wait()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["4"]
