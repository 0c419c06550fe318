"""Moving a train state: any layout to any other, in memory, equal to the bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.train.test_train_step import MESHES, MIXED, init, loss_fn
from zerojax.checkpoint import logical_shapes, parts, read_manifest
from zerojax.train import _move

MESHES = MESHES | {
    "eight": lambda: (zerojax.make_mesh({"data": 8}), {}),
    "five": lambda: (zerojax.make_mesh({"data": 5}, devices=jax.devices()[:5]), {}),
    "four": lambda: (zerojax.make_mesh({"data": 4}, devices=jax.devices()[4:]), {}),
}
SHAPES = jax.eval_shape(init, jax.random.key(0))


def make(mesh, stage, tx=None, shapes=SHAPES, min_size=48, **options):
    mesh, given = MESHES[mesh]()
    layout = zerojax.make_layout(shapes, mesh, stage=stage, min_size=min_size, **given)
    tx = tx or optax.adamw(1e-2)
    return zerojax.make_train_step(loss_fn, tx, layout, zerojax.Recipe(**options))


def filled(step, tx=None):
    """Return a state with values in every leaf, and its logical leaves."""
    like, rng = step.abstract_state(), np.random.default_rng(0)
    shapes = logical_shapes(like, step.layout, tx)
    logical = [np.asarray(rng.integers(1, 100, shape)) for shape in shapes.values()]
    leaves = []
    for x, want in zip(logical, jax.tree.leaves(like), strict=True):
        stored = np.zeros(want.shape, want.dtype)
        stored[tuple(map(slice, x.shape))] = x
        leaves.append(jax.device_put(stored, want.sharding))
    return jax.tree.unflatten(jax.tree.structure(like), leaves), logical


def assert_moved(moved, step, logical):
    like = step.abstract_state()
    assert jax.tree.structure(moved) == jax.tree.structure(like)
    for x, want, values in zip(*map(jax.tree.leaves, (moved, like)), logical, strict=True):
        assert (x.shape, x.dtype, x.sharding) == (want.shape, want.dtype, want.sharding)
        found = np.array(x).astype(int)
        np.testing.assert_array_equal(found[tuple(map(slice, values.shape))], values)
        assert found.sum() == values.sum(), "padding is zeros"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("eight", 3), ("four", 1)),
        (("eight", 3), ("five", 3)),
        (("hybrid", 2), ("hybrid, wider states", 3)),
        (("explicit", 3), ("model axis", 2)),
        (("explicit model axis", 3), ("one device", 0)),
        (("one device", 0), ("explicit model axis", 3)),
    ],
    ids=lambda given: f"{given[0]} {given[1]}",
)
def test_any_layout_goes_to_any_other(before, after):
    one, other = (make(*given, precision=MIXED) for given in (before, after))
    state, logical = filled(one)
    moved = zerojax.move(state, one.layout, other.layout)
    assert_moved(moved, other, logical)
    kept = {id(x) for x in jax.tree.leaves(moved)}
    assert all(x.is_deleted() or id(x) in kept for x in jax.tree.leaves(state))


def test_a_moved_state_is_refused_though_its_scalars_stay_where_they_are():
    one, other = make("eight", 3), make("eight", 1)
    state, _ = filled(one)
    zerojax.move(state, one.layout, other.layout)
    with pytest.raises(ValueError, match="the state was donated"):
        zerojax.move(state, one.layout, other.layout)


def test_factored_states_are_told_by_the_optimizer():
    shapes, tx = {"w": jax.ShapeDtypeStruct((130, 130), jnp.float32)}, optax.adafactor(1e-3)
    one, other = (make(name, 3, tx, shapes, 200) for name in ("eight", "four"))
    state, logical = filled(one, tx)
    with pytest.raises(ValueError, match=r"leaf 'opt_state/.*' \[130\] can be .* pass tx="):
        zerojax.move(state, one.layout, other.layout)
    assert_moved(zerojax.move(state, one.layout, other.layout, tx=tx), other, logical)


def test_no_more_than_a_leaf_is_there_twice(monkeypatch):
    one, other = make("eight", 3), make("five", 3)
    state, _ = filled(one)
    device = jax.devices()[0]

    def held():
        live = [x for x in jax.live_arrays() if not x.is_deleted() and device in x.devices()]
        return sum(x.addressable_shards[0].data.nbytes for x in live)

    seen, start = [], held()
    put = jax.device_put

    def watched(*args, **options):
        found = put(*args, **options)
        seen.append(held())
        return found

    monkeypatch.setattr(_move.jax, "device_put", watched)
    moved = zerojax.move(state, one.layout, other.layout)
    monkeypatch.undo()
    largest = max(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(moved))
    grown = held() - start
    assert len(seen) > 10
    assert max(seen) <= start + max(grown, 0) + largest


NOWHERE = jax.sharding.AbstractMesh((8,), ("data",))
OTHER = {**SHAPES, "bias": SHAPES["embed"]}
REFUSED = {
    "other parameters": (
        lambda state, one: (state, one.layout, make("four", 3, shapes=OTHER).layout),
        "leaf '(params|opt_state/0/mu)/bias' of the state does not fit the other layout",
    ),
    "another layout's state": (
        lambda state, one: (state, make("eight", 1).layout, one.layout),
        r"leaf 'params/.*' is partitioned; at the layout's stage 1 it is whole",
    ),
    "a step's results": (
        lambda state, one: ((state, {}), one.layout, one.layout),
        "takes a TrainState first, got tuple",
    ),
    "no devices": (
        lambda state, one: (state, one.layout, zerojax.make_layout(SHAPES, NOWHERE, stage=3)),
        r"mesh \{'data': 8\} is an AbstractMesh, which has no devices",
    ),
    "a state on the host": (
        lambda state, one: (jax.device_get(state), one.layout, make("four", 1).layout),
        "arrays on devices, and leaf 'step' is of type ndarray",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_moves(arguments, message):
    one = make("eight", 3)
    state, _ = filled(one)
    with pytest.raises((ValueError, TypeError), match=message):
        zerojax.move(*arguments(state, one))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_step_goes_on_with_a_moved_state():
    one, other = make("eight", 3), make("four", 1)
    batch = {"tokens": jnp.ones((8, 9), int)}
    state = one.init(init, jax.random.key(0))
    loss = float(one.evaluate(state, batch))
    moved = zerojax.move(state, one.layout, other.layout)
    assert float(other.evaluate(moved, batch)) == pytest.approx(loss, rel=1e-6)
    assert moved.params["embed"].sharding.spec == P()


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("tx", [optax.sgd(1e-2), optax.adam(1e-2)], ids=["sgd", "adam"])
def test_empty_leaves_move_and_are_saved(tx, stage, tmp_path):
    params = {"w": jnp.ones((16, 16)), "none": jnp.zeros((0, 12)), "empty": jnp.zeros((12, 0))}

    def loss(p, x):
        return jnp.mean((x @ p["w"] + p["none"].sum() + p["empty"].sum()) ** 2)

    steps = []
    for mesh, stage_of in (("eight", stage), ("four", 3)):
        mesh, _ = MESHES[mesh]()
        layout = zerojax.make_layout(params, mesh, stage=stage_of, min_size=0)
        steps.append(zerojax.make_train_step(loss, tx, layout))
    before, after = steps
    state, _ = before(before.init(params), jnp.ones((8, 16)))
    zerojax.save(tmp_path / "saved", state, before.layout)
    restored = zerojax.restore(tmp_path / "saved", after.layout, after.abstract_state())
    moved = zerojax.move(state, before.layout, after.layout)
    losses = [float(after(one, jnp.ones((8, 16)))[1]["loss"]) for one in (restored, moved)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("rule", [{"dim": 1}, {"whole": True}])
@pytest.mark.parametrize("group", ["mu", "nu"])
def test_parameters_named_as_the_states_own_fields_are_told_apart(group, rule, tmp_path):
    """The moment `0/mu/w` of `w` ends as the parameter `mu/w` does, and has its shape."""
    params = {"w": jnp.ones((24, 17)), group: {"w": jnp.ones((24, 17))}}
    rules = (zerojax.Rule(path="^w", **rule),)

    def make_step(count):
        mesh = zerojax.make_mesh({"data": count}, devices=jax.devices()[:count])
        layout = zerojax.make_layout(params, mesh, stage=3, min_size=1, rules=rules)
        return zerojax.make_train_step(
            lambda p, x: jnp.mean((x @ p["w"] * (x @ p[group]["w"])) ** 2), optax.adam(1e-2), layout
        )

    step, other = make_step(8), make_step(5)
    state, logical = filled(step, optax.adam(1e-2))
    zerojax.save(tmp_path / "1", state, step.layout)
    found = parts(read_manifest(tmp_path / "1"))
    assert set(found) == {"step", "params", "opt_state/0/count", "opt_state/0/mu", "opt_state/0/nu"}
    restored = zerojax.restore(tmp_path / "1", other.layout, other.abstract_state())
    assert_moved(restored, other, logical)
    assert_moved(zerojax.move(state, step.layout, other.layout), other, logical)
    step.audit(jax.ShapeDtypeStruct((80, 24), jnp.float32)).raise_if_problems()
