"""States in the host's memory: equal results, ZeRO-Offload's bytes and traffic, refusals."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from zerojax.audit import Program
from zerojax.hardware import find_hardware
from zerojax.hlo import find_host_moves, parse_module
from zerojax.memory import _remat
from zerojax.models import gpt

WIDTH, NUM_LAYERS, NUM_STEPS = 64, 3, 3
PRECISION = zerojax.Precision(params=jnp.float32, master=jnp.float32)
MIXED = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
HOSTED = zerojax.Recipe(precision=MIXED, offload=True)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "layers": {"w": jax.random.normal(keys[0], (NUM_LAYERS, WIDTH, WIDTH)) / 8},
        "head": jax.random.normal(keys[1], (WIDTH, WIDTH)),
        "bias": jax.random.normal(keys[2], (WIDTH,)),  # too small to leave the device
    }


def loss(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"]["w"])
    return jnp.mean((x @ params["head"] + params["bias"] - batch) ** 2)


def train(tx, stage, *, offload, precision=PRECISION, mesh=None):
    key = jax.random.key(0)
    mesh = zerojax.make_mesh({"data": 8}) if mesh is None else mesh
    rules = [zerojax.Rule(path="layers", stacked=1)]
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage, rules=rules)
    recipe = zerojax.Recipe(precision=precision, clip_norm=0.5, offload=offload)
    step = zerojax.make_train_step(loss, tx, layout, recipe)
    state = step.init(init, key)
    batch = jax.device_put(jax.random.normal(jax.random.key(1), (16, WIDTH)), layout.batch)
    metrics = {}
    for _ in range(NUM_STEPS):
        state, metrics = step(state, batch)
    assert step.num_compiled == 1
    return state, metrics


@functools.cache
def trained_on_device(name, stage, precision):
    return train(OPTIMIZERS[name], stage, offload=False, precision=precision)


def values(tree):
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(tree)]


OPTIMIZERS = {
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    "lion": optax.lion(1e-3),
    "momentum": optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(1e-2, momentum=0.9)),
}
CASES = [
    ("adamw", 1, zerojax.Precision()),
    ("adamw", 2, PRECISION),
    ("momentum", 3, PRECISION),
    ("lion", 2, PRECISION),
]


@pytest.mark.parametrize(("name", "stage", "precision"), CASES)
def test_an_offloaded_step_learns_the_same(name, stage, precision):
    state, metrics = train(OPTIMIZERS[name], stage, offload=True, precision=precision)
    want, wanted = trained_on_device(name, stage, precision)
    for a, b in zip(values((state, metrics)), values((want, wanted)), strict=True):
        # The same operations in fp32, fused otherwise: a few roundings of 2**-24 in each step.
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_an_offloaded_step_without_a_bound_clips_no_gradient():
    layout = zerojax.make_layout(
        jax.eval_shape(init, jax.random.key(0)), zerojax.make_mesh({"data": 8}), stage=2
    )
    batch, states = jnp.ones((16, WIDTH)), []
    for offload in (False, True):
        recipe = zerojax.Recipe(precision=PRECISION, offload=offload)
        step = zerojax.make_train_step(
            lambda params, x: 1e6 * loss(params, x), optax.sgd(1e-7), layout, recipe
        )
        state, metrics = step(step.init(init, jax.random.key(0)), batch)
        assert metrics["grad_norm"] > 1e5
        states.append(state)
    for a, b in zip(*map(values, states), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def kinds_of(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.size > 1024}


def test_states_stay_where_the_policy_puts_them():
    state, _ = train(OPTIMIZERS["adamw"], 2, offload=True)
    assert kinds_of((state.opt_state, state.masters)) == {"pinned_host"}
    assert kinds_of(state.params) == {"device"}
    assert state.masters["bias"].sharding.memory_kind == "device"


def test_a_mesh_with_explicit_axes_is_offloaded_too():
    mesh = jax.make_mesh((8,), ("data",))
    state, _ = train(OPTIMIZERS["adamw"], 2, offload=True, mesh=mesh)
    assert kinds_of(state.opt_state) == {"pinned_host"}
    want, _ = trained_on_device("adamw", 2, PRECISION)
    np.testing.assert_allclose(values(state)[-1], values(want)[-1], rtol=1e-4)


# ------------------------------------------------------------------ refusals


def test_a_backend_without_host_memory_is_refused(monkeypatch):
    monkeypatch.setattr(_remat, "memory_kinds", lambda _: ("device",))
    with pytest.raises(ValueError, match=r"'pinned_host'.*backend 'cpu'.*only device") as caught:
        train(OPTIMIZERS["adamw"], 2, offload=True)
    assert "Recipe(offload=True)" in str(caught.value)


@pytest.mark.parametrize(
    ("tx", "match"),
    [
        (
            optax.lamb(1e-2),
            "uses reduce_sum.* for leaf 'head'.*Adam.*no Recipe.offload=True.",
        ),
        (optax.MultiSteps(optax.adam(1e-2), 2), "one leaf from others.*'layers/w'"),
    ],
)
def test_an_optimizer_that_mixes_is_refused(tx, match):
    with pytest.raises(ValueError, match=match):
        train(tx, 2, offload=True)


# ------------------------------------------------------------------ what moves


PROGRAM = """HloModule step, entry_computation_layout={()->()}

