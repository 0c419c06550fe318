"""Every optimizer of optax, wrapped: the same five steps, and bytes as the layout predicts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.properties.factories import EXCLUDED, made_factories, public_factories
from tests.properties.optimizers import TABLE, Case, complex_params, example_params

NUM_STEPS = 5
SUPPORTED = [case for case in TABLE if case.unsupported is None]


@functools.cache
def drawn():
    return example_params()


def fast(params):
    return params.fast if isinstance(params, optax.LookaheadParams) else params


@functools.cache
def draw(number, shape):
    keys = jax.random.split(jax.random.key(100 + number), 3)
    return (
        jax.random.uniform(keys[0], shape, minval=0.5, maxval=1.5),
        jax.random.normal(keys[1], shape),
        0.3 * jax.random.normal(keys[2], (NUM_STEPS, *shape)),
    )


def problem(params):
    """Draw the constants of a loss without sums over dims: its gradients are equal to the bit."""
    return [draw(number, p.shape) for number, p in enumerate(jax.tree.leaves(params))]


def loss_fn(constants, step, params):
    total = 0.0
    for p, (curvature, target, noise) in zip(jax.tree.leaves(params), constants, strict=True):
        terms = 0.5 * curvature * jnp.abs(p - target) ** 2 + (noise[step] * p).real
        total = total + jnp.sum(terms) / p.size**0.5
    return total


def five_steps(case: Case, tx, params, constants):
    """Run a user's loop; return each step's updates and the last state."""
    tx = optax.with_extra_args_support(case.around(tx))
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, number, constants):
        loss = functools.partial(loss_fn, constants, number)
        value, grads = jax.value_and_grad(loss)(fast(params))
        if case.params is complex_params:
            grads = jax.tree.map(jnp.conj, grads)
        updates, state = tx.update(grads, state, params, **case.extra_args(loss, value, grads))
        return updates, optax.apply_updates(params, updates), state

    history = []
    for number in range(NUM_STEPS):
        updates, params, state = step(params, state, jnp.int32(number), constants)
        history.append([np.asarray(u) for u in jax.tree.leaves(updates)])
    return history, state


def largest_error(got, want):
    """Give the largest error of a leaf at a step, over the leaf's largest update."""
    worst = 0.0
    for of_step, wanted in zip(got, want, strict=True):
        for a, b in zip(of_step, wanted, strict=True):
            size, error = np.abs(b).max(), np.abs(a - b).max()
            worst = max(worst, error / size if size else np.inf if error else 0.0)
    return worst


def held_by_one_device(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def planned(layout, case, precision=None):
    """Plan what a device holds, on a mesh that has no devices."""
    return zerojax.plan(
        layout.shapes,
        case.make(),
        stage=layout.stage,
        num_devices=8,
        hardware="h100",
        recipe=zerojax.Recipe(precision=precision or "fp32"),
        placement=zerojax.Placement(rules=layout.rules, min_size=layout.min_size),
    ).bytes


def make_layout(case, mesh, stage):
    return zerojax.make_layout(
        fast(case.params(drawn())),
        mesh,
        stage=stage,
        min_size=16,
        rules=[zerojax.Rule(path="layers/", stacked=1)],
    )


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_five_steps_equal_the_unsharded_run_and_bytes_are_as_predicted(case, mesh8):
    """In a loop of one's own stages 1 and 2 are one program: each optimizer runs at one of them."""
    params = case.params(drawn())
    constants = problem(fast(params))
    want, _ = five_steps(case, case.make(), params, constants)
    for stage in (0, 1 + SUPPORTED.index(case) % 2, 3):
        layout = make_layout(case, mesh8, stage)
        whole = layout.sharding(jax.sharding.PartitionSpec())
        shardings = layout.params
        if isinstance(params, optax.LookaheadParams):
            shardings = optax.LookaheadParams(shardings, shardings)
        placed = jax.device_put(params, shardings)
        tx = zerojax.sharded(case.make(), layout)
        got, state = five_steps(case, tx, placed, jax.device_put(constants, whole))
        assert largest_error(got, want) <= case.tolerance, f"stage {stage}: {case.reason}"

        if case.around(tx) is tx:  # what is around the wrapper is not the wrapper's
            predicted = layout.bytes_per_device(case.make(), stored=False)
            assert held_by_one_device(state) == predicted["optimizer"], f"stage {stage}"
            assert held_by_one_device(placed) == predicted["parameters"], f"stage {stage}"
            assert held_by_one_device(state) == planned(layout, case).optimizer, f"stage {stage}"


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case.name)
def test_a_train_step_runs_it_or_says_which_argument_it_needs(case, mesh8):
    layout = make_layout(case, mesh8, 2)

    def loss(params, batch):
        return jnp.mean(batch) * sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(params))

    step = zerojax.make_train_step(loss, case.make(), layout)
    given = step.abstract_state(), jax.ShapeDtypeStruct((16,), jnp.float32)
    functions = [name for name in case.extra if name.endswith("_fn")]
    if not functions:
        step.lower(*given)
        return
    with pytest.raises(ValueError, match=f"needs {functions[0]}=.*params, {functions[0]}="):
        step.lower(*given)


