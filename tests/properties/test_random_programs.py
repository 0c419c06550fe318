"""Programs that a grammar draws: the numbers of plain jax and optax, and no whole weight kept.

A seed draws 25 programs; docs/benchmarks.md tells of a thousand:

    ZEROJAX_PROGRAM_SEEDS=40 scripts/test tests/properties/test_random_programs.py
"""

from __future__ import annotations

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from jax.interpreters import partial_eval

import zerojax
from tests.properties import programs
from tests.properties.programs import Program
from zerojax.collectives import gather_where_used

NUM_STEPS = 2
#: The variable that asks for more than one seed, and the programs of each.
SEEDS, PER_SEED = "ZEROJAX_PROGRAM_SEEDS", 25
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8}
#: How many roundings an update may be off by: gradients are sums of up to 48 terms through some ten
#: operations, and optimizers divide by their sizes. A wrong reduction is off by one in ten or more.
ROUNDINGS = {"fp32": 2**13, "bf16": 2**5}


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def plain_steps(program: Program, params, batches):
    """Train with jax and optax alone, masters in fp32 where the program computes in bf16."""
    tx = programs.OPTIMIZERS[program.optimizer]()
    if program.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(program.clip_norm), tx)
    low = jnp.bfloat16 if program.precision == "bf16" else jnp.float32

    @jax.jit
    def step(params, state, batch):
        def loss(p):
            return program.loss(jax.tree.map(lambda x: x.astype(low), p), batch)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = tx.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        losses.append(float(value))
    return params, losses


def close(got, want, start, precision, path):
    """Assert that a leaf has moved as it should: error over the largest move."""
    rounding = ROUNDING[precision]
    got, want, start = (np.asarray(x, np.float32) for x in (got, want, start))
    moved = np.abs(want - start).max()
    error = np.abs(got - want).max()
    bound = rounding * (ROUNDINGS[precision] * moved + 4 * np.abs(want).max())
    assert error <= bound, f"{path}: off by {error:.2e} where {moved:.2e} was moved"


def kept_weights(program: Program, layout) -> list[str]:
    """List what of a weight's size, and made of a gathered one, is kept for the backward pass.

    What of the forward pass the backward pass reads is an output of `jax.vjp`; without what it does
    not need, its program has a gather or it has none. A loss that is warned of is not silent.
    """
    loss = gather_where_used(program.loss, layout)
    stored = [jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for leaf in layout.leaves]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        traced = jax.make_jaxpr(
            lambda params, batch: jax.tree.leaves(jax.vjp(loss, params, batch)[1])
        )(layout.structure.unflatten(stored), jax.eval_shape(lambda: program.batch(0)))
    if any("are gathered before the loop" in str(one.message) for one in told):
        return []
    smallest = min(
        np.prod(leaf.shape) for leaf in layout.leaves if leaf.cut and len(leaf.shape) > 1
    )
    found = []
    for i, out in enumerate(traced.jaxpr.outvars):
        shape = out.aval.shape
        if program.num_examples not in shape and np.prod(shape) >= smallest:
            needed = [j == i for j in range(len(traced.jaxpr.outvars))]
            if "zerojax_gathered" in str(partial_eval.dce_jaxpr(traced.jaxpr, needed)[0]):
                found.append(str(out.aval))
    return found


def check(program: Program) -> None:
    sizes, axis = programs.MESHES[program.mesh]
    count = int(np.prod(list(sizes.values())))
    mesh = zerojax.make_mesh(sizes, devices=jax.devices()[:count])
    key = jax.random.key(0)
    start = jax.jit(program.init)(key)
    layout = zerojax.make_layout(
        start, mesh, stage=program.stage, axis=axis, min_size=program.min_size
    )
    recipe = zerojax.Recipe(
        precision=program.precision,
        accumulate=program.accumulate,
        reduce=program.reduce,
        clip_norm=program.clip_norm,
        remat=program.remat,
    )
    tx = programs.OPTIMIZERS[program.optimizer]()
    step = zerojax.make_train_step(program.loss, tx, layout, recipe)
    batches = [program.batch(i) for i in range(NUM_STEPS)]
    want, losses = plain_steps(program, start, batches)
    if program.stage == 3:
        assert not kept_weights(program, layout)
    state = step.init(start)
    promised = layout.bytes_per_device(tx, recipe)
    bound = 2**8 * ROUNDING[program.rounded]
    for number, batch in enumerate(batches):
        state, metrics = step(state, batch)
        assert abs(float(metrics["loss"]) - losses[number]) <= bound * max(1, abs(losses[number]))
    assert held(state.params) == promised["parameters"]
    assert held(state.masters or ()) == promised["masters"]
    assert held(state.opt_state) == promised["optimizer"]
    got = zerojax.unpad(state.params if state.masters is None else state.masters, layout)
    for (path, w), g, s in zip(
        jax.tree_util.tree_leaves_with_path(want),
        jax.tree.leaves(got),
        jax.tree.leaves(start),
        strict=True,
    ):
        close(g, w, s, program.rounded, jax.tree_util.keystr(path))


@pytest.mark.parametrize("number", range(int(os.environ.get(SEEDS, "1"))))
def test_programs_have_the_numbers_of_plain_jax_and_keep_no_weight(number):
    @seed(number)
    @settings(
        max_examples=PER_SEED,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs.strategy())
    def run(program):
        check(program)

    run()


@pytest.mark.parametrize("program", programs.FOUND, ids=lambda p: p.blocks[0].kind)
def test_programs_that_were_wrong_once(program):
    check(program)
