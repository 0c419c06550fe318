"""A weight of several uses: its gradients are added up before devices sum them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import zerojax
from zerojax.collectives import gather_where_used

VOCABULARY, WIDTH = 512, 32
PARAMS = {"emb": jax.random.normal(jax.random.key(0), (VOCABULARY, WIDTH)) * 0.1}
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (16, 8)).astype(np.int32)

HEADS = {
    "transposed": lambda x, w: x @ w.T,
    "einsum": lambda x, w: jnp.einsum("btd,vd->btv", x, w),
    "cast": lambda x, w: (x.astype(jnp.bfloat16) @ w.T.astype(jnp.bfloat16)).astype(jnp.float32),
    "rematerialised": jax.checkpoint(lambda x, w: jnp.tanh(x @ w.T)),
    "flat": lambda x, w: (x.reshape(-1, WIDTH) @ w.T).reshape(*x.shape[:2], -1),
    "jit": jax.jit(lambda x, w: x @ w.T),
}
#: Uses that are not of examples: each takes the weight as it is.
OTHERS = {
    "penalty": lambda x, w: x @ w.T + jnp.sum(w**2),
    "turned": lambda x, w: jnp.moveaxis(jnp.einsum("vd,btd->vbt", w, x), 0, -1),
    "with itself": lambda x, w: x @ (w.T @ w) @ w.T,
    "scanned": lambda x, w: jax.lax.scan(lambda c, _: (c + x @ w.T, None), 0.0 * x @ w.T, None, 2)[
        0
    ],
    "branch": lambda x, w: jax.lax.cond(x[0, 0, 0] > 0, lambda: x @ w.T, lambda: 2 * x @ w.T),
}


def loss_of(head, params, tokens):
    logits = head(jnp.tanh(params["emb"][tokens]), params["emb"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("head", HEADS)
def test_a_tied_embedding_is_reduced_once(head, stage, mesh8):
    if stage == 3 and head == "cast":
        pytest.skip("the head gathers in bf16 and the lookup in fp32")
    layout = zerojax.make_layout(PARAMS, mesh8, stage=stage)
    loss = functools.partial(loss_of, HEADS[head])
    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(TOKENS)
    report.raise_if_problems()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("casts", ["both", "each"])
def test_one_that_is_widened_before_it_is_used_is_reduced_once(casts, stage, mesh8):
    """As `nnx.Embed` does by default, whatever dtype its table has."""
    params = {"emb": PARAMS["emb"].astype(jnp.bfloat16)}
    layout = zerojax.make_layout(params, mesh8, stage=stage)
    recipe = zerojax.Recipe(precision=zerojax.Precision(params="bfloat16"))

    def loss(params, tokens):
        first = second = params["emb"].astype(jnp.float32)
        if casts == "each":
            second = params["emb"].astype(jnp.float32)
        return jnp.mean(jax.nn.log_softmax(jnp.tanh(first[tokens]) @ second.T))

    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout, recipe).audit(TOKENS)
    report.raise_if_problems()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("head", HEADS | OTHERS)
def test_gradients_are_those_of_the_plain_loss(head, stage, mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=stage)
    loss = functools.partial(loss_of, (HEADS | OTHERS)[head])
    tokens = jax.device_put(TOKENS, layout.batch)
    got = jax.jit(jax.value_and_grad(gather_where_used(loss, layout)))(PARAMS, tokens)
    want = jax.jit(jax.value_and_grad(loss))(PARAMS, TOKENS)
    bound = 2.0**-8 if head == "cast" else 2.0**-18
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=bound, atol=bound * 0.1), got, want
    )


def test_the_sum_of_both_gradients_has_the_dtype_that_was_asked_for(mesh8):
    """In bf16 each of many small terms would be lost beside the first one."""
    params = {"emb": PARAMS["emb"].astype(jnp.bfloat16)}
    layout = zerojax.make_layout(params, mesh8, stage=2)
    loss = functools.partial(loss_of, HEADS["transposed"])
    recipe = zerojax.Recipe(precision=zerojax.Precision(reduce=jnp.float32))
    gathered = gather_where_used(loss, layout, recipe)
    text = jax.jit(jax.grad(gathered)).lower(params, TOKENS).as_text()
    sums = [line for line in text.splitlines() if "reduce_scatter" in line]
    assert sums
    assert all("bf16" not in line for line in sums)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("spec", [P("model", None), P(None, "model")])
def test_one_that_the_user_cuts_too_is_reduced_once(spec, stage):
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    layout = zerojax.make_layout(PARAMS, mesh, stage=stage, specs={"emb": spec})
    loss = functools.partial(loss_of, HEADS["transposed"])
    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(TOKENS)
    report.raise_if_problems()
    gathers = 2 if layout.partitions("parameter") else 1
    half = (4 - 1) / 4 / 2  # a device has half of the weight
    sums = 2 if layout.leaves[0].dim == 0 and spec[0] else 1  # a CPU all-reduces one cut twice
    assert report.volume_by_axis["data"].seen == pytest.approx((sums + gathers) * half, rel=0.01)
    wide = [c for c in report.collectives if c.elements >= VOCABULARY * WIDTH]
    assert {c.op for c in wide} <= {"all-reduce"}, "the weight or the logits made whole"


def test_only_what_is_looked_up_is_copied(mesh8):
    """Else each device would hold the whole gradient of a stack until its last layer."""
    params = {"w": jnp.ones((4, 64, 64))}
    layout = zerojax.make_layout(params, mesh8, stage=2)

    def loss(params, x):
        for i in range(4):
            x = x @ params["w"][i]
        return jnp.mean(x)

    traced = jax.make_jaxpr(gather_where_used(loss, layout))(params, jnp.ones((16, 64)))
    assert "f32[8,4,64,64]" not in str(traced), "a copy of the stack per device"


def looked_up_in_turns(params, tokens):
    """Predict several tokens ahead: each turn looks tokens up, and multiplies by the same table."""
    table = params["emb"]

    def turn(carry, _):
        x, tokens = carry
        x = jnp.tanh(x + table[tokens])
        logits, tokens = x @ table.T, jnp.roll(tokens, -1, 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return (x, tokens), losses.mean()

    carry = (jnp.zeros((*tokens.shape, WIDTH)), tokens)
    return jax.lax.scan(jax.checkpoint(turn), carry, length=3)[1].mean()


@pytest.mark.parametrize("stage", [2, 3])
def test_a_table_that_a_loop_looks_up_and_multiplies_by_is_reduced_once(stage, mesh8):
    layout = zerojax.make_layout(PARAMS, mesh8, stage=stage)
    step = zerojax.make_train_step(looked_up_in_turns, optax.adam(1e-3), layout)
    report = step.audit(TOKENS)
    report.raise_if_problems()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)
    tokens = jax.device_put(TOKENS, layout.batch)
    loss = gather_where_used(looked_up_in_turns, layout)
    got = jax.jit(jax.value_and_grad(loss))(PARAMS, tokens)
    want = jax.jit(jax.value_and_grad(looked_up_in_turns))(PARAMS, TOKENS)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


PRIME = 101  # no dim of any weight divides
USES = {
    "product": ((PRIME, PRIME), lambda x, w: x @ w),
    "turned": ((PRIME, PRIME), lambda x, w: jax.vmap(jax.vmap(lambda row: w @ row))(x)),
    "transposed": ((PRIME, PRIME), lambda x, w: x @ w.T),
    "cast": ((PRIME, PRIME), lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)),
    "widened": ((PRIME, PRIME), lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32)),
    "lookup": ((PRIME, PRIME), lambda x, w: w[(100 * jnp.abs(x[..., 0])).astype(int)]),
    "heads": ((PRIME, 5, 11), lambda x, w: jnp.einsum("bsd,dhk->bshk", x, w)),
    "experts": ((5, PRIME, 11), lambda x, w: jnp.einsum("bsd,edk->bsek", x, w)),
    "one of each": ((5, PRIME, 11), lambda x, w: jnp.einsum("bed,edk->bek", x[:, :5], w)),
    "stack": ((3, PRIME, PRIME), lambda x, w: jax.lax.scan(lambda h, v: (h @ v, None), x, w)[0]),
}


@pytest.mark.parametrize("stage", [2, 3])
def test_padded_weights_are_reduce_scattered(stage, mesh8):
    """The partitioner's sum, a pad and a cut are an all-reduce with every compiler."""
    params = {
        name: jnp.ones(shape, jnp.bfloat16 if name == "widened" else jnp.float32)
        for name, (shape, _) in USES.items()
    }
    layout = zerojax.make_layout(params, mesh8, stage=stage)
    assert all(leaf.is_padded for leaf in layout.leaves)

    def loss(params, x):
        return sum(jnp.mean(jnp.square(use(x, params[name]))) for name, (_, use) in USES.items())

    batch = jnp.ones((16, 8, PRIME))
    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(batch)
    report.raise_if_problems()
    # At stage 3 a first layer is not gathered for the backward pass.
    assert report.volume <= 1.01 * report.theory_volume
    assert not [c for c in report.collectives if c.op == "all-reduce" and c.elements > PRIME]


