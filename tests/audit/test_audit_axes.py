"""The audit over several mesh axes: what is whose theory, and gathers that run in stages."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.audit import audit
from zerojax.audit._match import Matcher, pads, regroups
from zerojax.planner import theory_of
from zerojax.recipe import Recipe

ROWS, COLS, BATCH = 128, 96, 64
WEIGHT = {"w": jax.ShapeDtypeStruct((ROWS, COLS), jnp.float32)}
PSI = ROWS * COLS
TX = optax.sgd(0.1, momentum=0.9)


def layout_on(axes, stage, axis=None, shapes=None, **options):
    mesh = zerojax.make_mesh(axes)
    shapes = WEIGHT if shapes is None else shapes
    return zerojax.make_layout(shapes, mesh, stage=stage, axis=axis or tuple(axes), **options)


def ring(n):
    return (n - 1) / n


# ------------------------------------------------------------------ theory


@pytest.mark.parametrize(("stage", "number"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_theory_is_the_papers_where_every_leaf_is_partitioned(stage, number):
    theory = theory_of(layout_on({"data": 8}, stage), Recipe())
    assert theory.elements == number * PSI * ring(8)
    assert set(theory.by_axes) == {("data",)}


@pytest.mark.parametrize(
    ("stage", "reduce", "gathers", "reductions"),
    [(1, None, 1, 1), (1, "each", 1, 4), (2, None, 1, 4), (2, "once", 1, 1), (3, None, 8, 4)],
)
def test_theory_counts_microbatches(stage, reduce, gathers, reductions):
    theory = theory_of(layout_on({"data": 8}, stage), Recipe(accumulate=4, reduce=reduce))
    assert theory.elements == (gathers + reductions) * PSI * ring(8)


def test_theory_of_leaves_that_stay_whole_and_of_padding():
    shapes = {"w": WEIGHT["w"], "odd": jax.ShapeDtypeStruct((1001, 4), jnp.float32),
              "bias": jax.ShapeDtypeStruct((COLS,), jnp.float32)}  # fmt: skip
    theory = theory_of(layout_on({"data": 8}, 2, shapes=shapes), Recipe())
    stored = PSI + 1008 * 4
    assert theory.elements == pytest.approx((2 * stored + 2 * COLS) * ring(8))


def test_theory_reduces_shards_over_batch_axes_beyond_zeros():
    layout = layout_on({"replica": 2, "data": 4}, 2, "data", batch_axes=("replica", "data"))
    theory = theory_of(layout, Recipe()).by_axes
    assert theory[("data",)] == 2 * PSI * ring(4)
    assert theory[("replica",)] == 2 * PSI / 4 * ring(2)


HYBRID = {"axis": "data", "batch_axes": ("replica", "data")}
WIDER = {"parameter": "data", "gradient": ("replica", "data"), "optimizer": ("replica", "data")}


@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (2, 1), (3, 2)])
def test_theory_of_wider_states_moves_shards_across_replicas(stage, gathers):
    """Shards of gradients are reduced across replicas, and new shards of parameters gathered."""
    layout = layout_on({"replica": 2, "data": 4}, stage, WIDER)
    theory = theory_of(layout, Recipe()).by_axes
    assert theory[("data",)] == (1 + gathers) * PSI * ring(4)
    assert theory[("replica",)] == 2 * PSI / 4 * ring(2)
    near = layout_on({"replica": 2, "data": 4}, stage, WIDER | {"gradient": "data"})
    assert theory_of(near, Recipe()).by_axes[("replica",)] == 3 * PSI / 4 * ring(2)


def test_theory_counts_what_the_users_own_axes_leave():
    layout = layout_on({"data": 4, "model": 2}, 2, "data", specs={"w": P(None, "model")})
    theory = theory_of(layout, Recipe())
    assert theory.by_axes == {("data",): 2 * PSI / 2 * ring(4)}


# ------------------------------------------------------------------ programs


def loss_fn(params, x):
    y = x @ params["w"]
    return jnp.mean((y - jnp.mean(y, axis=-1, keepdims=True)) ** 2)


def compile_step(layout, gather=None, reduce=None, params=None):
    """Compile stage 2 by hand; `gather` and `reduce` move one leaf along several axes."""
    mesh = layout.mesh
    at = params or layout.params
    shard, whole = layout.grads["w"], at["w"]
    x = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.float32)

    def step(params, state, x):
        g = jax.grad(loss_fn)(params, x)["w"]
        g = jax.lax.with_sharding_constraint(g, shard) if reduce is None else reduce(g, mesh)
        p = jax.lax.with_sharding_constraint(params["w"], shard)
        updates, state = TX.update({"w": g}, state, {"w": p})
        p = jax.lax.optimization_barrier(p + updates["w"])
        p = jax.lax.with_sharding_constraint(p, whole) if gather is None else gather(p, mesh)
        return {"w": p}, state

    states = jax.eval_shape(TX.init, WEIGHT)
    held = (at, layout.opt_state(TX))
    return (
        jax.jit(step, in_shardings=(*held, layout.batch), out_shardings=held, donate_argnums=(0, 1))
        .lower(WEIGHT, states, x)
        .compile()
    )


def steps(x, mesh, *specs):
    for spec in specs:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        x = jax.lax.optimization_barrier(x)
    return x


def test_a_partition_over_two_axes_may_be_gathered_in_two_steps():
    layout = layout_on({"x": 2, "y": 4}, 2)
    report = audit(compile_step(layout, lambda p, mesh: steps(p, mesh, P("x"), P())), layout)
    assert report.problems == ()
    assert {m.spans for m in report.moves if m.role == "gather"} == {("y",), ("x",)}
    assert report.judged_volume == pytest.approx(2 * ring(8), rel=0.01)
    assert set(report.volume_by_axis) == {"x x y"}


def test_a_gather_of_the_axes_in_the_wrong_order_moves_shards_about():
    layout = layout_on({"x": 2, "y": 4}, 2)
    wrong = compile_step(layout, lambda p, mesh: steps(p, mesh, P(("y", "x")), P()))
    assert "shuffle" in {problem.kind for problem in audit(wrong, layout).problems}


def near_and_far(p, mesh):
    """Gather the shards of one axis in two steps, over pairs and then over what is left."""
    pairs = [[i, i + 1] for i in range(0, 8, 2)]
    rest = [[0, 2, 4, 6], [1, 3, 5, 7]]

    def body(p):
        p = jax.lax.all_gather(p, "data", axis_index_groups=pairs, tiled=True)
        return jax.lax.all_gather(p, "data", axis_index_groups=rest, tiled=True)

    return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(p)


def test_one_axis_may_be_gathered_in_parts():
    layout = layout_on({"data": 8}, 2)
    report = audit(compile_step(layout, near_and_far), layout)
    assert report.problems == ()
    assert {m.spans for m in report.moves if m.role == "gather"} == {
        ("data[2/8]",), ("data[4/8]",),
    }  # fmt: skip
    assert report.judged_volume == pytest.approx(2 * ring(8), rel=0.01)


def test_model_parallel_volume_is_reported_and_not_judged():
    layout = layout_on({"data": 4, "model": 2}, 2, "data", specs={"w": P(None, "model")})
    report = audit(compile_step(layout), layout)
    assert report.problems == ()
    model = report.volume_by_axis["model"]
    assert model.theory is None
    assert model.seen > 0
    assert report.volume_by_axis["data"].theory == pytest.approx(2 * ring(4) / 2)
    assert report.volume == pytest.approx(3 * ring(4) / 2, rel=0.01)  # a CPU's all-reduce + slice


def test_hybrid_sharding_is_judged_by_both_axes():
    layout = layout_on({"replica": 2, "data": 4}, 2, "data", batch_axes=("replica", "data"))
    report = audit(compile_step(layout), layout)
    assert report.problems == ()
    assert report.theory_volume == pytest.approx(2 * ring(4) + 2 / 4 * ring(2))


def whole_first(g, mesh):
    return steps(g, mesh, P(), P("data"))


def test_whole_gradients_across_replicas_are_a_problem():
    layout = layout_on({"replica": 2, "data": 4}, 2, **HYBRID)
    report = audit(compile_step(layout, reduce=whole_first), layout)
    (problem,) = [one for one in report.problems if one.kind == "slow links"]
    assert "along replica" in problem.expected
    assert "along replica x data" in problem.where


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("given", [HYBRID, {"axis": WIDER}], ids=["same", "wider"])
def test_a_step_moves_shards_across_replicas(stage, given):
    layout = layout_on({"replica": 2, "data": 4}, stage, **given)
    step = zerojax.make_train_step(loss_fn, TX, layout)
    report = step.audit(jax.ShapeDtypeStruct((BATCH, ROWS), jnp.float32))
    assert report.problems == ()
    far = [move for move in report.moves if "replica" in move.axes and move.record.elements > 1]
    assert sum(move.judged for move in far) == pytest.approx(2 * PSI / 4 * ring(2))
    assert {move.spans for move in far} == {("replica",)}


def test_a_loop_of_ones_own_reduces_shards_across_replicas():
    layout = layout_on({"replica": 2, "data": 4}, 2, WIDER)
    tx = zerojax.sharded(TX, layout)

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return zerojax.apply_updates(params, updates, layout), state

    held = (layout.params, layout.opt_state(TX))
    jitted = jax.jit(
        step, in_shardings=(*held, layout.batch), out_shardings=held, donate_argnums=(0, 1)
    )
    x = jax.ShapeDtypeStruct((BATCH, ROWS), jnp.float32)
    report = audit(jitted.lower(WEIGHT, jax.eval_shape(TX.init, WEIGHT), x).compile(), layout)
    assert {m.spans for m in report.moves if m.role == "sliced"} == {("data",), ("replica",)}


def test_devices_in_another_order_are_found_on_the_layouts_mesh():
    layout = layout_on({"x": 2, "y": 4}, 2, "y", batch_axes=("x", "y"))
    turned = np.array(jax.devices()).reshape(4, 2).T
    other = jax.sharding.Mesh(turned, ("x", "y"))
    compiled = compile_step(zerojax.make_layout(WEIGHT, other, stage=2, axis="y",
                                                batch_axes=("x", "y")))  # fmt: skip
    assert {m.spans for m in audit(compiled, layout).moves if m.role == "gather"} != {("y",)}
    own = zerojax.make_layout(WEIGHT, other, stage=2, axis="y", batch_axes=("x", "y"))
    assert {m.spans for m in audit(compiled, own).moves if m.role == "gather"} == {("y",)}


def test_another_number_of_devices_is_refused():
    small = zerojax.make_mesh({"data": 4}, devices=jax.devices()[:4])
    compiled = compile_step(layout_on({"data": 8}, 2))
    with pytest.raises(ValueError, match="has 8, the layout's mesh"):
        audit(compiled, zerojax.make_layout(WEIGHT, small, stage=2))


# ------------------------------------------------------------------ whose tensor


@functools.cache
def matcher():
    shapes = {
        "blocks": {"qkv": (6, 512, 1536), "scale": (6, 512)},
        "embed": (1000, 512),
        "head": (512, 4000),
    }
    shapes = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    mesh = zerojax.make_mesh({"data": 8})
    return Matcher(zerojax.make_layout(shapes, mesh, stage=3), [(333, 777)])


@pytest.mark.parametrize(
    ("shape", "form", "leaf"),
    [
        ((6, 512, 1536), "leaf", 0),
        ((1, 512, 1536), "layer", 0),
        ((1536, 512), "layer", 0),  # turned
        ((8, 64, 1536), "layer", 0),  # split where it is gathered
        ((512, 12, 128), "layer", 0),  # as heads
        ((48, 64, 1536), "leaf", 0),  # shard after shard, as a GPU gathers along dim 1
        ((786432,), "layer", 0),  # flat
        ((128, 1536), "stage", 0),  # gathered over a part of the axis
        ((6, 512), "leaf", 1),
        ((1000, 512), "leaf", 2),
        ((1000, 256), "half", 2),
        ((512, 4000), "leaf", 3),
        ((528, 4128), "leaf", 3),  # rounded up to tiles
        ((333, 777), "optimizer", None),
    ],
)
def test_a_tensor_leads_to_its_leaf(shape, form, leaf):
    match = matcher().match(shape)
    assert match.form == form
    assert match.leaves[:1] == (() if leaf is None else (leaf,))


@pytest.mark.parametrize("shape", [(96, 1536), (8, 100, 512), (64, 50, 512), (512, 5000), ()])
def test_an_activation_leads_to_none(shape):
    assert matcher().match(shape).form == ""


def test_in_a_loop_over_layers_a_layer_is_likelier():
    layout = layout_on({"data": 8}, 3, shapes={
        "a": jax.ShapeDtypeStruct((3, 256, 64), jnp.float32),
        "b": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    }, rules=(zerojax.Rule(path="a", stacked=1),))  # fmt: skip
    match = Matcher(layout).match
    assert match((256, 64)).leaves == (1,)
    assert match((256, 64), [3]).leaves == (0,)
    assert match((256, 64), [2]).leaves == (0,)  # a layer ahead
    assert match((256, 64), [5]).leaves == (1,)


def test_dims_are_regrouped_and_padded_within_bounds():
    assert regroups((2, 3, 5), (6, 5))
    assert not regroups((2, 3, 5), (10, 4))
    assert pads((132, 64), (128, 64))
    assert not pads((137, 64), (128, 64))
    assert not pads((120, 64), (128, 64))
