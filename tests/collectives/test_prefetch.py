"""Loops that gather the next layer while one computes: the same bits, the same bytes."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import zerojax
from tests.collectives.test_gather import stored_params
from tests.collectives.uses import LOOPS, NUM_LAYERS, WIDE, loss_of, params_of
from zerojax._jaxpr import bodies, called, depending, opened
from zerojax._tree import as_shapes
from zerojax.collectives import gather_where_used
from zerojax.collectives.gathers._boxed import REDUCED, makes_gathered
from zerojax.collectives.passes import prefetched

#: Layers that are gathered for the backward pass of each loop: all, but where the loop computes
#: its first pass again.
PASSES = {"remat of scan": 3}


def step(x, p):
    return x + jnp.tanh(x @ p["w"]) @ p["v"], None


def with_keys(stack, x):
    """Noise of each layer, whose key the backward pass needs again."""

    def body(x, given):
        p, key = given
        key = jax.random.fold_in(key, 1)
        kept = jax.checkpoint(lambda x, p, k: jax.random.bernoulli(k, 0.9, x.shape) * step(x, p)[0])
        return kept(x, p, key), None

    return jax.lax.scan(body, x, (stack, jax.random.split(jax.random.key(0), NUM_LAYERS)))[0]


def in_another_order(stack, x):
    def body(x, i):
        return step(x, jax.tree.map(lambda w: w[i], stack))

    return jax.lax.scan(body, x, jnp.array([2, 0, 3, 1]))[0]


def in_groups(stack, x):
    groups = jax.tree.map(lambda w: w.reshape(2, NUM_LAYERS // 2, *w.shape[1:]), stack)

    @jax.checkpoint
    def group(x, p):
        return jax.lax.scan(jax.checkpoint(step), x, p)

    return jax.lax.scan(group, x, groups)[0]


def counted_down(stack, x):
    def body(state, _):
        x, i, j = state
        x = step(x, jax.tree.map(lambda w: w[i], stack))[0]
        return (step(x, jax.tree.map(lambda w: w[j], stack))[0], i - 1, 1 + j), None

    start = (x, NUM_LAYERS - 1, jnp.int32(0))
    return jax.lax.scan(body, start, None, length=NUM_LAYERS)[0][0]


def chosen_by_the_loop(stack, x):
    def body(x, _):
        i = (100 * jnp.abs(x.sum())).astype(int) % NUM_LAYERS
        return step(x, jax.tree.map(lambda w: w[i], stack))

    return jax.lax.scan(body, x, None, length=3)[0]


def in_a_branch(params, x):
    def layer(h, turn):
        w, number = turn
        return jax.lax.cond(number % 2 == 0, lambda: h @ w["w"] @ w["v"], lambda: h), None

    return jax.lax.scan(layer, x, (params, jnp.arange(NUM_LAYERS)))[0]


def twice_in_a_layer(stack, x):
    def body(x, p):
        return step(step(x, p)[0], p)

    return jax.lax.scan(body, x, stack)[0]


def in_other_numbers(stack, x):
    for i in range(2):
        x = step(x, jax.tree.map(lambda w, i=i: w[0] * (1.0 + i), stack))[0]
    return x


def of_one_layer(stack, x):
    return jax.lax.scan(step, x, jax.tree.map(lambda w: w[:1], stack))[0]


def in_part_again(stack, x):
    def body(x, p):
        return step(jax.checkpoint(jnp.sin)(x), p)

    return jax.lax.scan(body, x, stack)[0]


def unrolled(stack, x):
    return jax.lax.scan(step, x, stack, unroll=2)[0]


def layer(x, p):
    return step(x, p)[0]


def listed_plainly(stack, x, layer=layer):
    for i in range(NUM_LAYERS):
        x = layer(x, {name: w[i] for name, w in stack.items()})
    return x


def listed(stack, x):
    return listed_plainly(stack, x, jax.checkpoint(layer))


def listed_whole(stack, x):
    return jax.checkpoint(listed_plainly)(stack, x)


LISTS = {f.__name__: f for f in (listed, listed_whole, listed_plainly)}
ODD = {
    f.__name__: f
    for f in (
        with_keys,
        in_another_order,
        in_groups,
        counted_down,
        chosen_by_the_loop,
        twice_in_a_layer,
        in_other_numbers,
        of_one_layer,
        in_part_again,
        unrolled,
    )
}
ALL = LOOPS | ODD | LISTS
#: Loops that gather a layer of a branch, each layer more than once, or several together.
OTHERS = {"branches", "repeated", "each twice", "tiled", "pairs"}


def gradient_of(names, mesh, sizes=WIDE, **options):
    """Return the gradient of models in one loss, with its arguments."""
    params = {name: params_of(LOOPS["scan"], sizes) for name in names}
    rules = [zerojax.Rule(path=".", stacked=1)]
    layout = zerojax.make_layout(params, mesh, stage=3, min_size=16, rules=rules)
    x = jax.random.normal(jax.random.key(2), (16, sizes[0]))

    def loss(params, x):
        return sum(loss_of(ALL[name], params[name], x) for name in names)

    placed = stored_params(params, layout), jax.device_put(x, layout.batch)
    return jax.grad(gather_where_used(loss, layout, zerojax.Recipe(**options))), layout, placed


def gathers(program, times=1, looped=False):
    """List how often each gather of a program runs, and whether in a loop."""
    for eqn in opened(program)[0].eqns:
        if makes_gathered(eqn.primitive.name, eqn.params):
            yield times, looped
        elif eqn.primitive.name == "scan":
            yield from gathers(*bodies(eqn), times * eqn.params["length"], True)
        elif called(eqn) is not None:
            yield from gathers(called(eqn), times, looped)


def needed(program, args):
    """Trace a function without what nobody reads."""
    return jax.make_jaxpr(jax.jit(program))(*args).eqns[0].params["jaxpr"]


@pytest.mark.parametrize("layers", [1.0, 0.5])
@pytest.mark.parametrize("part", range(7))
def test_gradients_have_the_same_bits(part, layers, mesh8):
    """XLA's CPU runtime runs independent collectives at once: of many it can run out of threads."""
    gradient, layout, args = gradient_of([*ALL][part::7], mesh8)
    run = functools.partial(jax.jit, out_shardings=layout.grads)
    want, got = run(gradient)(*args), run(prefetched(gradient, layers, layout))(*args)
    for path, a in jax.tree_util.tree_leaves_with_path(got):
        b = functools.reduce(lambda tree, key: tree[key.key], path, want)
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("name", [name for name in LOOPS if name not in OTHERS])
def test_every_layer_is_gathered_once_a_pass(name, mesh8):
    """Both leaves of a layer, in the forward and in the backward pass, and the first one ahead."""
    gradient, layout, args = gradient_of([name], mesh8)
    plain = list(gathers(needed(gradient, args)))
    ahead = list(gathers(needed(prefetched(gradient, 1, layout), args)))
    passes = PASSES.get(name, 2)
    assert sum(times for times, _ in plain) == 2 * passes * NUM_LAYERS
    assert sum(times for times, _ in ahead) == 2 * passes * NUM_LAYERS
    assert sorted(ahead) == 2 * passes * [(1, False)] + 2 * passes * [(NUM_LAYERS - 1, True)]


