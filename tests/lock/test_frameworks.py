"""Steps of other frameworks, in small forms of real code: what a lock file names of them."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax.audit import Program
from zerojax.lock import StepRecord, compare

WIDTH = 64
TX = optax.adam(1e-3)
BATCH = (16, WIDTH)
CUT = P("data")


def record_of(mesh, compiled):
    return StepRecord.of(Program.of(compiled), list(mesh.devices.flat), {})


def placed(mesh, tree, spec):
    """Place the matrices of a tree, and leave the rest whole."""

    def place(x):
        spec_of_x = spec if getattr(x, "ndim", 0) == 2 else P()
        return jax.device_put(x, NamedSharding(mesh, spec_of_x)) if eqx.is_array(x) else x

    return jax.tree.map(place, tree)


def differences(old, new):
    return {one.where: one for one in compare(old, new) if one.kind == "argument"}


class Block(nnx.Module):
    """A norm's scale and two weights, as a transformer's layer has them."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x * self.scale)))


class Net(nnx.Module):
    """Two blocks in a list."""

    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def nnx_step(mesh, cut=CUT):
    """Lower a step as Tunix does: the optimizer is donated, the model is not."""

    net = Net(nnx.Rngs(0))
    nnx.update(net, placed(mesh, nnx.state(net), CUT))
    optimizer = nnx.Optimizer(net, TX, wrt=nnx.Param)
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    nnx.update(optimizer, placed(mesh, state, cut))

    @nnx.jit(donate_argnums=1)
    def step(net, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda net: jnp.mean(net(x) ** 2))(net)
        # As a compiler may place it that is free to: not as it was taken.
        scale = grads["layers"][0]["scale"]
        scale[...] = jax.lax.with_sharding_constraint(scale[...], NamedSharding(mesh, P("data")))
        optimizer.update(net, grads)
        return loss

    x = jax.device_put(jnp.ones(BATCH), NamedSharding(mesh, P("data")))
    return step.lower(net, optimizer, x).compile()


def test_arguments_of_nnx_have_the_names_of_their_module(mesh8):
    accepted = record_of(mesh8, nnx_step(mesh8))
    weight = accepted.leaves["0/layers/*/up/kernel/value"]
    assert (weight.count, weight.spec, weight.donated) == (2, "P('data',)", False)
    assert accepted.leaves["1/opt_state/0/mu/layers/*/up/kernel/value"].donated
    assert "inferred from 20 moments" in accepted.theory
    assert "4 of 10 leaves sharded; ZeRO moves 2.61" in accepted.theory
    found = differences(accepted, record_of(mesh8, nnx_step(mesh8, cut=P())))
    told = found["1/opt_state/0/mu/layers/*/down/kernel/value"]
    assert (told.expected[:15], told.seen[:8]) == ("spec P('data',)", "spec P()")


def test_what_nnx_returns_otherwise_than_it_was_taken_is_told(mesh8):
    leaves = record_of(mesh8, nnx_step(mesh8)).leaves
    moment = leaves["1/opt_state/0/mu/layers/0/scale/value"]
    assert (moment.spec, moment.settled) == ("P()", False)
    assert leaves["1/opt_state/0/mu/layers/*/up/kernel/value"].settled


def filtered_step(mesh, cut=CUT):
    """Lower a step as equinox's examples do."""
    net = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, key=jax.random.key(0))
    state = TX.init(eqx.filter(net, eqx.is_inexact_array))

    @eqx.filter_jit(donate="all-except-first")
    def step(x, net, state):
        loss, grads = eqx.filter_value_and_grad(lambda net: jnp.mean(jax.vmap(net)(x) ** 2))(net)
        updates, state = TX.update(grads, state)
        return loss, eqx.apply_updates(net, updates), state

    x = jax.device_put(jnp.ones(BATCH), NamedSharding(mesh, P("data")))
    return step.lower(x, placed(mesh, net, CUT), placed(mesh, state, cut)).compile()  # type: ignore[attr-defined]


def test_arguments_of_filter_jit_have_the_names_of_the_results_in_their_place(mesh8):
    accepted = record_of(mesh8, filtered_step(mesh8))
    assert accepted.leaves["1/1/layers/0/weight"].spec == "P('data',)"
    assert accepted.leaves["1/2/0/mu/layers/0/weight"].donated
    assert "inferred from 8 moments" in accepted.theory
    found = differences(accepted, record_of(mesh8, filtered_step(mesh8, cut=P())))
    assert "seen spec P()" in str(found["1/2/0/nu/layers/1/weight"])


def test_a_state_of_ones_own_called_first_keeps_its_path(mesh8):
    """Only where all arguments are flat were they flattened by equinox."""
    state = {"first": [shape(mesh8, CUT, WIDTH, WIDTH)], "step": shape(mesh8, P(), dtype="int32")}
    jitted = jax.jit(lambda state: (state["first"][0] * 2, state["step"] + 1))
    leaves = record_of(mesh8, jitted.lower(state).compile()).leaves
    assert set(leaves) == {"0/first/0", "0/step"}