def test_a_padded_weight_that_the_user_cuts_too_is_reduce_scattered():
    mesh = zerojax.make_mesh({"data": 4, "model": 2})
    params = {"w": jnp.ones((PRIME, 202))}
    layout = zerojax.make_layout(params, mesh, stage=2, specs={"w": P(None, "model")})
    assert layout.leaves[0].is_padded

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]))

    batch = jnp.ones((16, 8, PRIME))
    report = zerojax.make_train_step(loss, optax.adam(1e-3), layout).audit(batch)
    report.raise_if_problems()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)


def recurrent(p, b):
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["a"]), None), b["x"], None, 3)
    return jnp.mean(h**2)


def tied(p, b):
    return jnp.mean((jnp.tanh(b["x"] + p["a"][b["y"]]) @ p["a"].T) ** 2)


def plain(p, b):
    return jnp.mean(jnp.tanh(b["x"] @ p["a"]) ** 2)


def learned(loss):
    """Give the gradient behind a step of gradient descent (MAML)."""
    return jax.grad(lambda p, b: loss({"a": p["a"] - 0.1 * jax.grad(loss)(p, b)["a"]}, b))


def hessian_product(loss):
    return jax.grad(lambda p, b: jnp.vdot(jax.grad(loss)(p, b)["a"], jnp.cos(p["a"])))


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("of", [learned, hessian_product])
@pytest.mark.parametrize(
    ("loss", "rows"),
    [(recurrent, 16), (tied, 11), (plain, 16), (plain, 11)],
    ids=["recurrent", "tied", "one use", "padded"],
)
def test_derivatives_of_gradients_reach_every_copy(loss, rows, of, stage, mesh8):
    width = 16 if rows == 16 else 10
    params = {"a": 0.3 * jax.random.normal(jax.random.key(0), (rows, width))}
    size = rows if loss is plain else width
    batch = {"x": jax.random.normal(jax.random.key(1), (16, size)), "y": np.arange(16) % rows}
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    gradient = jax.jit(of(gather_where_used(loss, layout)), out_shardings=layout.grads)
    got = gradient(jax.device_put(params, layout.params), jax.device_put(batch, layout.batch))
    want = jax.jit(of(loss))(params, batch)
    np.testing.assert_allclose(got["a"], want["a"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "rows", "stage"),
    [(recurrent, 10, 2), (recurrent, 10, 3), (tied, 11, 2), (plain, 11, 3)],
)
def test_rules_of_derivatives_hold_no_tracers(loss, rows, stage, mesh8):
    """What jax keeps of them would keep a whole program's arrays."""
    params, batch = {"a": jnp.ones((rows, 10))}, {"x": jnp.ones((16, 10)), "y": np.arange(16) % 9}
    batch["x"] = jnp.ones((16, rows if loss is plain else 10))
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    with jax.checking_leaks():
        gradient = jax.jit(jax.grad(gather_where_used(loss, layout)), out_shardings=layout.grads)
        gradient.trace(params, batch)


