"""Whatever a state was saved under, it comes back equal to the bit under anything else."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax import Precision
from zerojax._tree import flatten_with_names, unwrapped
from zerojax.checkpoint import IncompatibleCheckpointError, restore, save
from zerojax.checkpoint._leaves import logical_shapes
from zerojax.checkpoint._safetensors import export_safetensors, import_safetensors

MESHES = {
    "1": {"data": 1},
    "2": {"data": 2},
    "4": {"data": 4},
    "8": {"data": 8},
    "4x2": {"data": 4, "model": 2},
}
PLACES = list(itertools.product(range(4), MESHES))
FP32 = Precision()
MIXED = Precision(params=jnp.bfloat16, master=jnp.float32)
HALF = Precision(params=jnp.float16, master=jnp.float32)
BF16 = Precision(params=jnp.bfloat16)
TX = optax.adamw(1e-2)


def no_loss(params, batch):
    return 0.0


def init(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "prime": jax.random.normal(a, (1009, 7)),  # no dim divides: padded for 2, 4 and 8
        "columns": jax.random.normal(b, (48, 32)),  # cut along the model axis where there is one
        "bias": jax.random.normal(c, (3,)),
    }


def placed(stage, mesh, tx: Any = TX, precision=FP32):
    axes = MESHES[mesh]
    devices = jax.devices()[: math.prod(axes.values())]
    specs = {"prime": P(), "columns": P(None, "model"), "bias": P()} if "model" in axes else None
    layout = zerojax.make_layout(
        jax.eval_shape(init, jax.random.key(0)),
        zerojax.make_mesh(axes, devices=devices),
        stage=stage,
        specs=specs,
    )
    recipe = zerojax.Recipe(precision=precision or "fp32")
    return layout, zerojax.make_train_step(no_loss, tx, layout, recipe).abstract_state()


def logical(state, layout):
    names, leaves, _ = flatten_with_names(state)
    shapes = logical_shapes(state, layout)
    return {
        name: np.asarray(x)[tuple(map(slice, shapes[name]))]
        for name, x in zip(names, leaves, strict=True)
    }


def as_bytes(leaves):
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in leaves.items()}


def filled(like, layout, seed=0):
    """Fill a state with values that tell every element apart; padding is zeros."""
    random = np.random.default_rng(seed)
    names, leaves, structure = flatten_with_names(like)
    shapes = logical_shapes(like, layout)
    arrays = []
    for name, x in zip(names, leaves, strict=True):
        values = np.zeros(x.shape, x.dtype)
        inner = tuple(map(slice, shapes[name]))
        values[inner] = (random.standard_normal(shapes[name]) * 8).astype(x.dtype)
        arrays.append(jax.device_put(values, x.sharding))
    return structure.unflatten(arrays)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_pair_of_stage_and_mesh(tmp_path, mesh):
    """Every (stage, mesh) is saved; each is restored at every other: 400 pairs in all."""
    others = {place: placed(*place) for place in PLACES}
    for stage in range(4):
        layout, like = others[stage, mesh]
        state = filled(like, layout)
        wanted = as_bytes(logical(state, layout))
        save(tmp_path / f"{stage}", state, layout)
        for other, wished in others.values():
            back = restore(tmp_path / f"{stage}", other, wished)
            assert as_bytes(logical(back, other)) == wanted
            assert [x.sharding for x in jax.tree.leaves(back)] == [
                x.sharding for x in jax.tree.leaves(wished)
            ]


def test_these_meshes_pad_differently():
    found = {mesh: unwrapped(placed(3, mesh)[1].params)["prime"].shape[0] for mesh in MESHES}
    assert found == {"1": 1009, "2": 1010, "4": 1012, "8": 1016, "4x2": 1012}


@pytest.mark.parametrize("mixed", [MIXED, HALF], ids=["bf16", "fp16"])
def test_masters_become_parameters_and_parameters_masters(tmp_path, mixed):
    """bf16 (or fp16) with masters to fp32 and back: no bit of what is kept in fp32 is lost."""
    layout, like = placed(3, "8", precision=mixed)
    state = filled(like, layout)
    half = jax.tree.map(lambda x: x.astype(mixed.params), state.masters)
    state = type(state)(**{**vars(state), "params": half})  # as every step leaves them
    save(tmp_path / "mixed", state, layout)

    wide, wished = placed(1, "4", precision=FP32)
    back = restore(tmp_path / "mixed", wide, wished)
    assert back.masters is None
    want = as_bytes(logical(state.masters, layout))
    assert as_bytes(logical(back.params, wide)) == want
    assert as_bytes(logical(back.opt_state, wide)) == as_bytes(logical(state.opt_state, layout))

    save(tmp_path / "fp32", back, wide)
    again = restore(tmp_path / "fp32", layout, like)
    assert as_bytes(logical(again, layout)) == as_bytes(logical(state, layout))


def test_half_precisions_become_each_other_through_the_masters(tmp_path):
    layout, like = placed(2, "8", precision=MIXED)
    state = filled(like, layout)
    save(tmp_path / "bf16", state, layout)
    other, wished = placed(3, "2", precision=HALF)
    back = restore(tmp_path / "bf16", other, wished)
    want = {name: x.astype(np.float16) for name, x in logical(state.masters, layout).items()}
    assert as_bytes(logical(back.params, other)) == as_bytes(want)


def test_wider_dtypes_hold_the_same_values_and_narrower_ones_are_refused(tmp_path):
    layout, like = placed(2, "8", precision=BF16)
    state = filled(like, layout)
    save(tmp_path / "bf16", state, layout)
    other, wished = placed(0, "1", precision=FP32)
    back = restore(tmp_path / "bf16", other, wished)
    for name, x in logical(state, layout).items():
        np.testing.assert_array_equal(logical(back, other)[name], x.astype(back_dtype(back, name)))

    save(tmp_path / "fp32", back, other)
    with pytest.raises(IncompatibleCheckpointError, match=r"is float32\[.*wanted bfloat16"):
        restore(tmp_path / "fp32", layout, like)


@pytest.mark.parametrize(
    ("narrow", "wide", "narrower"),
    [
        ("float8_e4m3fn", "bfloat16", "float8_e5m2"),
        ("float8_e5m2", "float16", "float8_e4m3fn"),
        ("float8_e4m3fnuz", "float32", "float8_e4m3fn"),
        ("float4_e2m1fn", "float8_e4m3fn", None),
    ],
)
def test_every_value_of_8_bits_and_less_fits_wider_dtypes(tmp_path, narrow, wide, narrower):
    layout, _ = placed(0, "1")
    kept = np.arange(256, dtype=np.uint8)
    bits = jnp.finfo(narrow).bits
    kept = kept[: 1 << bits].view(jnp.dtype(narrow))
    save(tmp_path / "here", {"x": jnp.asarray(kept)}, layout)
    back = restore(tmp_path / "here", layout, {"x": jax.ShapeDtypeStruct(kept.shape, wide)})
    np.testing.assert_array_equal(np.float64(back["x"]), np.float64(kept))
    if bits == 8:
        path = tmp_path / "x.safetensors"
        export_safetensors(tmp_path / "here", path)
        back = import_safetensors(path, layout, {"x": jax.ShapeDtypeStruct(kept.shape, wide)})
        np.testing.assert_array_equal(np.float64(back["x"]), np.float64(kept))
    if narrower is not None:
        with pytest.raises(IncompatibleCheckpointError, match=f"is {narrow}.*wanted {narrower}"):
            restore(tmp_path / "here", layout, {"x": jax.ShapeDtypeStruct(kept.shape, narrower)})


def back_dtype(state, name):
    names, leaves, _ = flatten_with_names(state)
    return dict(zip(names, leaves, strict=True))[name].dtype


def test_masters_are_not_left_behind_in_silence(tmp_path):
    """What only the masters hold would be lost by parameters that are rounded and keep none."""
    layout, like = placed(2, "8", precision=MIXED)
    save(tmp_path / "mixed", filled(like, layout), layout)
    _, wished = placed(2, "8", precision=BF16)
    with pytest.raises(IncompatibleCheckpointError, match="masters/bias' is in it and not wanted"):
        restore(tmp_path / "mixed", layout, wished)


OTHERS = {
    "sgd": (optax.sgd(1e-2, momentum=0.9), "wanted TraceState"),
    "the same leaves, another meaning": (optax.adabelief(1e-2), "wanted ScaleByBeliefState"),
    "one more link": (optax.chain(optax.clip(1.0), TX), r"near: 'opt_state/0/mu/bias'"),
    "a schedule": (optax.adamw(optax.constant_schedule(1e-2)), "'opt_state/2/count' is not in it"),
    "every few steps": (optax.MultiSteps(TX, 2), "wanted MultiStepsState > ScaleByAdamState"),
    "no state at all": (optax.sgd(1e-2), "'opt_state/0/mu/bias' is in it and not wanted"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_optimizer_is_refused_and_never_starts_afresh(tmp_path, name):
    other, said = OTHERS[name]
    layout, like = placed(2, "4")
    save(tmp_path / "adamw", filled(like, layout), layout)
    tx = other.gradient_transformation() if isinstance(other, optax.MultiSteps) else other
    _, wished = placed(2, "4", tx=tx)
    with pytest.raises(IncompatibleCheckpointError, match=said):
        restore(tmp_path / "adamw", layout, wished)


def test_parameters_alone_are_asked_for_in_words(tmp_path):
    layout, like = placed(3, "8")
    state = filled(like, layout)
    save(tmp_path / "all", state, layout)
    other, wished = placed(2, "2")
    with pytest.raises(IncompatibleCheckpointError, match="partial=True"):
        restore(tmp_path / "all", other, {"params": wished.params})
    back = restore(tmp_path / "all", other, {"params": wished.params}, partial=True)
    assert as_bytes(logical(back, other)) == as_bytes(logical({"params": state.params}, layout))


def test_leaves_without_a_place_of_their_own_go_to_all_devices(tmp_path):
    """jit moves a fresh `jnp.zeros` to the devices of its other arguments; not one that was read.

    Batch statistics and step counters of a loop of one's own are such leaves.
    """
    params = {"w": jnp.ones((16, 8))}
    layout = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=3, min_size=0)
    like = {"params": jax.device_put(params, layout.params), "mean": jnp.zeros(8)}
    written = jax.device_put(jnp.ones(8), layout.sharding(P()))
    save(tmp_path / "all", {**like, "mean": written}, layout)
    tensors = {"params.w": np.ones((16, 8), "f4"), "mean": np.ones(8, "f4")}
    safetensors.numpy.save_file(tensors, tmp_path / "all.safetensors")
    for found in (
        restore(tmp_path / "all", layout, like),
        import_safetensors(tmp_path / "all.safetensors", layout, like),
    ):
        total = jax.jit(lambda x: (x["params"]["w"] @ x["mean"]).sum())
        assert float(total(getattr(found, "state", found))) == 128


def test_shapes_without_shardings_go_where_the_layout_has_them(tmp_path):
    tx = optax.adam(1e-3)
    params = {"w": jnp.ones((64, 32)), "odd": jnp.ones((1009, 7))}
    layout = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=2)
    state = {"params": params, "opt": tx.init(params), "mean": jnp.ones((64, 64))}
    save(tmp_path / "all", state, layout, tx=tx)
    like = jax.eval_shape(lambda: state)
    with pytest.warns(UserWarning, match=r"'opt/0/mu/odd' of like \(2 such, 56.5 kB\) has no"):
        back = restore(tmp_path / "all", layout, like, tx=tx)
    assert back["params"]["w"].sharding.is_fully_replicated
    assert back["opt"][0].mu["w"].sharding.shard_shape((64, 32)) == (8, 32)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)
    whole = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=3)
    like = {"model": {"w": like["params"]["w"]}, "mean": like["mean"]}
    save(tmp_path / "own", {"model": {"w": params["w"]}, "mean": state["mean"]}, layout)
    with pytest.warns(UserWarning, match=r"'mean' of like \(1 such, 16\.4 kB\) has no"):
        back = restore(tmp_path / "own", whole, like)
    assert back["model"]["w"].sharding.shard_shape((64, 32)) == (8, 32)
    assert back["mean"].sharding.is_fully_replicated


def test_parameters_that_are_one_array_change_their_precision_too(tmp_path):
    w = jnp.linspace(-1.0, 1.0, 128 * 16).reshape(128, 16)
    layout = zerojax.make_layout(w, zerojax.make_mesh({"data": 8}), stage=2)

    def make(precision):
        recipe = zerojax.Recipe(precision=precision)
        loss = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
        return zerojax.make_train_step(loss, optax.adam(1e-3), layout, recipe)

    zerojax.save(tmp_path / "wide", make("fp32").init(w), layout)
    back = zerojax.restore(tmp_path / "wide", layout, make("bf16").abstract_state())
    np.testing.assert_array_equal(back.masters, w)
    zerojax.save(tmp_path / "mixed", back, layout)
    again = zerojax.restore(tmp_path / "mixed", layout, make("fp32").abstract_state())
    np.testing.assert_array_equal(again.params, w)
    file = export_safetensors(tmp_path / "mixed", tmp_path / "w.safetensors")
    assert set(safetensors.numpy.load_file(file)) == {"params"}
