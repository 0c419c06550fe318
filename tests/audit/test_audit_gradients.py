"""Which gradients have to be reduced: those of trained leaves, each once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from tests.audit.audit_programs import WIDTH, compile_step, kinds, mse, only, pair_loss, shapes_of
from zerojax.audit import audit

SHAPES = {
    "frozen": jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.float32),
    "head": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((96, WIDTH), jnp.float32)


def frozen_loss(params, x):
    weights = jax.lax.stop_gradient(params["frozen"])
    y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, weights)
    return jnp.mean((y @ params["head"] - x) ** 2)


@pytest.mark.parametrize(("stage", "accumulate"), [(1, 1), (2, 2), (3, 1)])
def test_frozen_leaves_have_no_gradient_to_reduce(mesh8, stage, accumulate):
    layout = zerojax.make_layout(SHAPES, mesh8, stage=stage)
    recipe = zerojax.Recipe(accumulate=accumulate, clip_norm=1.0)
    report = zerojax.make_train_step(frozen_loss, optax.adamw(1e-3), layout, recipe).audit(BATCH)
    assert report.problems == ()
    # Both are gathered, of which the head is a fifth; only the head's gradient is reduced. The
    # frozen layers need no backward pass, so that stage 3 gathers them once.
    reductions = 1 if stage == 1 else accumulate
    gathers = {1: 1, 2: 1, 3: 2}[stage]
    assert report.theory_volume == pytest.approx((gathers + reductions / 5) * 7 / 8)
    assert report.judged_volume == pytest.approx((1 + reductions / 5) * 7 / 8, rel=0.05)


@pytest.mark.parametrize("frozen", ["stopped", "unused", "penalty"])
@pytest.mark.parametrize(("stage", "accumulate"), [(1, 1), (1, 2), (2, 1), (0, 2)])
def test_one_reduction_a_step_leaves_out_what_it_does_not_reduce(mesh8, stage, accumulate, frozen):
    """The base is 16 times as large as what is trained beside it."""
    shapes = {"base": (WIDTH, WIDTH * 4), "head": (WIDTH, WIDTH // 4)}
    layout = zerojax.make_layout(shapes_of(shapes), mesh8, stage=stage, min_size=64)

    def loss(params, x):
        base = jax.lax.stop_gradient(params["base"])
        if frozen == "penalty":
            base = params["base"]
            return jnp.mean((x @ params["head"]) ** 2) + jnp.sum(base**2)
        return jnp.mean((x @ params["head"]) ** 2) + (frozen == "stopped") * jnp.mean(x @ base)

    recipe = zerojax.Recipe(accumulate=accumulate, reduce="once", clip_norm=1.0)
    report = zerojax.make_train_step(loss, optax.adamw(1e-3), layout, recipe).audit(BATCH)
    assert kinds(report) <= ({"accumulator"} if stage == 2 else set())
    # A penalty's gradient is reduced with the others or is not; what theory counts is what is.
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.05)


@pytest.mark.parametrize("reduce", ["each", "once"])
def test_a_forgotten_reduction_is_no_frozen_leaf(make, mesh8, reduce):
    """Each device trains on its own examples alone."""

    def loss(params, x):
        own = jax.shard_map(
            jax.grad(pair_loss),
            mesh=mesh8,
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )(jax.lax.stop_gradient(params), x)
        return sum(map(jnp.vdot, jax.tree.leaves(own), jax.tree.leaves(params)))

    layout = make(2)
    report = audit(compile_step(loss, layout), layout, zerojax.Recipe(reduce=reduce))
    problem = only(report, "reduce-scatter")
    assert f"only 0 of {layout.num_params:,} elements" in problem.seen


@pytest.mark.parametrize("stage", [1, 2])
def test_the_gradient_of_a_generated_weight_is_reduced_and_not_those_of_its_generator(mesh8, stage):
    shapes = {
        "code": jax.ShapeDtypeStruct((16,), jnp.float32),
        "generator": jax.ShapeDtypeStruct((16, WIDTH * WIDTH), jnp.float32),
    }

    def loss(params, x):
        weight = (params["code"] @ params["generator"]).reshape(WIDTH, WIDTH)
        return jnp.mean((x @ weight - x) ** 2)

    layout = zerojax.make_layout(shapes, mesh8, stage=stage)
    report = zerojax.make_train_step(loss, optax.adamw(1e-3), layout).audit(BATCH)
    assert report.problems == ()
    assert report.judged_volume < report.theory_volume


@pytest.mark.parametrize("stage", range(3))
def test_a_small_leaf_that_is_never_reduced_is_named(stage, mesh8):
    """Its share of all elements is 1 in 65."""
    shapes = {"up": {"w": (WIDTH, WIDTH), "b": (WIDTH,)}}
    layout = zerojax.make_layout(shapes_of(shapes), mesh8, stage=stage, min_size=8)

    def compiled(forgotten):
        def grads(params, x):
            g = jax.grad(lambda p: mse(jnp.tanh(x @ p["w"] + p["b"]), x))(params["up"])
            mean = jax.lax.pmean(g, "data")
            return {"up": {name: g[name] if name == forgotten else mean[name] for name in g}}

        def loss(params, x):
            own = jax.shard_map(
                grads, mesh=mesh8, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
            )(jax.lax.stop_gradient(params), x)
            return sum(map(jnp.vdot, jax.tree.leaves(own), jax.tree.leaves(params)))

        return audit(compile_step(loss, layout), layout)

    problem = only(compiled("b"), "reduction")
    assert problem.where == "up/b"
    assert "reduction" not in kinds(compiled(""))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradient_of_a_tied_weight_counts_once_where_a_cpu_sums_its_uses(mesh8, accumulate):
    def loss(params, tokens):
        logits = (params[tokens[:, :-1]] @ params.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    embed, tokens = jax.ShapeDtypeStruct((128, 64), jnp.float32), jnp.zeros((32, 9), jnp.int32)
    layout = zerojax.make_layout(embed, mesh8, stage=2)
    recipe = zerojax.Recipe(accumulate=accumulate, precision="bf16")
    report = zerojax.make_train_step(loss, optax.adamw(1e-3), layout, recipe).audit(tokens)
    assert report.problems == ()
    assert report.judged_volume == pytest.approx((accumulate + 1) * 7 / 8, rel=0.01)


def test_plain_data_parallelism_with_a_tied_weight_is_clean(mesh8):
    """A CPU sums both uses of the table over devices; others add them up before."""
    layout = zerojax.make_layout(shapes_of({"embed": (128, 64)}), mesh8, stage=0)

    def step(params, tokens):
        def loss(params):
            logits = params["embed"][tokens[:, :-1]] @ params["embed"].T
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    given = {"embed": jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=layout.sharding(P()))}
    tokens = jax.ShapeDtypeStruct((32, 9), jnp.int32, sharding=layout.batch)
    report = audit(jax.jit(step, donate_argnums=0).lower(given, tokens).compile(), layout)
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(2 * 7 / 8, rel=0.01)
    assert report.volume == pytest.approx(4 * 7 / 8, rel=0.01)


@pytest.mark.parametrize(("groups", "gathers"), [(8, False), (2, False), (1, False), (8, True)])
def test_the_gradient_of_a_grouped_kernel_that_is_summed_over_replicas_is_named(groups, gathers):
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    shapes = {"kernel": (3, 8 // groups, 8), "out": (8, 8)}
    layout = zerojax.make_layout(shapes_of(shapes), mesh, stage=2, min_size=8)

    def loss(params, x):
        y = jax.lax.conv_general_dilated(
            x.reshape(len(x), -1, 8), params["kernel"], (1,), "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"), feature_group_count=groups,
        )  # fmt: skip
        return jnp.mean(jnp.sin(y @ params["out"]))

    loss = zerojax.gather_where_used(loss, layout) if gathers else loss
    report = audit(compile_step(loss, layout), layout)
    if groups == 1 or gathers:
        assert "replicas" not in kinds(report)
        return
    problem = only(report, "replicas")
    assert "summed along model too" in problem.seen
    assert "2 times too large" in problem.seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_lookups_give_back_may_move_in_place_of_their_tables_gradient(stage):
    """Over shards within a node the partitioner picks what moves less."""
    mesh = zerojax.make_mesh({"replica": 2, "fsdp": 4})
    shapes = shapes_of({"table": (1024, WIDTH), "up": (WIDTH, WIDTH)})
    axes = {"axis": "fsdp", "batch_axes": ("replica", "fsdp"), "min_size": 0}
    layout = zerojax.make_layout(shapes, mesh, stage=stage, **axes)

    def loss(params, ids):
        return jnp.mean(jnp.tanh(params["table"][ids] @ params["up"]) ** 2)

    step = zerojax.make_train_step(loss, optax.adamw(1e-3), layout)
    report = step.audit(jax.ShapeDtypeStruct((16, 4), jnp.int32))
    assert report.problems == ()
    assert report.judged_volume < 0.8 * report.theory_volume
    gathers = [x for x in report.moves if x.role == "gather" and not x.match.form]
    assert sorted(x.record.shape[:2] for x in gathers) == [(8, 4)] * 2


def test_a_norm_is_no_gradient_that_is_reduced(mesh8):
    """All devices compute with all examples; what they sum is a norm of their shards."""

    def gathered(params, x):
        whole = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh8, P()))
        return mse(jnp.tanh(whole @ params["up"]) @ params["down"], whole)

    params = {name: jnp.ones((WIDTH, WIDTH)) for name in ("up", "down")}
    layout = zerojax.make_layout(params, mesh8, stage=2)
    x = jax.ShapeDtypeStruct((96, WIDTH), jnp.float32)
    step = zerojax.make_train_step(
        gathered, optax.adam(1e-3), layout, zerojax.Recipe(clip_norm=1.0)
    )
    report = step.audit(x)
    (told,) = [problem for problem in report.problems if problem.kind == "reduce-scatter"]
    assert told.where == "no reduction of a gradient along the axis"


@pytest.mark.parametrize("stage", range(4))
def test_a_loop_over_the_batch_computes_all_of_it_on_each_device(mesh8, stage):
    """It walks the dim that devices share; under vmap each has examples of its own."""

    def of_one(params, x):
        return mse(jnp.tanh(x @ params["up"]) @ params["down"], x)

    def looped(params, x):
        return jax.lax.map(lambda one: of_one(params, one), x, batch_size=4).mean()

    def mapped(params, x):
        return jax.vmap(of_one, (None, 0))(params, x).mean()

    layout = zerojax.make_layout(
        {name: jnp.ones((WIDTH, WIDTH)) for name in ("up", "down")}, mesh8, stage=stage
    )
    reports = [
        zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(
            jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)
        )
        for loss in (looped, mapped)
    ]
    assert reports[1].problems == ()
    (told,) = [x for x in reports[0].problems if x.kind == "reduce-scatter"]
    assert "jax.vmap" in told.remedy


@pytest.mark.parametrize("form", ["side by side", "stacked", "of two sizes"])
def test_gradients_of_weights_that_a_loss_joins_are_no_activation(mesh8, form):
    """They are reduced together, [64, 192] for three of [64, 64]."""
    wide = 128 if form == "of two sizes" else 64
    layout = zerojax.make_layout(
        shapes_of({"q": (64, wide), "k": (64, 64), "v": (64, 64)}), mesh8, stage=3
    )

    def loss(params, x):
        h, weights = jnp.tanh(x), [*params.values()]
        if form == "stacked":
            return jnp.mean(jnp.einsum("bw,nwh->nbh", h, jnp.stack(weights)) ** 2)
        return jnp.mean((h @ jnp.concatenate(weights, 1)) ** 2)

    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(BATCH)
    assert report.problems == ()


def test_a_loss_with_a_state_is_not_told_to_reduce_once(mesh8):
    """Recipe(reduce='once') refuses it: each device would make a state of its own."""
    layout = zerojax.make_layout(shapes_of({"a": (64, 256), "b": (256, 64)}), mesh8, stage=2)
    state = shapes_of({"sums": (512, 64)})

    def loss(params, x, model_state):
        z = jnp.tanh(x @ params["a"]) @ params["b"]
        at = jnp.argmax(jax.lax.stop_gradient(z @ model_state["sums"].T), -1)
        sums = jnp.zeros((512, 64)).at[at].add(jax.lax.stop_gradient(z))
        return jnp.mean((z - x) ** 2), {"sums": model_state["sums"] + sums}

    step = zerojax.make_train_step(loss, optax.adam(1e-3), layout, model_state=state)
    problem = only(step.audit(BATCH), "volume")
    assert "reduce='once'" not in problem.remedy