%there (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8]{0} parameter(0)
}, execution_thread="host"

%body (s: (s32[], f32[4,8], f32[4,8])) -> (s32[], f32[4,8], f32[4,8]) {
  %s = (s32[], f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %far = f32[4,8]{1,0:S(5)} get-tuple-element(%s), index=1
  %near = f32[4,8]{1,0} get-tuple-element(%s), index=2
  %up = f32[1,8]{1,0} dynamic-slice(%far, %i, %i), dynamic_slice_sizes={1,8}
  %down-start = ((f32[4,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[4,8]{1,0:S(5)}, u32[]) \
dynamic-update-slice-start(%far, %up, %i, %i)
  %down = f32[4,8]{1,0:S(5)} dynamic-update-slice-done(%down-start)
  ROOT %next = (s32[], f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}) tuple(%i, %down, %near)
}

%more (t: (s32[], f32[4,8], f32[4,8])) -> pred[] {
  %t = (s32[], f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: bf16[8], m: f32[8], l: (s32[], f32[4,8], f32[4,8])) -> f32[8] {
  %a = bf16[8]{0} parameter(0)
  %m = f32[8]{0:S(5)} parameter(1)
  %l = (s32[], f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}) parameter(2)
  %x-start = ((bf16[8]{0}, f32[8]{0:S(5)}), (bf16[8]{0}, f32[8]{0:S(5)}), u32[]) \
custom-call-start(%a, %m), async_execution_thread="host", custom_call_target="HostExecute", \
called_computations={%there}
  %x-done = (bf16[8]{0}, f32[8]{0:S(5)}) custom-call-done(%x-start)
  %m2 = f32[8]{0:S(5)} get-tuple-element(%x-done), index=1
  %c-start = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%m2)
  %c-done = f32[8]{0} copy-done(%c-start)
  %loop = (s32[], f32[4,8]{1,0:S(5)}, f32[4,8]{1,0}) while(%l), \
condition=%more, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %back = f32[8]{0:S(5)} copy(%c-done)
}
"""


def test_every_spelling_of_a_move_is_counted():
    moves = {m.name: m for m in find_host_moves(parse_module(PROGRAM))}
    found = {name: (m.to_host, m.from_host, m.runs) for name, m in moves.items()}
    assert found == {
        "x-start": (16, 16, 1),  # two bytes an element each way; what lies there stays
        "c-start": (0, 32, 1),
        "back": (32, 0, 1),
        "up": (0, 32, 4),
        "down": (32, 0, 4),
    }
    assert [name for name, m in moves.items() if m.is_computed] == ["x-start"]


def compiled_step(target, stage, *, config=None, **chosen):
    """Compile a scanned GPT; a small one by default."""
    config = config or gpt.Config(
        num_layers=2, width=64, num_heads=4, vocab_size=256, context=32
    )  # fmt: skip
    mesh = (
        zerojax.make_mesh({"data": 8})
        if target is None
        else zerojax.topology_mesh(target, {"data": 8})
    )
    make, key, tx = functools.partial(gpt.init, config), jax.random.key(0), optax.adamw(1e-3)
    layout = zerojax.make_layout(jax.eval_shape(make, key), mesh, stage=stage)
    recipe = zerojax.Recipe(precision=MIXED, clip_norm=1.0, offload=True, **chosen)
    step = zerojax.make_train_step(functools.partial(gpt.loss, config), tx, layout, recipe)
    shape = (8 * recipe.accumulate, config.context + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    return layout, step.lower(step.abstract_state(), batch).compile()


@pytest.mark.parametrize(
    ("chosen", "each"),
    [
        ({}, 12),  # a gradient and a parameter down, the new one up
        ({"precision": "bf16"}, 4),
        ({"precision": "bf16", "accumulate": 4}, 6),  # of a sum in fp32
        ({"precision": zerojax.Precision(params=jnp.bfloat16), "accumulate": 4}, 6),
    ],
    ids=["fp32", "bf16", "accumulated", "without masters"],
)
def test_a_plan_counts_what_an_audit_expects_between_device_and_host(chosen, each, mesh8):
    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    tx, recipe = optax.adam(1e-3), zerojax.Recipe(offload=True, **chosen)
    layout = zerojax.make_layout(params, mesh8, stage=2)
    step = zerojax.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, layout, recipe)
    report = step.audit(jax.ShapeDtypeStruct((32, 512), jnp.float32))
    planned = zerojax.plan(params, tx, hardware="h100", num_devices=8, stage=2, recipe=recipe)
    bandwidth = find_hardware("h100").host_bandwidth
    assert report.host_traffic.theory == each * 512 * 512 // 8
    assert planned.time.host * bandwidth == pytest.approx(report.host_traffic.theory)


def test_a_host_that_is_given_too_much_is_caught():
    layout, compiled = compiled_step(None, 2)
    program = Program.of(compiled)
    report = zerojax.audit(program, layout)
    report.raise_if_problems()
    assert report.memory.host > 0
    masters = [x for x in program.inputs if "masters" in x.path and x.memory_kind]
    entry = parse_module(program.text).entry.parameters[masters[0].number or 0]
    sent = f"  %sent = {entry.type} custom-call(%{entry.name}, %{entry.name}, %{entry.name}), "
    planted = sent + 'custom_call_target="HostExecute"\n'
    head, tail = program.text.split("\nENTRY ", 1)
    first, rest = tail.split("\n  ROOT ", 1)
    text = f"{head}\nENTRY {first}\n{planted}  ROOT {rest}"
    found = zerojax.audit(dataclasses.replace(program, text=text), layout).problems
    assert [problem.kind for problem in found] == ["host traffic"]
    assert "Recipe(offload=True)" in found[0].remedy


#: 1.2e9 parameters: a step holds one layer's gradients whole, 1 / (24 * 1.125) of the bound.
LARGE = gpt.Config(num_layers=24, width=2048, num_heads=16, vocab_size=8192, context=128)


@pytest.mark.aot("cuda")
def test_gradients_that_are_summed_once_lie_as_the_host_takes_them():
    """Biases of layers are scattered by columns, which XLA refused: f32[2,64]{0,1}."""
    layout, compiled = compiled_step("h100:1x8", 1, accumulate=2)
    report = zerojax.audit(compiled, layout, dataclasses.replace(HOSTED, accumulate=2))
    report.raise_if_problems()
    assert report.host_traffic.total == pytest.approx(report.host_traffic.theory, rel=0.01)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu")),
        pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
    ],
)
def test_the_device_holds_parameters_and_a_share_of_gradients(target):
    layout, compiled = compiled_step(target, 2, config=LARGE)
    report = zerojax.audit(compiled, layout, HOSTED)
    report.raise_if_problems()
    psi = layout.num_params
    assert report.memory.peak < 1.1 * (2 * psi + 2 * psi / 8)
    # fp32 masters and two moments; what is too small stays on the device.
    assert report.memory.optimizer + report.memory.masters < 0.001 * 12 * psi / 8
    theory = 4 * psi / 8  # ZeRO-Offload: 2 Psi of gradients down, 2 Psi of parameters up
    assert report.host_traffic.total == pytest.approx(theory, rel=0.01)
    assert report.host_traffic.theory == pytest.approx(theory, rel=0.01)
