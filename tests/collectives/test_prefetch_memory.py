"""What loops that gather ahead hold: two layers at most, and nothing that waits for the links."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zerojax
from tests.collectives.test_prefetch import gradient_of, needed
from tests.collectives.uses import LOOPS, WIDE, params_of
from zerojax._jaxpr import depending, num_products, num_summed, opened, scan_parts, variables
from zerojax._tree import as_shapes
from zerojax.collectives import gather_where_used
from zerojax.collectives.gathers._boxed import REDUCED
from zerojax.collectives.passes import prefetched
from zerojax.collectives.passes._equations import Equations, is_barrier, is_gather, is_named
from zerojax.models import gpt


def loops_of(program, args):
    """List the scans of a program, with their bodies and what depends on what they carry."""
    for eqn in opened(needed(program, args))[0].eqns:
        if eqn.primitive.name == "scan":
            first, num_carry = scan_parts(eqn.params)
            body = opened(eqn.params["jaxpr"])[0]
            yield eqn, body, depending(body.eqns, body.invars[first : first + num_carry])


@pytest.mark.parametrize("name", ["scan", "scan of remat", "indexed"])
def test_two_layers_are_held_at_most(name, mesh8):
    gradient, layout, args = gradient_of([name], mesh8)
    run = functools.partial(jax.jit, out_shardings=layout.grads)
    before, after = (
        run(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
        for f in (gradient, prefetched(gradient, 1, layout))
    )
    a_layer = 4 * 2 * math.prod(WIDE)
    assert after <= before + 2 * a_layer


def test_a_layer_is_computed_again_when_the_one_behind_it_is_done(mesh8):
    """Of two rematerialised layers in a turn all activations would lie there at one time."""

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(h @ w["w"]) @ w["v"]

    def loss(params, x):
        turn = lambda h, w: (layer(layer(h, w[0]), w[1]), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(turn, x, params)[0] ** 2)

    params = [params_of(LOOPS["scan"], WIDE) for _ in range(2)]
    rules = [zerojax.Rule(path=".", stacked=1)]
    layout = zerojax.make_layout(params, mesh8, stage=3, min_size=16, rules=rules)
    x = jax.device_put(jnp.ones((16, WIDE[0])), layout.batch)
    placed = jax.device_put(params, layout.params), x
    gradient = jax.grad(gather_where_used(loss, layout))
    ahead = prefetched(gradient, 1, layout)
    *_, (_, body, _) = loops_of(ahead, placed)
    barriers = [[*variables(eqn.invars)] for eqn in body.eqns if is_barrier(eqn)]
    # A layer's input and its result's gradient wait for each other.
    pairs = [[var for var in given if var.aval.shape == x.shape] for given in barriers]
    assert [*map(len, pairs)].count(2) == 2
    got, want = (jax.jit(f, out_shardings=layout.grads)(*placed) for f in (ahead, gradient))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_on_a_tpu_layers_wait_for_those_before(mesh8, monkeypatch):
    """Two a turn: none is gathered before the layer before the last is done; nor is one behind."""
    gradient, layout, args = gradient_of(["scan"], mesh8)
    want = jax.jit(gradient, out_shardings=layout.grads)(*args)
    monkeypatch.setattr(type(layout), "platform", "tpu")
    ahead = prefetched(gradient, 1, layout)
    loops = [*loops_of(ahead, args)]
    assert [eqn.params["unroll"] for eqn, *_ in loops] == [2, 2]
    for _, body, behind in loops:
        gathered = [one for one in body.eqns if is_gather(one)]
        assert len(gathered) == 2
        assert all(behind.issuperset(one.outvars) for one in gathered)
    outer = opened(needed(ahead, args))[0].eqns
    for loop, *_ in loops:  # the last layer waits for all that the loop made, its stacks too
        waiting = [e for e in outer if e.primitive.name == "optimization_barrier"]
        assert any(set(loop.outvars) & {*variables(e.invars)} >= made_by(loop) for e in waiting)
    # What the last layer of the backward loop reduces is there before what stands behind it.
    rows = {x for e in outer if e.primitive.name == "jit" for x in e.outvars}
    assert len(rows & {*variables(waiting[-1].invars)}) == 2
    got = jax.jit(ahead, out_shardings=layout.grads)(*args)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def made_by(loop):
    """Return the results of a loop that are used."""
    return {var for var in loop.outvars if type(var).__name__ != "DropVar"}


def test_a_backward_loop_waits_for_gradients_made_before_it(mesh8):
    """Or compilers make the head's behind the loop, and keep the logits' gradient all along."""
    ahead, args = ahead_of_head(mesh8, lambda x: None)
    eqns = opened(needed(ahead, args))[0].eqns
    *_, loop = (eqn for eqn in eqns if eqn.primitive.name == "scan")
    reduced = next(eqn for eqn in eqns if is_named(eqn, REDUCED))
    assert reduced.outvars[0].aval.shape == args[0]["head"].shape
    assert not depending(eqns, reduced.outvars).isdisjoint(variables(loop.invars))


def ahead_of_head(mesh, told):
    """Return the gradient of a scan with a head, ahead, and its arguments; `told` sees a sum."""
    params = {"stack": params_of(LOOPS["scan"], WIDE), "head": jnp.ones((WIDE[0], 32))}
    layout = zerojax.make_layout(params, mesh, stage=3, min_size=16)

    def loss(params, x):
        x = LOOPS["scan"](params["stack"], x)
        told(x.T @ jnp.ones((len(x), 1)))
        return jnp.mean((x @ params["head"]) ** 2)

    gradient = jax.grad(gather_where_used(loss, layout))
    return prefetched(gradient, 1, layout), as_shapes((params, jnp.zeros((16, WIDE[0]))))


def test_what_a_loss_prints_is_computed_where_it_stands(mesh8):
    ahead, args = ahead_of_head(mesh8, lambda x: jax.debug.print("{}", x))
    assert "debug" in str(jax.make_jaxpr(ahead)(*args))


@pytest.mark.parametrize(
    ("platform", "num_rows", "num_waited"), [("gpu", 16, 1), ("tpu", 1024, 1), ("tpu", 1016, 0)]
)
def test_gradients_of_a_layer_are_reduced_while_it_computes(
    platform, num_rows, num_waited, mesh8, monkeypatch
):
    """On a TPU without SparseCores a product later, and only if whole they take less room."""
    gradient, layout, (params, x) = gradient_of(["scan"], mesh8)
    monkeypatch.setattr(type(layout), "platform", platform)
    x = jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype)
    (_, body, _) = [*loops_of(prefetched(gradient, 1, layout), (params, x))][-1]
    places = {eqn.outvars[0]: at for at, eqn in enumerate(body.eqns) if is_named(eqn, REDUCED)}
    waited = {
        var: sum(map(num_products, body.eqns[places[var] : at]))
        for at, eqn in enumerate(body.eqns)
        if eqn.primitive.name == "optimization_barrier"
        for var in places.keys() & {*variables(eqn.invars)}
    }
    assert len(places) == 2
    assert len(waited) == num_waited
    assert platform == "gpu" or all(waited.values())


@pytest.mark.parametrize(("platform", "ending"), [("gpu", [1, 1]), ("tpu", [2])])
def test_gathers_of_a_backward_layer_take_turns_on_a_gpu(platform, ending, mesh8, monkeypatch):
    """Each ends before a product of its own; elsewhere all of them before one."""
    gradient, layout, args = gradient_of(["scan"], mesh8)
    monkeypatch.setattr(type(layout), "platform", platform)
    (_, body, _) = [*loops_of(prefetched(gradient, 1, layout), args)][-1]
    gathered = {var for eqn in body.eqns if is_gather(eqn) for var in eqn.outvars}
    barriers = [eqn for eqn in body.eqns if eqn.primitive.name == "optimization_barrier"]
    waited = [len(gathered & {*variables(eqn.invars)}) for eqn in barriers]
    assert [n for n in waited if n] == ending


def ordered(layers, loss, mesh, monkeypatch, *, stage=3, num_rows=16, min_size=16, weights=3):
    """Return the `Equations` of a list's gradient on a GPU; `weights` of 64 x 64 may wait."""
    layout = zerojax.make_layout(layers, mesh, stage=stage, min_size=min_size)
    monkeypatch.setattr(type(layout), "platform", "gpu")
    gradient = jax.grad(gather_where_used(loss, layout))
    ahead = prefetched(gradient, 0, layout, bucket_bytes=weights * 4 * 64 * 64)
    return Equations(needed(ahead, as_shapes((layers, jnp.zeros((num_rows, 64))))))


