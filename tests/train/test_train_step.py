"""The train step: each stage computes the same, from state that is born and stays in its place."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.layout import STAGES

NUM_STEPS = 3
WIDER = {"parameter": "fsdp", "gradient": ("replica", "fsdp"), "optimizer": ("replica", "fsdp")}
MIXED = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)


def init(key):
    keys = jax.random.split(key, 6)
    return {
        "embed": jax.random.normal(keys[0], (67, 24)) * 0.3,  # no dim divides by 8 without padding
        "stack": {
            "norm": 1 + jax.random.normal(keys[1], (4, 24)) * 0.1,
            "up": jax.random.normal(keys[2], (4, 24, 40)) * 0.2,
            "down": jax.random.normal(keys[3], (4, 40, 24)) * 0.2,
        },
        "out": jax.random.normal(keys[4], (24, 67)) * 0.2,
        "bias": jnp.zeros(67),
    }


def loss_fn(params, batch):
    tokens = batch["tokens"]
    x = params["embed"][tokens[:, :-1]]

    def layer(x, w):
        return x + jnp.tanh(x * w["norm"] @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["stack"])
    logits = (x @ params["out"] + params["bias"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def batches():
    return [
        {"tokens": jax.random.randint(jax.random.key(100 + i), (32, 9), 0, 67)}
        for i in range(NUM_STEPS)
    ]


def make(mesh, stage, tx=None, loss=loss_fn, layout_options=None, **options):
    tx = tx or optax.adamw(1e-2)
    layout = zerojax.make_layout(
        jax.eval_shape(init, jax.random.key(0)), mesh, stage=stage, min_size=48,
        **(layout_options or {}),
    )  # fmt: skip
    has_aux = options.pop("has_aux", False)
    step = zerojax.make_train_step(loss, tx, layout, zerojax.Recipe(**options), has_aux=has_aux)
    return layout, step.init(init, jax.random.key(0)), step


def train(mesh, stage, **options):
    layout, state, step = make(mesh, stage, **options)
    history = []
    for batch in batches():
        state, metrics = step(state, batch)
        history.append({k: float(v) for k, v in metrics.items() if k != "aux"})
    return history, state, layout, step


@pytest.fixture(scope="module")
def reference():
    """Train on one device with nothing of zerojax."""
    params, tx = init(jax.random.key(0)), optax.adamw(1e-2)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates)
        return new, opt_state, loss, optax.tree.norm(grads), optax.tree.norm(new)

    history = []
    for batch in batches():
        params, opt_state, loss, grad_norm, param_norm = step(params, opt_state, batch)
        history.append(
            {"loss": float(loss), "grad_norm": float(grad_norm), "param_norm": float(param_norm)}
        )
    return history, params


def assert_same(history, state, layout, reference, tolerance=1e-4):
    for got, want in zip(history, reference[0], strict=True):
        for name in want:
            np.testing.assert_allclose(got[name], want[name], rtol=tolerance, err_msg=name)
    logical = zerojax.unpad(state.params, layout)
    for leaf, a, b in zip(
        layout.leaves, jax.tree.leaves(logical), jax.tree.leaves(reference[1]), strict=True
    ):
        np.testing.assert_allclose(np.asarray(a), b, atol=20 * tolerance * 1e-2, err_msg=leaf.path)


OPTIONS = {
    "plain": {},
    "once": {"accumulate": 4, "reduce": "once"},
    "each, clipped where nothing is to clip": {"accumulate": 4, "reduce": "each", "clip_norm": 1e9},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_and_option_equals_one_device(stage, options, reference, mesh8):
    if stage == 3 and options.get("reduce") == "once":
        with pytest.raises(ValueError, match="stage 3 never holds one"):
            make(mesh8, stage, **options)
        return
    history, state, layout, step = train(mesh8, stage, **options)
    assert_same(history, state, layout, reference)
    assert int(state.step) == NUM_STEPS
    assert step.num_compiled == 1, "the second step compiles nothing"


MESHES = {
    "explicit": lambda: (jax.make_mesh((8,), ("data",)), {}),
    "model axis": lambda: (
        zerojax.make_mesh({"data": 4, "model": 2}),
        {"specs": {"embed": P(), "stack": {"norm": P(), "up": P(None, None, "model"),
                   "down": P(None, "model")}, "out": P(), "bias": P()}},
    ),
    "explicit model axis": lambda: (
        jax.make_mesh((4, 2), ("data", "model")),
        {"specs": {"embed": P(), "stack": {"norm": P(), "up": P(None, None, "model"),
                   "down": P(None, "model")}, "out": P(), "bias": P()}},
    ),
    "hybrid": lambda: (
        zerojax.make_mesh({"replica": 2, "fsdp": 4}),
        {"axis": "fsdp", "batch_axes": ("replica", "fsdp")},
    ),
    "hybrid, wider states": lambda: (
        zerojax.make_mesh({"replica": 2, "fsdp": 4}), {"axis": WIDER},
    ),
    "two axes": lambda: (
        zerojax.make_mesh({"x": 2, "y": 4}), {"axis": ("x", "y")},
    ),
    "one device": lambda: (zerojax.make_mesh({"data": 1}), {}),
}  # fmt: skip


@pytest.mark.parametrize("make_mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, {"accumulate": 2, "reduce": "once"}),
        (2, {"accumulate": 2}),
        (3, {}),
        (3, {"accumulate": 2, "reshard_after_forward": False}),
    ],
    ids=["1 once", "2 each", "3", "3 kept"],
)
def test_every_mesh_equals_one_device(make_mesh, stage, options, reference):
    mesh, layout_options = make_mesh()
    history, state, layout, _ = train(mesh, stage, layout_options=layout_options, **options)
    assert_same(history, state, layout, reference)


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_the_cast_masters_and_bytes_are_as_predicted(stage, mesh8):
    layout, state, step = make(mesh8, stage, precision=MIXED)
    predicted = layout.bytes_per_device(optax.adamw(1e-2), zerojax.Recipe(precision=MIXED))
    for batch in [None, *batches()]:
        if batch is not None:
            state, _ = step(state, batch)
        params, masters = zerojax.unpad(state.params, layout), zerojax.unpad(state.masters, layout)
        for leaf, p, m in zip(
            layout.leaves, jax.tree.leaves(params), jax.tree.leaves(masters), strict=True
        ):
            assert (p.dtype, m.dtype) == (jnp.bfloat16, jnp.float32)
            cast = np.asarray(m).astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(p), cast, err_msg=leaf.path)
        assert held(state.params) == predicted["parameters"]
        assert held(state.masters) == predicted["masters"]
        assert held(state.opt_state) == predicted["optimizer"]


def test_mixed_precision_stages_learn_the_same(mesh8):
    want = [m["loss"] for m in train(mesh8, 0, precision=MIXED)[0]]
    for stage, reduce_dtype, accumulate, reshard in (
        (1, None, 2, True),
        (2, jnp.float32, 2, True),
        (3, None, 1, True),
        (3, jnp.float32, 2, True),
        (3, jnp.float32, 1, False),
    ):
        precision = dataclasses.replace(MIXED, reduce=reduce_dtype)
        options = {"accumulate": accumulate, "reshard_after_forward": reshard}
        history, *_ = train(mesh8, stage, precision=precision, **options)
        # bf16 has 8 bits: sums in another order differ by 2**-8 of a logit's size
        np.testing.assert_allclose([m["loss"] for m in history], want, atol=2**-8 * 4)


def test_shapes_of_the_abstract_state_equal_the_real_one(mesh8):
    for stage in STAGES:
        _, state, step = make(mesh8, stage, precision=MIXED)
        shapes = step.abstract_state()
        after, _ = step(state, batches()[0])
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(shapes), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        lowered = step.lower(shapes, {"tokens": jax.ShapeDtypeStruct((32, 9), jnp.int32)})
        assert lowered.compile().memory_analysis() is not None


def test_the_state_is_donated(mesh8):
    _layout, state, step = make(mesh8, 2, precision=MIXED)
    after, _ = step(state, batches()[0])
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.masters)))
    text = step.lower(after, batches()[0]).compile().as_text() or ""
    aliased = re.findall(r"\(\d+, \{\}, (?:may|must)-alias\)", text)
    assert len(aliased) == len(jax.tree.leaves(after)), "every leaf is written over its old self"


def compiled_text(mesh, stage, **options):
    layout, state, step = make(mesh, stage, **options)
    return layout, step.lower(state, batches()[0]).compile().as_text() or ""


def test_reduced_once_means_once(mesh8):
    """Four microbatches, one reduction: no weight is reduced inside the loop over microbatches."""
    _, once = compiled_text(mesh8, 1, accumulate=4, reduce="once")
    _, each = compiled_text(mesh8, 2, accumulate=4, reduce="each")

    def reductions_in_loops(text):
        entry = text.index("ENTRY")
        return len(re.findall(r" (?:all-reduce|reduce-scatter)(?:-start)?\(", text[:entry]))

    assert reductions_in_loops(once) == 0
    assert reductions_in_loops(each) > 0
    assert " reduce-scatter(" in once, "an explicit reduce-scatter, on the CPU too"


def test_between_processes_on_cpus_a_norm_is_one_message(mesh8, monkeypatch):
    """XLA sums the squares of each leaf by itself, and gloo sends a message for each."""

    def num_scalars():
        _, text = compiled_text(mesh8, 2)
        results = re.findall(r"= (.*) all-reduce(?:-start)?\(", text)
        return sum(len(re.findall(r"f32\[\]", result)) for result in results)

    monkeypatch.setattr("zerojax.train._update.uses_gloo", lambda layout: True)
    # the loss; of gradients and of parameters, a padded leaf and the rest
    assert num_scalars() == 5
    test_clipping_equals_optax(mesh8)


def test_clipping_equals_optax(mesh8):
    limit = 0.05
    params, tx = (
        init(jax.random.key(0)),
        optax.chain(optax.clip_by_global_norm(limit), optax.sgd(1.0)),
    )
    grads = jax.jit(jax.grad(loss_fn))(params, batches()[0])
    assert optax.tree.norm(grads) > 2 * limit
    updates, _ = tx.update(grads, tx.init(params), params)
    want = optax.apply_updates(params, updates)
    for stage in STAGES:
        layout, state, step = make(mesh8, stage, tx=optax.sgd(1.0), clip_norm=limit)
        state, metrics = step(state, batches()[0])
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
        got = zerojax.unpad(state.params, layout)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.parametrize(
    "make_mesh", [MESHES["explicit"], MESHES["two axes"]], ids=["explicit", "auto"]
)
def test_metrics_and_aux(make_mesh):
    mesh, layout_options = make_mesh()
    tx = optax.adam(1e-2)

    def with_aux(params, batch):
        loss = loss_fn(params, batch)
        return loss, {"double": 2 * loss, "examples": jnp.int32(batch["tokens"].shape[0])}

    for accumulate, reduce in ((1, "each"), (4, "each"), (4, "once")):
        _, state, step = make(
            mesh, 1, tx=tx, loss=with_aux, has_aux=True, accumulate=accumulate, reduce=reduce,
            layout_options=layout_options,
        )  # fmt: skip
        state, metrics = step(state, batches()[0])
        state, metrics = step(state, batches()[1])
        np.testing.assert_allclose(metrics["aux"]["double"], 2 * metrics["loss"], rtol=1e-5)
        assert int(metrics["aux"]["examples"]) == 32, "counts add up to the batch"


def test_scalars_and_keys_of_a_batch_go_to_every_device(mesh8):
    def noisy(params, batch):
        noise = jax.random.normal(batch["key"], (24,)) * batch["scale"]
        return loss_fn({**params, "embed": params["embed"] + noise}, batch)

    for reduce in ("once", "each"):
        _, state, step = make(mesh8, 1, loss=noisy, accumulate=2, reduce=reduce)
        batch = {**batches()[0], "key": jax.random.key(1), "scale": jnp.float32(0.1)}
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"])


def test_optimizers_that_need_the_value_get_it(mesh8):
    history, *_ = train(mesh8, 2, tx=optax.polyak_sgd(max_learning_rate=0.5))
    assert history[-1]["loss"] < history[0]["loss"]


def test_wrong_input_is_refused_with_what_is_expected(mesh8):
    layout, state, step = make(mesh8, 2, accumulate=2)
    with pytest.raises(
        ValueError, match=r"'tokens' has 24 examples.*multiple of 16.*microbatches, 8 x 2"
    ):
        step(state, {"tokens": jnp.zeros((24, 9), jnp.int32)})
    assert not any(x.is_deleted() for x in jax.tree.leaves(state)), "nothing is lost"
    with pytest.raises(TypeError, match="GradientTransformation"):
        zerojax.make_train_step(loss_fn, 1e-3, layout)
    with pytest.raises(ValueError, match=r"missing \['bias'\]"):
        step.init(
            lambda key: {k: v for k, v in init(key).items() if k != "bias"}, jax.random.key(0)
        )
    other = make(mesh8, 2, precision=MIXED)[1]
    with pytest.raises(ValueError, match="precision"):
        step(other, batches()[0])


def test_what_is_gathered_was_cast_before(mesh8):
    """bf16 parameters with fp32 masters: no weight is asked whole in fp32."""
    for stage in (1, 2, 3):
        layout, state, step = make(mesh8, stage, precision=MIXED)
        text = step.lower(state, batches()[0]).as_text()
        whole = re.findall(
            r"sharding_constraint .*\[\{\}(?:, \{\})+\]> : tensor<([\dx]+)x(\w+)>", text
        )
        assert len(whole) >= len(layout.leaves)
        assert {dtype for _, dtype in whole} == {"bf16"}, f"stage {stage}"
