"""Rematerialisation policies: what is kept, cut over the mesh, named and refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import zerojax
from zerojax import RematPolicy, _jaxpr
from zerojax.models import gpt
from zerojax.recipe import LAYER_INPUT

CONFIG = gpt.Config(
    num_layers=3, width=32, num_heads=4, vocab_size=64, context=16, init_scale=0.1,
    model_axis="model",
)  # fmt: skip
BATCH = 8
POLICIES = {
    "none": RematPolicy(recompute="none"),
    "dots": RematPolicy(recompute="dots"),
    "full": RematPolicy(),
    "by name": RematPolicy(keep=("attention",)),
    "Pa": RematPolicy(partition="model"),
    "Pa and dots": RematPolicy(recompute="dots", partition="model", keep=("hidden",)),
    "offload": RematPolicy(offload=(LAYER_INPUT,)),
    "Pa+cpu": RematPolicy(partition="model", offload=(LAYER_INPUT,)),
    "offload by name": RematPolicy(recompute="dots", offload=("hidden",)),
}


def make(remat, config=CONFIG, stage=2, **options):
    init = functools.partial(gpt.init, config)
    key, tx = jax.random.key(0), optax.sgd(0.1)
    layout = zerojax.make_layout(
        jax.eval_shape(init, key), zerojax.make_mesh({"data": 4, "model": 2}), stage=stage,
        specs=gpt.specs(config), min_size=64,
    )  # fmt: skip
    loss = functools.partial(gpt.loss, config)
    step = zerojax.make_train_step(loss, tx, layout, zerojax.Recipe(remat=remat, **options))
    tokens = jax.random.randint(jax.random.key(1), (BATCH, config.context + 1), 0, 64)
    return step, layout, (init, key), tokens


@functools.cache
def as_it_is():
    return train(None)


def train(remat, **options):
    step, layout, initial, tokens = make(remat, **options)
    state, metrics = step(step.init(*initial), jax.device_put(tokens, layout.batch))
    return float(metrics["loss"]), jax.device_get(zerojax.unpad(state.params, layout))


@pytest.mark.parametrize(
    ("name", "stage"), [*((name, 3) for name in POLICIES), ("Pa", 2), ("Pa+cpu", 2)]
)
def test_no_policy_changes_the_loss_or_its_gradient(name, stage):
    loss, params = train(POLICIES[name], stage=stage)
    wanted, wanted_params = as_it_is()
    assert loss == pytest.approx(wanted, rel=1e-6)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(wanted_params), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_policy_works_in_a_list_of_layers_and_with_one_reduction():
    config = dataclasses.replace(CONFIG, scan=False, num_layers=2)
    wanted, _ = train(None, config=config)
    got, _ = train(RematPolicy(partition="model"), config=config)
    assert got == pytest.approx(wanted, rel=1e-6)
    got, _ = train(RematPolicy(partition="model"), stage=1, accumulate=2, reduce="once")
    assert got == pytest.approx(as_it_is()[0], rel=1e-6)


def test_checkpoints_are_cut_in_each_of_several_microbatches():
    got, _ = train(RematPolicy(partition="model"), accumulate=2, reduce="each")
    assert got == pytest.approx(as_it_is()[0], rel=1e-6)


def stacked(text, rows):
    """Count the stacks of layer inputs [layers, examples, rows, width] in a compiled program."""
    examples = BATCH // 4
    return len(re.findall(rf"f32\[{CONFIG.num_layers},{examples},{rows},{CONFIG.width}\]", text))


def compiled(remat, **options):
    step, _, _, tokens = make(remat, **options)
    return step.lower(step.abstract_state(), tokens).compile()


def test_partitioned_checkpoints_take_a_model_axis_of_the_memory():
    whole, cut = CONFIG.context, CONFIG.context // 2
    plain = compiled(RematPolicy()).as_text()
    assert stacked(plain, whole)
    assert not stacked(plain, cut)
    partitioned = compiled(RematPolicy(partition="model")).as_text()
    assert stacked(partitioned, cut)
    assert not stacked(partitioned, whole)


def test_partitioned_checkpoints_add_one_gather_a_layer():
    """At most a tenth of what the model axis moves: 1 of 10 messages of a layer."""
    volumes = {}
    for name, remat in {"full": RematPolicy(), "Pa": RematPolicy(partition="model")}.items():
        step, layout, _, tokens = make(remat)
        program = step.lower(step.abstract_state(), tokens).compile()
        volumes[name] = zerojax.audit(program, layout).volume_by_axis["model"].seen
    message = BATCH // 4 * CONFIG.context * CONFIG.width / 2  # (m - 1) / m of it is sent
    extra = (volumes["Pa"] - volumes["full"]) * gpt.num_params(CONFIG)
    # A CPU has no reduce-scatters: what a sum and a gather replace is counted as twice as much.
    assert message * CONFIG.num_layers <= extra <= message * (5 * CONFIG.num_layers + 4)


def test_layers_of_the_users_own_are_rematerialised():
    """A function without layers is one layer; `keep` decides what its backward pass reads."""
    x, w = jnp.ones((4, 8)), jnp.full((8, 8), 0.1)

    def layer(w, x):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return jnp.sin(jnp.cos(hidden @ w))

    def num_kept(policy):
        function = zerojax.rematerialised(layer, policy)
        return len(jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], w, x)))

    assert num_kept("full") < num_kept(RematPolicy(keep=("hidden",))) < num_kept("none")
    for policy in (RematPolicy(), RematPolicy(recompute="dots"), RematPolicy(keep=("hidden",))):
        got = jax.grad(lambda *a: zerojax.rematerialised(layer, policy)(*a).sum())(w, x)  # noqa: B023
        np.testing.assert_allclose(got, jax.grad(lambda *a: layer(*a).sum())(w, x), rtol=1e-6)


def list_of_layers(params, x):
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_a_loss_without_layers_is_refused_where_a_policy_would_save_nothing(mesh8):
    params = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 3
    layout = zerojax.make_layout(params, mesh8, stage=2)
    batch = jax.ShapeDtypeStruct((8, 64), jnp.float32)

    def lower(loss, remat):
        recipe = zerojax.Recipe(remat=remat)
        step = zerojax.make_train_step(loss, optax.sgd(0.1), layout, recipe)
        return step.lower(step.abstract_state(), batch)

    with pytest.raises(ValueError, match=r"no layers .* jax\.checkpoint\(layer\)"):
        lower(list_of_layers, "full")
    lower(list_of_layers, "dots")
    lower(jax.checkpoint(list_of_layers), "full")


def test_a_jit_that_asks_for_placements_is_run_as_it_is(mesh8):
    """Layers within it can't be told apart, so that the function is a layer itself."""
    batch = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec("data"))
    whole = jax.sharding.NamedSharding(mesh8, jax.sharding.PartitionSpec())
    model = jax.jit(jax.checkpoint(list_of_layers), in_shardings=(None, batch), out_shardings=whole)
    function = zerojax.rematerialised(lambda params, x: model(params, 2 * x), "full")
    traced = jax.make_jaxpr(function)([jnp.ones((64, 64))], jnp.ones((8, 64)))
    (layer,) = traced.eqns
    (placed,) = (e for e in _jaxpr.called(layer).eqns if e.primitive.name == "jit")
    assert placed.params["in_shardings"][-1] == batch
    assert placed.params["out_shardings"] == (whole,)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute": "all"}, "one of none, dots, full, got 'all'"),
        ({"keep": "hidden"}, "tuple of names, got 'hidden'"),
        ({"keep": ("a", "b"), "offload": ("b",)}, "both kept and offloaded: b"),
        ({"recompute": "none", "partition": "model"}, "recompute='none' keeps every value"),
    ],
)
def test_a_policy_that_can_not_be_meant_is_refused(options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        RematPolicy(**options)


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match=r"name 'hiden'.*first: hidden, attention, layer_input"):
        train(RematPolicy(keep=("hiden",)))


def test_an_axis_that_the_mesh_lacks_is_refused():
    with pytest.raises(ValueError, match=r"no such axis; it has .*'data': 4, 'model': 2"):
        make(RematPolicy(partition="tensor"))
    with pytest.raises(ValueError, match="no mesh is set"):
        zerojax.rematerialised(lambda w, x: x @ w, RematPolicy(partition="model"))(
            jnp.ones((2, 2)), jnp.ones((2, 2))
        )


def test_what_the_host_keeps_of_layers_is_stacked_by_the_scan():
    """A stack made for a loop that gathers ahead would lie on the device first."""
    params = {"w": jax.random.normal(jax.random.key(0), (4, 64, 64)) / 8}
    layout = zerojax.make_layout(params, zerojax.make_mesh({"data": 8}), stage=3, min_size=0)
    policy = zerojax.RematPolicy(offload=("layer_input",))

    def loss(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["w"])[0] ** 2)

    losses = []
    for prefetch in (0, 0.5):
        recipe = zerojax.Recipe(remat=policy, prefetch=prefetch)
        step = zerojax.make_train_step(loss, optax.adam(1e-2), layout, recipe)
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, jnp.ones((32, 64)))
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1]