@pytest.mark.parametrize(("num_rows", "weights"), [(16, 3), (2048, 12)])
def test_products_of_a_list_wait_for_gradients_by_the_bucket(num_rows, weights, mesh8, monkeypatch):
    """On a GPU, whatever a layer takes; what a product reads waits too: here 8 weights a device."""
    layers = [[jnp.ones((64, 64))] * 4] * 4

    def loss(params, x):
        for w in jax.tree.leaves(params):
            x = jnp.tanh(x @ w)
        return x.sum()

    eqns = ordered(layers, loss, mesh8, monkeypatch, num_rows=num_rows, weights=weights).eqns
    reduced = {var for eqn in eqns if is_named(eqn, REDUCED) for var in eqn.outvars}
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    waited = [len(reduced & {*variables(eqn.invars)}) for eqn in barriers]
    assert len(reduced) == 16
    # A group is one weight; of the last three no product stands behind the second group after it.
    assert [n for n in waited if n] == [1] * 13


@pytest.mark.parametrize(("num_rows", "waits"), [(2048, [1]), (16, [])])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_products_of_a_turn_wait_for_its_gradients(stage, num_rows, waits, mesh8, monkeypatch):
    """Or what they are made of waits for the links too, if it takes more than they do."""
    stack = [jnp.ones((4, 64, 64))] * 4

    def loss(stack, x):
        def body(x, ws):
            for w in ws:
                x = jnp.tanh(x @ w)
            return x, None

        return jax.lax.scan(jax.checkpoint(body), x, stack)[0].sum()

    layout = zerojax.make_layout(stack, mesh8, stage=stage, min_size=16)
    monkeypatch.setattr(type(layout), "platform", "gpu")
    gradient = jax.grad(gather_where_used(loss, layout))
    ahead = prefetched(gradient, 0, layout, bucket_bytes=3 * 4 * 64 * 64)
    loops = [*loops_of(ahead, as_shapes((stack, jnp.zeros((num_rows, 64)))))]
    reduced = [
        {v for e in body.eqns if is_named(e, REDUCED) for v in e.outvars} for _, body, _ in loops
    ]
    assert [len(found) for found in reduced] == [0, 4]
    waited = [len(reduced[-1] & {*variables(e.invars)}) for e in loops[-1][1].eqns if is_barrier(e)]
    assert [n for n in waited if n] == waits  # behind the last three weights stands no product