@pytest.mark.parametrize("chained", [False, True])
def test_sam_learns_in_a_train_step_as_it_does_alone(chained, mesh8):
    """Its update takes neither `grad=` nor `value=`, also where a chain hands over all."""
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    tx = optax.chain(sam, optax.scale(0.5)) if chained else sam
    params, batch = {"w": jnp.eye(8) / 2}, jnp.ones((16, 8)) * jnp.arange(8.0)

    def loss(params, batch):
        return jnp.mean((batch @ params["w"] - batch) ** 2)

    step = zerojax.make_train_step(loss, tx, zerojax.make_layout(params, mesh8, stage=2))
    state, held = step.init(params), tx.init(params)
    for _ in range(4):
        state, _ = step(state, batch)
        updates, held = tx.update(jax.grad(loss)(params, batch), held, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.params["w"], params["w"], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sm3", "split_real_and_imaginary"])  # each `params`
@pytest.mark.parametrize("master", [None, jnp.float32], ids=["plain", "with masters"])
def test_a_train_state_holds_what_is_planned_to_the_byte(name, master, mesh8):
    (case,) = [case for case in TABLE if case.name == name]
    low = None if master is None else jnp.bfloat16
    precision = zerojax.Precision(params=low, master=master)
    for stage in (0, 1, 2, 3):
        layout = make_layout(case, mesh8, stage)
        recipe = zerojax.Recipe(precision=precision)
        step = zerojax.make_train_step(lambda p, b: 0.0, case.make(), layout, recipe)
        state = step.init(lambda: case.params(drawn()))
        found = planned(layout, case, precision)
        masters = 0 if state.masters is None else held_by_one_device(state.masters)
        assert held_by_one_device(state.params) == found.parameters, f"stage {stage}"
        assert masters == found.masters, f"stage {stage}"
        assert held_by_one_device(state.opt_state) + masters == found.optimizer, f"stage {stage}"


@pytest.mark.parametrize(
    "case", [case for case in TABLE if case.unsupported], ids=lambda case: case.name
)
def test_what_cannot_be_supported_raises_and_says_so(case, mesh8):
    layout = make_layout(case, mesh8, 1)
    params = case.params(drawn())
    tx = zerojax.sharded(case.make(), layout)
    grads = fast(params)
    if case.name == "differentially_private_aggregate":
        grads = jax.tree.map(lambda p: jnp.stack([p, p]), grads)
    with pytest.raises(ValueError, match=r"structure|shape|state") as raised:
        tx.update(grads, tx.init(params), params)
    assert str(raised.value)


def test_every_public_factory_of_optax_is_in_the_table_or_excluded_with_a_reason():
    public = set(public_factories())
    assert public - made_factories() - set(EXCLUDED) == set()
    assert set(EXCLUDED) - public == set(), "excluded, but no longer there"
    assert all(case.reason for case in TABLE if case.tolerance > 1e-6)
