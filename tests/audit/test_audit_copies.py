"""Copies of the parameters beside them: an average in a loop of one's own, a reference model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import (
    BATCH,
    HIDDEN,
    LIST,
    PAIR,
    TX,
    WIDTH,
    layer,
    mse,
    pair_loss,
    shapes_of,
)
from zerojax.audit import audit

X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
BYTES = 4 * 2 * WIDTH * 128


@pytest.mark.parametrize("at", ["whole", "params", "masters"])
@pytest.mark.parametrize("stage", range(4))
def test_an_average_lies_as_masters_do(make, stage, at):
    layout, whole = make(stage), at == "whole"
    tx = zerojax.sharded(TX, layout)
    everywhere = jax.tree.map(lambda _: layout.sharding(P()), layout.masters)
    at = everywhere if whole else getattr(layout, at)

    def step(params, opt_state, ema, x):
        grads = jax.grad(zerojax.gather_where_used(pair_loss, layout))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        if not whole:  # a whole one that changes has to gather at stage 3
            ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        return params, opt_state, ema

    places = (layout.params, layout.opt_state(TX), at)
    jitted = jax.jit(
        step, in_shardings=(*places, layout.batch), out_shardings=places, donate_argnums=(0, 1, 2)
    )
    state = jax.eval_shape(TX.init, layout.shapes)
    report = audit(jitted.lower(layout.shapes, state, layout.shapes, X).compile(), layout)
    is_cut = at["up"].spec != P()
    assert report.memory.other == BYTES // (8 if is_cut else 1)
    assert [p.kind for p in report.problems] == ["placement"] * (stage > 0 and not is_cut)
    assert all("as layout.masters says" in p.remedy for p in report.problems)


def test_an_average_gives_its_buffer_to_the_next_one(make):
    layout = make(2)
    tx = zerojax.sharded(TX, layout)

    def step(ema, params, opt_state, x):  # its place among the arguments tells nothing
        grads = jax.grad(zerojax.gather_where_used(pair_loss, layout))(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        return jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params), params, opt_state

    places = (layout.masters, layout.params, layout.opt_state(TX))
    shapes = (layout.shapes, layout.shapes, jax.eval_shape(TX.init, layout.shapes), X)
    at = {"in_shardings": (*places, layout.batch), "out_shardings": places}
    for donated in ((0, 1, 2), (1, 2)):
        jitted = jax.jit(step, donate_argnums=donated, **at)
        report = audit(jitted.lower(*shapes).compile(), layout)
        assert [p.kind for p in report.problems] == ["donation"] * (0 not in donated)
        assert all("donate_argnums=0" in p.remedy for p in report.problems)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("average", "own"), [("ema", "net"), ("z_ema", "net"), ("ema", "params")])
def test_weights_are_what_the_loss_reads_whatever_the_names(make, stage, average, own):
    """A whole average is told, though it comes first; one that is narrower and cut is not."""
    layout = make(stage)
    tx = zerojax.sharded(TX, layout)
    everywhere = jax.tree.map(lambda _: layout.sharding(P()), layout.masters)
    low = jax.tree.map(lambda x: x.update(dtype=jnp.bfloat16), layout.shapes)

    def step(state, x):
        grads = jax.grad(pair_loss)(state[own], x)
        updates, opt_state = tx.update(grads, state["opt"], state[own])
        params = zerojax.apply_updates(state[own], updates, layout)
        mean = jax.tree.map(
            lambda e, p: (0.9 * e + 0.1 * p).astype(e.dtype), state[average], params
        )
        return {own: params, average: mean, "opt": opt_state}

    state = {own: layout.shapes, "opt": jax.eval_shape(TX.init, layout.shapes)}
    for shapes, at in ((layout.shapes, everywhere), (low, layout.masters)):
        place = {own: layout.params, average: at, "opt": layout.opt_state(TX)}
        given = {"in_shardings": (place, layout.batch), "out_shardings": place}
        compiled = jax.jit(step, donate_argnums=0, **given).lower({**state, average: shapes}, X)
        found = [
            (p.kind, f"copy: 2 leaves, the largest 0/{average}" in p)
            for p in audit(compiled.compile(), layout).problems
        ]
        assert found == ([("placement", True)] if at is everywhere else [])


#: How a state may be packed in which each leaf belongs to a parameter.
PACKED = {
    "in a list": lambda tree: [tree[name] for name in sorted(tree)],
    "by other names": lambda tree: {f"hp_{name}": x for name, x in tree.items()},
    "of one matrix": lambda tree: {"up": tree["up"]},
    "moments by hand": lambda tree: {"m": tree["up"], "v": tree["up"]},
}


def carrying(layout, carried, at, update, dtype=jnp.float32, loss=pair_loss):
    """Compile a step that carries something beside parameters and states."""
    tx = zerojax.sharded(TX, layout)

    def step(params, state, x):
        grads = jax.grad(zerojax.gather_where_used(loss, layout))(params, x)
        updates, opt_state = tx.update(grads, state["opt"], params)
        params, carried = update(zerojax.apply_updates(params, updates, layout), state["held"])
        return params, {"held": carried, "opt": opt_state}

    places = (layout.params, {"held": at, "opt": layout.opt_state(TX)})
    state = {"held": carried, "opt": jax.eval_shape(TX.init, layout.shapes)}
    given = {"in_shardings": (*places, layout.batch), "out_shardings": places}
    jitted = jax.jit(step, donate_argnums=(0, 1), **given)
    return jitted.lower(layout.shapes, state, X.update(dtype=dtype)).compile()


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("pack", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("stage", [1, 3])
def test_states_in_a_tree_of_their_own_lie_as_masters_do(make, stage, pack, is_cut):
    layout = make(stage)
    whole = jax.tree.map(lambda _: layout.sharding(P()), layout.masters)

    def update(params, ema):
        if not is_cut:  # that would have to gather at stage 3
            return params, jax.tree.map(lambda e: 0.9 * e, ema)
        return params, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, pack(params))

    at = pack(layout.masters if is_cut else whole)
    report = audit(carrying(layout, pack(layout.shapes), at, update), layout)
    assert [p.kind for p in report.problems] == ["placement"] * (not is_cut)
    assert all("copy not partitioned" in p.seen for p in report.problems)


@pytest.mark.parametrize("pack", [dict, PACKED["in a list"], PACKED["of one matrix"]])
def test_masters_are_wider_than_their_parameters_if_some_are_not(mesh8, pack):
    """Vectors are often fp32 in both; the new weights are made of masters, gathered in fp32."""
    params = shapes_of(PAIR, jnp.bfloat16) | {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.float32)}
    layout = zerojax.make_layout(params, mesh8, stage=2)
    wide = jax.tree.map(lambda x: x.update(dtype=jnp.float32), params)

    def update(params, held):
        new = jax.tree.map(lambda e, p: e + p.astype(e.dtype), held, pack(params))
        narrow = jax.tree.map(lambda e, p: e.astype(p.dtype), new, pack(params))
        return {**params, **narrow} if isinstance(narrow, dict) else params, new

    def loss(params, x):
        return pair_loss(params, x * params["scale"].astype(x.dtype))

    at = pack(jax.tree.map(lambda _: layout.sharding(P()), layout.masters))
    whole = audit(carrying(layout, pack(wide), at, update, jnp.bfloat16), layout)
    assert any("master not partitioned" in p.seen for p in whole.problems)
    assert not any(p.kind == "precision" for p in whole.problems)


@pytest.mark.parametrize("is_cut", [False, True])
def test_what_has_a_parameters_shape_by_chance_is_no_state(mesh8, is_cut):
    """Statistics of BatchNorm, what a recurrent layer carries of examples, a covariance."""
    layout = zerojax.make_layout(shapes_of(LIST), mesh8, stage=2)
    held = {"mean": (HIDDEN,), "hidden": PAIR["down"], "mask": PAIR["up"]}
    at = dict.fromkeys(held, layout.batch if is_cut else layout.sharding(P()))
    dtypes = {"mean": jnp.float32, "hidden": jnp.float32, "mask": jnp.bool_}
    shapes = {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in held.items()}

    def loss(params, x):
        y = x
        for weights in params.values():
            y = layer(weights, y)
        return mse(y, x)

    def update(params, held):
        return params, {**held, "hidden": jnp.tanh(held["hidden"] * 0.9)}

    assert audit(carrying(layout, shapes, at, update, loss=loss), layout).problems == ()


def test_what_has_no_parameters_shape_is_noted(make):
    """Four copies in one array, say: the layout says nothing of it."""
    layout = make(2)
    held = {"history": jax.ShapeDtypeStruct((4, *PAIR["up"]), jnp.float32)}

    def update(params, held):
        return params, {"history": jnp.roll(held["history"], 1, 0).at[0].set(params["up"])}

    at = {"history": layout.sharding(P())}
    report = audit(carrying(layout, held, at, update), layout)
    assert report.problems == ()
    assert any("1/held/history" in note and "can be cut" in note for note in report.notes)


@pytest.mark.parametrize("stage", range(4))
def test_the_pair_that_lookahead_steps_is_of_parameters(make, stage):
    """As docs/optimizers.md has it, lookahead stands around the wrapped optimizer."""
    layout = make(stage)
    tx = optax.lookahead(zerojax.sharded(TX, layout), sync_period=2, slow_step_size=0.5)
    pair = optax.LookaheadParams(layout.shapes, layout.shapes)
    at = optax.LookaheadParams(layout.params, layout.masters)

    def step(pair, state, x):
        grads = jax.grad(zerojax.gather_where_used(pair_loss, layout))(pair.fast, x)
        updates, state = tx.update(grads, state, pair)
        return optax.apply_updates(pair, updates), state

    state = jax.eval_shape(tx.init, pair)
    places = (at, optax.LookaheadState(layout.opt_state(TX), layout.sharding(P())))
    jitted = jax.jit(
        step, in_shardings=(*places, layout.batch), out_shardings=places, donate_argnums=(0, 1)
    )
    report = audit(jitted.lower(pair, state, X).compile(), layout)
    # Below stage 3 weights that are set back to the slow ones are gathered once more.
    assert {problem.kind for problem in report.problems} <= {"volume"}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("params", [None, jnp.bfloat16])
@pytest.mark.parametrize("stage", range(4))
def test_a_whole_reference_is_no_state(make, stage, params, dtype):
    """Neither the masters of narrower parameters, nor the parameters of wider ones."""
    layout, reference = make(stage), shapes_of(PAIR, dtype)

    def loss(params, batch):
        target = layer(jax.lax.stop_gradient(batch["ref"]), batch["x"])
        return mse(layer(params, batch["x"]), target)

    recipe = params and zerojax.Recipe(precision=zerojax.Precision(params=params))
    step = zerojax.make_train_step(loss, TX, layout, recipe)
    report = step.audit({"x": X, "ref": zerojax.Whole(reference)})
    assert report.problems == ()
    size = BYTES * jnp.dtype(dtype).itemsize // 4
    assert 0 <= report.memory.other - size < 100
    assert report.memory.masters == 0


@pytest.mark.parametrize("name", ["ref", "params"])
def test_a_reference_in_the_batch_of_ones_own_loop_is_no_state(make, name):
    layout = make(2)
    tx = zerojax.sharded(optax.sgd(1e-3), layout)

    def loss(params, batch):
        return mse(layer(params, batch["x"]), layer(batch[name], batch["x"]))

    def step(params, opt_state, batch):
        grads = jax.grad(zerojax.gather_where_used(loss, layout))(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    batch_at = {"x": layout.batch, name: layout.sharding(P())}
    jitted = jax.jit(step, in_shardings=(layout.params, None, batch_at), donate_argnums=(0, 1))
    batch = {"x": X, name: shapes_of(PAIR, jnp.bfloat16)}
    state = jax.eval_shape(tx.init, layout.shapes)
    report = audit(jitted.lower(layout.shapes, state, batch).compile(), layout)
    assert report.problems == ()
    assert (report.memory.parameters, report.memory.other) == (BYTES, BYTES // 2)


MODEL = {
    "a": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),  # too small to be cut
    "down": jax.ShapeDtypeStruct((128, WIDTH), jnp.float32),
    "up": jax.ShapeDtypeStruct((WIDTH, 128), jnp.float32),
}


def forward(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"] + params["a"]


def report_of(layout, step, places, back, **options):
    shapes = (layout.shapes, layout.shapes, jax.eval_shape(TX.init, layout.shapes), X)
    at = {"in_shardings": (*places, layout.batch), "out_shardings": back}
    return audit(jax.jit(step, **at, **options).lower(*shapes).compile(), layout)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_average_before_the_parameters_may_come_back_behind_them(mesh8, stage):
    layout = zerojax.make_layout(MODEL, mesh8, stage=stage)
    tx = zerojax.sharded(TX, layout)
    assert layout.leaves[0].dim is None

    def step(ema, params, opt_state, x):
        loss = zerojax.gather_where_used(lambda p, x: mse(forward(p, x), x), layout)
        updates, opt_state = tx.update(jax.grad(loss)(params, x), opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        return params, opt_state, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)

    ema, params, states = layout.masters, layout.params, layout.opt_state(TX)
    places, back = (ema, params, states), (params, states, ema)
    assert report_of(layout, step, places, back, donate_argnums=(0, 1, 2)).problems == ()


@pytest.mark.parametrize("at", ["params", "whole"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_reference_before_the_parameters_is_read_and_no_state(mesh8, stage, at):
    """What is gathered of one is the loss's own, and not judged."""
    layout = zerojax.make_layout(MODEL, mesh8, stage=stage)
    tx = zerojax.sharded(TX, layout)
    everywhere = jax.tree.map(lambda _: layout.sharding(P()), layout.params)
    where = layout.params if at == "params" else everywhere

    def step(reference, params, opt_state, x):
        target = jax.lax.stop_gradient(forward(reference, x))
        loss = zerojax.gather_where_used(lambda p, b: mse(forward(p, b[0]), b[1]), layout)
        updates, opt_state = tx.update(jax.grad(loss)(params, (x, target)), opt_state, params)
        return zerojax.apply_updates(params, updates, layout), opt_state

    back = (layout.params, layout.opt_state(TX))
    assert report_of(layout, step, (where, *back), back, donate_argnums=(1, 2)).problems == ()