@pytest.mark.parametrize(("stage", "min_size"), [(0, 16), (3, 16), (3, 1000)])
def test_sums_of_vectors_wait_with_the_gradients_of_matrices(stage, min_size, mesh8, monkeypatch):
    """Or what they add up lies there until the end; cut or not, in the shape of their parameter."""
    layers = [{"w": jnp.ones((64, 64)), "b": jnp.ones(64), "c": jnp.ones(64)}] * 8

    def loss(params, x):
        x = x.reshape(8, 2, 64)
        for p in params:
            x = jnp.tanh((x @ p["w"].T + p["b"]) * p["c"])
        return x.sum()

    # Each gradient is a group, two of vectors follow on each other.
    flat = ordered(layers, loss, mesh8, monkeypatch, stage=stage, min_size=min_size, weights=1e-3)
    eqns = flat.eqns
    waits = [
        (at, var)
        for at, eqn in enumerate(eqns)
        if eqn.primitive.name == "optimization_barrier"
        for var, behind in zip(eqn.invars, eqn.outvars, strict=True)
        if var.aval.ndim < 3 and behind not in eqns[at + 1].invars  # else the product reads it
    ]
    assert sorted(var.aval.ndim for _, var in waits) == [1] * 14 + [2] * 7
    # What is read before the barrier would not be what waits.
    assert not any(var in eqn.invars for at, var in waits for eqn in eqns[:at])


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("num_rows", "waits"), [(1024, True), (576, False)])
def test_what_a_table_is_multiplied_with_waits_as_the_table(
    stage, num_rows, waits, mesh8, monkeypatch
):
    """The gradient of 128 logits a device does not wait until the look-up's is there; of 72."""

    def loss(params, x):
        table = params["table"]
        x += table[jnp.arange(len(x)) % 100]
        for w in jax.tree.leaves(params["layers"]):
            x = jnp.tanh(x @ w)
        return jnp.tanh(x @ table.T).sum()

    params = {"table": jnp.ones((100, 64)), "layers": [[jnp.ones((64, 64))]] * 8}
    flat = ordered(params, loss, mesh8, monkeypatch, stage=stage, num_rows=num_rows)
    of_table = [100 * 64, 8 * 100 * 64]
    products = filter(num_products, flat.eqns)
    made = [x for eqn in products for x in eqn.outvars if x.aval.size in of_table]
    assert len(made) == 1
    held = variables(x for eqn in flat.eqns if is_barrier(eqn) for x in eqn.invars)
    assert any(made[0] in flat.path_to(x)[0] for x in held) == waits