@pytest.mark.parametrize("name", [name for name in ALL if name not in OTHERS | ODD.keys()])
def test_a_layer_that_is_kept_is_gathered_once(name, mesh8):
    """In the forward pass, the first one ahead; the backward pass gathers nothing."""
    gradient, layout, args = gradient_of([name], mesh8, reshard_after_forward=False)
    ahead = list(gathers(needed(prefetched(gradient, 1, layout), args)))
    assert sum(times for times, _ in ahead) == 2 * NUM_LAYERS
    if name in LOOPS:
        assert sorted(ahead) == 2 * [(1, False)] + 2 * [(NUM_LAYERS - 1, True)]


def waiting(program):
    """List for each gather of a program without loops how many products it waits for."""
    eqns = opened(program)[0].eqns
    products = [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]
    behind = [depending(eqns, eqn.outvars) for eqn in products]
    return [
        sum(not found.isdisjoint(eqn.invars) for found in behind)
        for eqn in eqns
        if makes_gathered(eqn.primitive.name, eqn.params)
    ]


@pytest.mark.parametrize("name", LISTS)
def test_layers_of_a_list_wait_for_those_before(name, mesh8):
    """A weight is half a layer here: each waits for all products but the two before its own."""
    gradient, layout, args = gradient_of([name], mesh8)
    ahead = needed(prefetched(gradient, 1, layout), args)
    assert len([*gathers(ahead)]) == len([*gathers(needed(gradient, args))])
    forward = 2 * NUM_LAYERS
    assert waiting(ahead)[:forward] == [max(k - 1, 0) for k in range(forward)]
    assert min(waiting(ahead)[forward:]) >= forward - 2