def mlp(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]


def forces(p, x):
    """Fit the gradient of a network too, as a potential's forces are."""
    values, slopes = jax.vmap(jax.value_and_grad(lambda row: mlp(p, row).sum()))(x)
    return jnp.mean(values**2) + jnp.mean((slopes - x) ** 2)


def two_views(p, x):
    return jnp.mean((mlp(p, x) - mlp(p, x[:, ::-1])) ** 2)


@pytest.mark.parametrize(
    ("loss", "stage"),
    [(forces, 0), (forces, 1), (forces, 2), (forces, 3), (two_views, 0), (two_views, 1)],
)
def test_weights_of_several_products_are_reduced_once(loss, stage, mesh8):
    """Where gradients are whole; where they are partitioned, in a loss of gradients."""
    sizes = {"a": (16, 64), "b": (64, 64), "c": (64, 16)}
    keys = jax.random.split(jax.random.key(0), 3)
    normal = (
        jax.random.normal(k, shape) / 6 for k, shape in zip(keys, sizes.values(), strict=True)
    )
    params = dict(zip(sizes, normal, strict=True))
    x = jax.random.normal(jax.random.key(1), (32, 16))
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=1)
    recipe = zerojax.Recipe(reshard_after_forward=stage < 3)
    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout, recipe)
    report = step.audit(x)
    assert report.problems == ()
    reductions = [one for one in report.collectives if one.op != "all-gather" and one.elements > 1]
    assert sum(one.elements for one in reductions) == layout.num_params
    state, _ = step(step.init(params), x)
    grads = jax.jit(jax.grad(loss))(params, x)
    for key, got in zerojax.unpad(state.params, layout).items():
        np.testing.assert_allclose(got, params[key] - grads[key], rtol=1e-4, atol=1e-5)