def test_a_copy_that_the_loss_reads_may_be_whole_as_parameters_are(mesh8):
    layout = zerojax.make_layout(MODEL, mesh8, stage=2)
    tx = zerojax.sharded(TX, layout)

    def step(params, target, opt_state, x):
        wanted = jax.lax.stop_gradient(forward(target, x))
        grads = jax.grad(lambda p: mse(forward(p, x), wanted))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = zerojax.apply_updates(params, updates, layout)
        return params, optax.incremental_update(params, target, 0.01), opt_state

    places = (layout.params, layout.params, layout.opt_state(TX))
    assert report_of(layout, step, places, places, donate_argnums=(0, 1, 2)).problems == ()


@pytest.mark.parametrize("beside", ["base", "points"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_frozen_base_is_told_from_examples(mesh8, stage, beside):
    """Both are cut along their first dims, of two sizes; adapters are all that is trained."""
    count = 2 * BATCH if beside == "points" else WIDTH
    sizes = {"first": (BATCH if beside == "points" else 2 * WIDTH, WIDTH), "second": (count, WIDTH)}
    others = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    shapes = {"adapters": shapes_of(PAIR), "base": others}
    layout, trained = (
        zerojax.make_layout(x, mesh8, stage=stage) for x in (shapes, shapes_of(PAIR))
    )
    tx = zerojax.sharded(TX, trained)

    def with_base(params, x):
        h = jnp.concatenate([x, x], 1) @ params["base"]["first"] @ params["base"]["second"]
        return pair_loss(params["adapters"], x + h)

    def of_points(adapters, points):
        return pair_loss(adapters, points["first"]) + pair_loss(adapters, points["second"])

    def step(adapters, opt_state, others, x):
        def loss(adapters):
            if beside == "points":
                losses = zerojax.gather_where_used(of_points, trained)
                return losses(adapters, others)
            loss = zerojax.gather_where_used(with_base, layout)
            return loss({"adapters": adapters, "base": others}, x)

        updates, opt_state = tx.update(jax.grad(loss)(adapters), opt_state, adapters)
        return zerojax.apply_updates(adapters, updates, trained), opt_state

    back = (trained.params, trained.opt_state(TX))
    place = layout.batch if beside == "points" else layout.params["base"]
    at = {"in_shardings": (*back, place, layout.batch), "out_shardings": back}
    given = (trained.shapes, jax.eval_shape(TX.init, trained.shapes), others, X)
    compiled = jax.jit(step, donate_argnums=(0, 1), **at).lower(*given).compile()
    report = audit(compiled, trained)
    told = ["volume"] if beside == "points" else []  # the network runs twice
    assert [problem.kind for problem in report.problems] == told
    if beside == "points" or stage == 3:
        seen = report.memory.batch if beside == "points" else report.memory.other
        assert seen == sum(4 * a * b for a, b in sizes.values()) // 8