def outstanding(program):
    """List for each product how many gradients of a program without loops it does not wait for."""
    eqns, reduced, found = opened(program)[0].eqns, [], []
    for at, eqn in enumerate(eqns):
        if eqn.primitive.name == "name" and eqn.params["name"] == REDUCED:
            reduced.append(depending(eqns[at:], eqn.outvars))
        elif eqn.primitive.name == "dot_general":
            found.append(sum(one.isdisjoint(eqn.invars) for one in reduced))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("remat", [True, False])
def test_on_a_gpu_products_wait_for_reductions(stage, remat, mesh8, monkeypatch):
    """A gradient is half a layer, and a group here: at most two are not waited for, one is new."""
    stack = params_of(LOOPS["scan"], WIDE)
    params = {f"layer_{i}": {name: w[i] for name, w in stack.items()} for i in range(NUM_LAYERS)}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=16)
    one = jax.checkpoint(layer) if remat else layer

    def loss(params, x):
        for i in range(NUM_LAYERS):
            x = one(x, params[f"layer_{i}"])
        return (x**2).mean()

    gradient = jax.grad(gather_where_used(loss, layout))
    args = as_shapes((params, jnp.zeros((16, WIDE[0]))))
    plain = needed(prefetched(gradient, 1, layout), args)
    assert max(outstanding(plain)) > NUM_LAYERS  # elsewhere the compiler keeps the order
    monkeypatch.setattr(type(layout), "platform", "gpu")
    ordered = needed(prefetched(gradient, 0, layout, bucket_bytes=1), args)
    assert max(outstanding(ordered)) <= 3


def test_a_part_of_a_layer_is_what_it_uses_first(mesh8):
    gradient, layout, args = gradient_of(["scan"], mesh8)
    found = sorted(gathers(needed(prefetched(gradient, 0.5, layout), args)))
    # Of both passes: one leaf of the first layer, both of the last, and both in the loop.
    assert found == 4 * [(1, False)] + 4 * [(NUM_LAYERS - 1, True)]
    # A weight is half a layer: the first one goes ahead, though it is more than is asked for.
    assert sorted(gathers(needed(prefetched(gradient, 0.1, layout), args))) == found


