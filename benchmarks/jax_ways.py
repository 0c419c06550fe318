"""One process of zerojax at a stage, or of plain jit with the same placement written by hand.

    python benchmarks/jax_ways.py zerojax2 RANK PROCESSES PORT bf16    # or jit2; reads work.serve

A way `jitN` uses nothing of zerojax: what it shares with `zerojaxN` in slowness is XLA's.
"""

from __future__ import annotations

import functools
import sys
import time

START = time.perf_counter()

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gpt
import work

TX = optax.adamw(work.LEARNING_RATE, eps=work.EPS, weight_decay=work.WEIGHT_DECAY)
SIZE = work.Size()
Way = tuple[Callable[[np.ndarray], float], Callable[[], dict[str, int]]]


def zerojax(stage: int, precision: str) -> Way:
    """Return the step of zerojax, and what it holds."""
    import zerojax

    mesh = zerojax.make_mesh({"data": jax.device_count()})
    layout = zerojax.make_layout(gpt.init(SIZE), mesh, stage=stage)
    recipe = zerojax.Recipe(precision=precision)
    train_step = zerojax.make_train_step(functools.partial(gpt.loss, SIZE), TX, layout, recipe)
    state = train_step.init(gpt.init(SIZE))

    def step(batch: np.ndarray) -> float:
        nonlocal state
        state, metrics = train_step(state, train_step.place(batch.astype(np.int32)))
        jax.block_until_ready(state)
        return float(metrics["loss"])

    grads = layout.bytes_per_device(TX)["gradients"]  # they live within a step
    return step, lambda: {
        "params": _held(state.params),
        "grads": grads,
        "opt": _held((state.opt_state, state.masters)),
    }


def jit(stage: int, precision: str) -> Way:
    """Return a step as people write it: placed states, and constraints on the gradients.

    Weights are kept in fp32, and cast where they are used.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def cut(x: Any) -> NamedSharding:
        return rows if x.ndim and x.shape[0] % mesh.size == 0 and x.size > 2048 else whole

    params = gpt.init(SIZE)
    shards = jax.tree.map(cut, params)
    place = jax.lax.with_sharding_constraint
    held = shards if stage == 3 else jax.tree.map(lambda _: whole, params)
    updated = shards if stage else held
    states = jax.tree.map(cut if stage else lambda _: whole, jax.eval_shape(TX.init, params))

    def in_precision(params: Any, tokens: jax.Array) -> jax.Array:
        dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[precision]
        return gpt.loss(SIZE, jax.tree.map(lambda x: x.astype(dtype), params), tokens)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=((held, states), None))
    def train_step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(in_precision)(params, tokens)
        grads = place(grads, updated)
        mine = place(params, updated)
        updates, opt_state = TX.update(grads, opt_state, mine)
        return (place(optax.apply_updates(mine, updates), held), opt_state), loss

    params = jax.device_put(params, held)
    state = params, jax.jit(TX.init, out_shardings=states)(params)

    def step(batch: np.ndarray) -> float:
        nonlocal state
        tokens = jax.make_array_from_process_local_data(rows, batch.astype(np.int32))
        state, loss = train_step(state, tokens)
        jax.block_until_ready(state)
        return float(loss)

    return step, lambda: {"params": _held(state[0]), "opt": _held(state[1])}


def _held(tree: Any) -> int:
    """Count the bytes of a tree on this process."""
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)


def main(way: str, rank: int, processes: int, port: int, precision: str) -> None:
    """Connect with the other processes and serve."""
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, rank)
    make = {"zerojax": zerojax, "jit": jit}[way[:-1]]
    work.serve(rank, SIZE, START, *make(int(way[-1]), precision))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