@pytest.mark.parametrize("name", ["blocks/{}", "layer_{}", "layer{}", "conv2d{}"])
def test_layers_of_any_spelling_have_one_line(mesh8, name):
    state = {f"params/{name}".format(n): shape(mesh8, CUT, WIDTH, WIDTH) for n in range(3)}
    jitted = jax.jit(lambda state: jax.tree.map(lambda x: x * 2, state))
    leaves = record_of(mesh8, jitted.lower(state).compile()).leaves
    assert set(leaves) == {f"0/params/{name}".format("*")}


def shape(mesh, spec, *dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))


def plain_step(mesh, specs):
    """Lower a step of a list of layers, each placed by its own spec."""
    state = {"params": [{"w": shape(mesh, spec, WIDTH, WIDTH)} for spec in specs]}

    def step(state, x):
        def loss(params):
            h = x
            for layer in params:
                h = jnp.tanh(h @ layer["w"])
            return jnp.mean(h**2)

        grads = jax.grad(loss)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}

    out = jax.tree.map(lambda x: x.sharding, state)
    x = shape(mesh, CUT, *BATCH)
    return jax.jit(step, donate_argnums=0, out_shardings=out).lower(state, x).compile()


def test_layers_that_lie_differently_keep_a_line_each(mesh8):
    """Two layers of four lie otherwise: 0 and 2 can't have the line of 1 and 3."""
    program = Program.of(plain_step(mesh8, [P("data"), P(), P("data"), P()]))
    record = StepRecord.of(program, list(mesh8.devices.flat), {})
    assert sum(leaf.count for leaf in record.leaves.values()) == len(program.inputs)
    assert sum(leaf.bytes for leaf in record.leaves.values()) == program.argument_bytes
    assert record.leaves["0/params/0,2/w"].spec == "P('data',)"
    assert record.leaves["0/params/1,3/w"].spec == "P()"


def test_a_placement_written_otherwise_is_no_difference():
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1), ("data", "tensor"))
    old = record_of(mesh, plain_step(mesh, [P("data")]))
    new = record_of(mesh, plain_step(mesh, [P(("data", "tensor"), None)]))
    assert compare(old, new) == ()
    assert old.mesh == {"data": 8}


@pytest.mark.parametrize("deep", [0, 3])
def test_parameters_of_one_name_and_shape_are_counted_one_by_one(mesh8, deep):
    """An encoder and a decoder have layers of one shape, below containers of a trainer's own."""
    leaf = shape(mesh8, CUT, WIDTH, WIDTH)
    params = {"encoder": {"0": {"w": leaf}}, "decoder": {"0": {"w": leaf}}}
    opt_state = jax.tree.map(
        lambda x: shape(mesh8, CUT if x.ndim else P(), *x.shape, dtype=x.dtype),
        jax.eval_shape(TX.init, params),
    )

    def loss(params, x):
        h = jnp.tanh(x @ params["encoder"]["0"]["w"])
        return jnp.mean((h @ params["decoder"]["0"]["w"]) ** 2)

    def step(state, x):
        inner = state
        for _ in range(deep):
            inner = inner[0]
        params, opt_state = inner
        updates, opt_state = TX.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = (params, opt_state)
    for _ in range(deep):
        state = (state,)
    x = shape(mesh8, CUT, *BATCH)
    record = record_of(mesh8, jax.jit(step, donate_argnums=0).lower(state, x).compile())
    assert f"{2 * WIDTH**2:,} parameters, 2 of 2 leaves sharded" in record.theory


def test_a_layer_of_a_stack_along_any_dim_is_named(mesh8):
    """MaxText stacks its layers along dim 1."""
    stack = shape(mesh8, CUT, WIDTH, 3, 2 * WIDTH)

    def step(stack):
        layer = jax.lax.with_sharding_constraint(stack[:, 1], NamedSharding(mesh8, P()))
        return jnp.tanh(layer) @ jnp.ones((2 * WIDTH, 2))

    record = record_of(
        mesh8, jax.jit(lambda state: step(**state)).lower({"stack": stack}).compile()
    )
    assert {one.leaf for one in record.moved.values()} == {"0/stack"}


def test_whole_numbers_are_not_named_for_what_is_moved_of_activations(mesh8):
    """Tokens [16, 64] have the shape of activations [16, 64], and are no floats."""
    whole = NamedSharding(mesh8, P())

    def step(tokens):
        h = jax.lax.with_sharding_constraint(jnp.tanh(tokens.astype(jnp.float32)), whole)
        return jnp.sum(h * jnp.arange(WIDTH))

    record = record_of(
        mesh8, jax.jit(step).lower(shape(mesh8, CUT, *BATCH, dtype="int32")).compile()
    )
    found = {one.leaf for key, one in record.moved.items() if key.startswith("all-gather f32")}
    assert found == {""}