def test_a_cpu_counts_each_reduction_of_a_shard(mesh8):
    """Compilers for GPUs and TPUs reduce-scatter both views' gradients too: 2.63 Psi."""
    params = {"a": jnp.ones((16, 64)), "b": jnp.ones((64, 64)), "c": jnp.ones((64, 16))}
    layout = zerojax.make_layout(params, mesh8, stage=2, min_size=1)
    step = zerojax.make_train_step(two_views, optax.sgd(1.0), layout)
    report = step.audit(jnp.ones((32, 16)))
    assert [problem.kind for problem in report.problems] == ["volume"]
    assert "Recipe(reduce='once')" in str(report)
    assert report.judged_volume == pytest.approx(1.5 * report.theory_volume, rel=0.01)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("h100:1x8", marks=pytest.mark.aot("cuda")),
        pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu")),
    ],
)
def test_compilers_reduce_weights_of_a_loss_of_gradients_once(target):
    sizes = {"a": (64, 512), "b": (512, 512), "c": (512, 64)}
    params = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    layout = zerojax.make_layout(params, zerojax.aot.topology_mesh(target, {"data": 8}), stage=2)
    step = zerojax.make_train_step(forces, optax.adam(1e-3), layout)
    report = step.audit(jax.ShapeDtypeStruct((1024, 64), jnp.float32))
    assert report.problems == ()
    assert report.judged_volume == pytest.approx(report.theory_volume, rel=0.01)


@pytest.mark.aot("libtpu")
def test_a_table_whose_columns_are_cut_is_told_how_it_is_scattered():
    """No row count divides, so that the layout cuts 16 of 128 columns; libtpu all-reduces these."""
    params = {"tab": jax.ShapeDtypeStruct((100003, 128), jnp.bfloat16)}
    mesh = zerojax.aot.topology_mesh("v5p:2x2x2", {"data": 8})

    def report(rules):
        layout = zerojax.make_layout(params, mesh, stage=2, rules=rules)
        step = zerojax.make_train_step(
            lambda p, ids: jnp.mean(jnp.tanh(p["tab"][ids].astype(jnp.float32))),
            optax.adam(1e-3),
            layout,
            zerojax.Recipe(precision=zerojax.Precision(params="bfloat16")),
        )
        return step.audit(jax.ShapeDtypeStruct((8192,), jnp.int32))

    remedies = {problem.remedy for problem in report(()).problems}
    assert remedies == {
        "cut its rows, which are padded then: rules=[zerojax.Rule(path='tab', dim=0)]"
    }
    report([zerojax.Rule(path="tab", dim=0)]).raise_if_problems()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_a_table_that_is_looked_up_shards_are_summed_across_replicas(stage):
    """Slow links: the partitioner sums the whole table over all devices."""
    mesh = zerojax.make_mesh({"replica": 2, "data": 4})
    params, tokens = {**PARAMS, "head": PARAMS["emb"].T}, np.tile(TOKENS, (1, 8))
    layout = zerojax.make_layout(
        params, mesh, stage=stage, axis="data", batch_axes=("replica", "data")
    )

    def loss(params, tokens):
        return loss_of(lambda x, _: x @ params["head"], params, tokens)

    step = zerojax.make_train_step(loss, optax.sgd(1.0), layout)
    step.audit(
        TOKENS[:, :1]
    ).raise_if_problems()  # of few lookups the partitioner gathers gradients
    report = step.audit(tokens)
    report.raise_if_problems()
    far = [move for move in report.moves if "replica" in move.axes and move.record.elements > 1]
    assert {move.spans for move in far} == {("replica",)}
    state, _ = step(step.init(params), tokens)
    grads = jax.grad(loss)(params, tokens)
    for name, new in zerojax.unpad(state.params, layout).items():
        np.testing.assert_allclose(new, params[name] - grads[name], rtol=1e-5, atol=1e-6)
