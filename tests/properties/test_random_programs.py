"""Programs that a grammar draws: the numbers of plain jax and optax, and no whole weight kept.

Ten programs, or of each seed that is asked for 25; docs/benchmarks.md tells of a thousand:

    ZEROJAX_PROGRAM_SEEDS=40 scripts/test tests/properties/test_random_programs.py
"""

from __future__ import annotations

import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from jax.interpreters import partial_eval

import zerojax
from tests.platforms import built_for
from tests.properties import programs
from tests.properties.programs import Program
from zerojax.collectives import gather_where_used

NUM_STEPS = 2
KEY = jax.random.key(7)
#: The warning of a stack that is cut along its layers: what is told is not lost silently.
TOLD = "all layers of leaf .* are gathered before the loop"
#: The warning of programs without a loop that can gather ahead.
NOT_AHEAD = "(nothing is|not) gathered ahead"
#: The variable that asks for a number of seeds, and the programs of each.
SEEDS = "ZEROJAX_PROGRAM_SEEDS"
PER_SEED = 25 if SEEDS in os.environ else 10
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-8}
#: How many roundings an update may be off by: gradients are sums of up to 48 terms through some ten
#: operations, and optimizers divide by their sizes. A wrong reduction is off by one in ten or more.
ROUNDINGS = {"fp32": 2**13, "bf16": 2**5}
LOSS_ROUNDINGS = {"fp32": 2**8, "bf16": 2**5}


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def unmarked(batch):
    return {name: getattr(x, "value", x) for name, x in batch.items()}


def noise(program: Program, number: int, blocks: int):
    """Draw what dropout keeps in a step, [B, D]: a key for each part that is computed alone.

    One reduction a step computes `blocks` of examples alone, one on each device; of a block or of
    the batch, every `accumulate`-th example is a microbatch.
    """
    step_key = jax.random.fold_in(KEY, number)
    keep = np.zeros((blocks, program.num_examples // blocks, program.dim), np.float32)
    for block in range(blocks):
        key = jax.random.fold_in(step_key, block) if blocks > 1 else step_key
        for part in range(program.accumulate):
            one = jax.random.fold_in(key, part) if program.accumulate > 1 else key
            rows = keep[block, part :: program.accumulate]
            rows[...] = programs.dropped(one, rows.shape)
    return keep.reshape(program.num_examples, program.dim)


def plain_steps(program: Program, params, batches, blocks):
    """Train with jax and optax alone, masters in fp32 where the program computes in bf16.

    Returns:
        The parameters, and of each step its loss and that of each example.
    """
    tx = programs.OPTIMIZERS[program.optimizer]()
    if program.clip_norm is not None:
        tx = programs.clipped(program.optimizer, program.clip_norm)
    # What is normalised over examples is another program for each microbatch; else they are one.
    parts = program.accumulate if program.beside == "batch norm" else 1

    @jax.jit
    def gradient(params, batch, keep, moving):
        def loss(p):
            value, rows, new = program.compute(program.read(p), batch, keep, moving)
            return value, (rows, new)

        return jax.value_and_grad(loss, has_aux=True)(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, told = tx.init(params), []
    moving = jnp.zeros(program.dim) if program.beside == "batch norm" else None
    for number, batch in enumerate(map(unmarked, batches)):
        keep = noise(program, number, blocks) if program.beside == "dropout" else None
        found = []
        for part in range(parts):
            one = jax.tree.map(lambda x, part=part: x[part::parts], batch)
            (value, (rows, moving)), grads = gradient(params, one, keep, moving)
            found.append((value, grads))
        value, grads = jax.tree.map(lambda *x: sum(x) / parts, *found)
        params, state = update(params, state, grads)
        told.append((float(value), np.asarray(rows)))
    return params, told


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
    keep = jnp.ones((program.num_examples, program.dim)) if program.beside == "dropout" else None
    moving = jnp.zeros(program.dim) if program.beside == "batch norm" else None
    loss = gather_where_used(
        lambda params, batch: program.compute(params, unmarked(batch), keep, moving)[0], layout
    )
    stored = [jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for leaf in layout.leaves]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        traced = jax.make_jaxpr(
            lambda params, batch: jax.tree.leaves(jax.vjp(loss, params, batch)[1])
        )(layout.structure.unflatten(stored), jax.eval_shape(lambda: program.batch(0)))
    if any(re.match(TOLD, str(one.message)) for one in told):
        return []
    smallest = min(
        np.prod(leaf.shape)
        for leaf in layout.leaves
        if leaf.dim is not None and len(leaf.shape) > 1
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
        precision=programs.PRECISIONS[program.precision],
        accumulate=program.accumulate,
        reduce=program.reduce,
        clip_norm=program.clip_norm,
        remat=program.remat,
        prefetch=program.prefetch,
        reshard_after_forward=program.reshard,
    )
    tx = programs.OPTIMIZERS[program.optimizer]()
    step = zerojax.make_train_step(
        program.loss,
        tx,
        layout,
        recipe,
        has_aux=program.beside == "aux",
        model_state=jnp.zeros(program.dim) if program.beside == "batch norm" else None,
    )
    batches = [program.batch(i) for i in range(NUM_STEPS)]
    masters = start
    if recipe.precision.master is not None:
        masters = jax.tree.map(lambda x: x.astype(recipe.precision.master), start)
    blocks = layout.num_batch_parts if recipe.reduction(layout.kinds) == "once" else 1
    want, told = plain_steps(program, masters, batches, blocks)
    if program.stage == 3 and program.reshard:
        assert not kept_weights(program, layout)
    state = step.init(start, key=KEY if program.beside == "dropout" else None)
    promised = layout.bytes_per_device(tx, recipe)
    bound = LOSS_ROUNDINGS[program.rounded] * ROUNDING[program.rounded]
    for batch, (loss, rows) in zip(batches, told, strict=True):
        state, metrics = step(state, batch)
        assert abs(float(metrics["loss"]) - loss) <= bound * max(1, abs(loss))
        if program.beside == "aux":
            aux = metrics["aux"]
            assert np.abs(np.asarray(aux["rows"]) - rows).max() <= bound * max(1, rows.max())
            assert abs(float(aux["mean"]) - rows.mean()) <= bound * max(1, rows.mean())
            assert int(aux["odd"]) == int(jnp.sum(batch["tokens"] % 2))
    assert held(state.params) == promised["parameters"]
    assert held(state.masters or ()) == promised["masters"]
    assert held(state.opt_state) == promised["optimizer"]
    got = zerojax.unpad(state.params if state.masters is None else state.masters, layout)
    for (path, w), g, s in zip(
        jax.tree_util.tree_leaves_with_path(want),
        jax.tree.leaves(got),
        jax.tree.leaves(masters),
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
        with warnings.catch_warnings():
            for told in (TOLD, NOT_AHEAD):
                warnings.filterwarnings("ignore", told)
            with built_for(program.chip):
                check(program)

    run()


@pytest.mark.parametrize("program", programs.FOUND, ids=lambda p: p.blocks[0].kind)
def test_programs_that_were_wrong_once(program):
    check(program)