def loss_of_both(params, batch):
    """Two scans, of which one is rematerialised, a tied embedding, and results of each layer."""

    def step(x, p):
        x = x + jnp.tanh(x @ p["w"]) @ p["v"]
        return x, jnp.mean(x)

    x, means = jax.lax.scan(jax.checkpoint(step), batch["x"] @ params["emb"], params["stack"])
    x, _ = jax.lax.scan(step, x, jax.tree.map(lambda w: 0.5 * w, params["other"]))
    return jnp.mean((x @ params["emb"].T - 0.3) ** 2) + jnp.mean(means)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_steps_have_the_same_losses_and_volume(axes, accumulate):
    mesh = zerojax.make_mesh(axes)
    stack = params_of(LOOPS["scan"], WIDE)
    params = {"emb": jnp.eye(WIDE[0]), "stack": stack, "other": stack}
    cut = P(None, None, "model") if "model" in axes else None
    specs = {"emb": None, "stack": {"w": cut, "v": None}, "other": None}
    layout = zerojax.make_layout(params, mesh, stage=3, specs=specs)
    batch = {"x": jax.random.normal(jax.random.key(0), (32, WIDE[0]))}
    losses, volumes = [], []
    for prefetch in (0, 1):
        recipe = zerojax.Recipe(precision="bf16", accumulate=accumulate, prefetch=prefetch)
        step = zerojax.make_train_step(loss_of_both, optax.adam(1e-2), layout, recipe)
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        report = step.audit(batch)
        report.raise_if_problems()
        volumes.append(report.volume)
    assert losses[:3] == losses[3:]
    # A CPU gathers the first layer of both passes once for all microbatches: a little less.
    assert volumes[1] <= volumes[0] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("model", "said"),
    [(chosen_by_the_loop, "test_prefetch.py.*chosen by what the loop"), (of_one_layer, "no loop"),
     (in_a_branch, "test_prefetch.py.*read in a branch")],
)  # fmt: skip
def test_what_was_asked_for_and_cannot_be_is_told(model, said, mesh8):
    params = params_of(LOOPS["scan"], WIDE)
    layout = zerojax.make_layout(params, mesh8, stage=3, rules=[zerojax.Rule(path=".", stacked=1)])
    recipe = zerojax.Recipe(prefetch=1)
    made = zerojax.make_train_step(lambda p, x: loss_of(model, p, x), optax.sgd(1), layout, recipe)
    batch = jax.ShapeDtypeStruct((16, WIDE[0]), jnp.float32)
    with pytest.warns(UserWarning, match=said):
        made.lower(made.abstract_state(), batch)
    assert re.search(said, "\n".join(made.audit(batch).notes))


def test_a_loop_that_counts_down_gathers_ahead(mesh8):
    gradient, layout, args = gradient_of(["counted_down"], mesh8)
    jax.make_jaxpr(prefetched(gradient, 1, layout, told=pytest.fail))(*args)
    found = [*gathers(needed(prefetched(gradient, 1, layout), args))]
    assert {times for times, looped in found if looped} == {NUM_LAYERS - 1}


def test_a_cpu_and_whole_parameters_gather_nothing_ahead():
    recipe = zerojax.Recipe()
    ahead = [recipe.lookahead({"parameter"}, kind) for kind in ("tpu", "gpu", "cpu")]
    assert ahead == [0.5, 0.5, 0]
    assert recipe.lookahead({"gradient"}, "tpu") == 0
    assert zerojax.Recipe(prefetch=1).lookahead({"parameter"}, "cpu") == 1


def test_what_the_host_is_asked_for_is_not_asked_ahead(mesh8):
    """A layer that a callback chooses is gathered where it is used; callbacks keep their order."""
    params = jax.random.normal(jax.random.key(0), (NUM_LAYERS, 64, 64))
    layout = zerojax.make_layout(params, mesh8, stage=3, rules=[zerojax.Rule(path="", stacked=1)])
    place = jax.ShapeDtypeStruct((), jnp.int32)

    def loss(stack, x):
        def layer(h, i):
            i = io_callback(lambda i: np.int32((3 * i) % NUM_LAYERS), place, i, ordered=True)
            return jnp.tanh(h @ stack[i]), None

        return jax.lax.scan(layer, x, jnp.arange(NUM_LAYERS))[0].sum()

    gradient = jax.grad(gather_where_used(loss, layout))
    args = stored_params(params, layout), jnp.ones((16, 64))
    want, got = jax.jit(gradient)(*args), jax.jit(prefetched(gradient, 1, layout))(*args)
    np.testing.assert_array_equal(got, want)
