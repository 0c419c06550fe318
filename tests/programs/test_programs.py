"""Whole programs under stages 1 to 3: plain optax's losses, the promised bytes, clean audits."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

from tests.programs.program import SMALL, TOKENS
from tests.texts import roundings

PROGRAMS = pytest.importorskip("tests.programs.table", exc_type=ImportError).PROGRAMS

NUM_STEPS = 3
KEY, NOISE = jax.random.key(0), jax.random.key(1)
#: What a loss is summed over: the logits of a batch.
NUM_SUMMANDS = 16 * TOKENS * SMALL.vocabulary
#: By how much a loss of these sizes changes where weights and gradients have 8 bits.
BF16 = 2.0**-8


@functools.cache
def made(name):
    return PROGRAMS[name](SMALL)


@functools.cache
def plain(name):
    """Train with jax and optax alone, on one device."""
    program, recipe = made(name), made(name).recipe
    tx = program.tx
    if recipe.clip_norm is not None:
        tx = optax.chain(optax.clip_by_global_norm(recipe.clip_norm), tx)
    stateful = program.model_state is not None
    noisy = name in NOISY

    @jax.jit
    def step(params, opt_state, model_state, number):
        def loss_fn(params):
            narrow = recipe.precision.params
            params = jax.tree.map(lambda x: x.astype(narrow or x.dtype), params)
            asked = {"key": jax.random.fold_in(NOISE, number)} if noisy else {}
            asked |= {"model_state": model_state} if stateful else {}
            out = program.loss(params, program.batch, **asked)
            return out if stateful else (out, None)

        (loss, new), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, new, loss

    params = program.init(KEY)
    opt_state, losses = tx.init(params), []
    model_state = program.model_state(KEY) if stateful else None
    for number in range(NUM_STEPS):
        params, opt_state, model_state, loss = step(params, opt_state, model_state, number)
        losses.append(float(loss))
    return losses


NOISY = ("vit", "gpt2", "haiku")


def held(tree):
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


#: Without microbatches stages 1 and 2 are one program: each is run at one of them, and at 3.
CASES = [(name, stage) for n, name in enumerate(PROGRAMS) for stage in (1 + n % 2, 3)]


@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_program_trains_as_without_zero_and_holds_what_its_stage_promises(name, stage, mesh8):
    program = made(name)
    step = program.step(mesh8, stage, KEY)
    given = {"key": NOISE} if name in NOISY else {}
    state = step.init(program.init, KEY, **given)
    losses = []
    for _ in range(NUM_STEPS):
        state, metrics = step(state, program.batch)
        losses.append(float(metrics["loss"]))
    narrow = program.recipe.precision.params is not None
    bound = BF16 if narrow else 30 * roundings(NUM_STEPS, NUM_SUMMANDS)
    np.testing.assert_allclose(losses, plain(name), rtol=bound)
    promised = step.layout.bytes_per_device(program.tx, program.recipe)
    assert held(state.params) == promised["parameters"]
    step.audit(program.batch).raise_if_problems()