@pytest.mark.parametrize(("platform", "words", "waits"), [
    ("gpu", 97, True), ("gpu", 96, False), ("tpu", 97, False),
    ("gpu", 5000, True), ("gpu", 5120, False),  # 8 divides both, 16 parts of one alone
])  # fmt: skip
def test_a_product_that_pads_waits_for_what_is_cast(platform, words, waits, mesh8, monkeypatch):
    """XLA:GPU would make a padded copy of the logits' gradient while it lies there in fp32."""

    def loss(params, x):
        logits = (x @ params["table"].T).astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1).sum()

    params = {"table": jnp.ones((words, 64), jnp.bfloat16)}
    layout = zerojax.make_layout(params, mesh8, stage=1, min_size=16)
    gradient = jax.grad(gather_where_used(loss, layout), argnums=(0, 1))
    monkeypatch.setattr(type(layout), "platform", platform)
    jaxpr = jax.make_jaxpr(prefetched(gradient, 0, layout))(
        params, jnp.ones((16, 64), jnp.bfloat16)
    )
    behind = {x for eqn in jaxpr.eqns if is_barrier(eqn) for x in eqn.outvars}
    (product,) = [x for x in jaxpr.eqns if num_products(x) and num_summed(x) == words]
    assert behind.issuperset(product.invars) == waits


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_order_of_gradients_changes_no_bit(stage, scan, mesh8, monkeypatch):
    """A tied embedding, biases, norms and heads, in a list of layers or a scan on a GPU."""
    sizes = {"num_layers": 3, "width": 64, "num_heads": 2, "vocab_size": 96, "context": 16}
    config = gpt.Config(**sizes, scan=scan)
    params = gpt.init(config, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (16, 17), 0, 96)
    layout = zerojax.make_layout(params, mesh8, stage=stage, min_size=16)
    gradient = jax.value_and_grad(gather_where_used(functools.partial(gpt.loss, config), layout))
    want = jax.jit(gradient)(params, tokens)
    monkeypatch.setattr(type(layout), "platform", "gpu")
    ahead = prefetched(gradient, 0, layout, bucket_bytes=1)
    assert "optimization_barrier" in str(jax.make_jaxpr(ahead)(params, tokens))
    jax.tree.map(np.testing.assert_array_equal, jax.jit(ahead)(params, tokens), want)


def test_what_a_layer_computes_twice_waits_for_its_gradient(mesh8):
    """Of a part without weights: its values would lie beside all that is computed before."""
    gradient, layout, args = gradient_of(["in_part_again"], mesh8)
    (_, body, behind) = [*loops_of(prefetched(gradient, 1, layout), args)][-1]
    (again,) = [eqn for eqn in body.eqns if eqn.primitive.name == "cos"]
    assert behind.issuperset(again.outvars)
