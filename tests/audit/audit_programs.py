"""Training steps as a user writes them with jit; zerojax has no part in them but the layout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zerojax

WIDTH, HIDDEN, LAYERS, BATCH = 64, 128, 4, 96  # no activation has the shape of a weight
PAIR = {"down": (HIDDEN, WIDTH), "up": (WIDTH, HIDDEN)}
STACK = {name: (LAYERS, *shape) for name, shape in PAIR.items()}
LIST = {f"layer{i}": PAIR for i in range(LAYERS)}
TREES = {"pair": PAIR, "stack": STACK, "list": LIST}
TX = optax.adam(1e-3)
STACKED = (zerojax.Rule(path=".", stacked=1),)


def shapes_of(tree, dtype=jnp.float32):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, dtype), tree, is_leaf=lambda x: isinstance(x, tuple)
    )


@functools.cache
def layout_of(mesh, stage, tree="pair"):
    rules = STACKED if tree == "stack" else ()
    return zerojax.make_layout(shapes_of(TREES[tree]), mesh, stage=stage, rules=rules)


def constrain(tree, mesh, *spec):
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P(*spec)))


def mse(y, x):
    return jnp.mean((y - x).astype(jnp.float32) ** 2)


def layer(w, x):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def compile_step(
    loss,
    layout,
    *,
    params=None,
    opt=None,
    grads=True,
    out: bool | None = True,
    donate=(0, 1),
    finish=None,
):
    """Compile a step as a user writes one: states placed by the layout, or by hand."""
    shapes = layout.shapes
    state = jax.eval_shape(TX.init, shapes)
    params_at = layout.params if params is None else params
    opt_at = layout.opt_state(TX) if opt is None else opt

    def step(params, opt_state, x):
        g = jax.grad(loss)(params, x)
        if grads and layout.stage != 1:  # stage 1 keeps whole gradients, or never makes them
            g = jax.lax.with_sharding_constraint(g, layout.grads if grads is True else grads)
        updates, opt_state = TX.update(g, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state) if finish is None else finish(params, opt_state)

    return (
        jax.jit(
            step,
            in_shardings=(params_at, opt_at, layout.batch),
            out_shardings=(params_at, opt_at) if out is True else out,
            donate_argnums=donate,
        )
        .lower(shapes, state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32))
        .compile()
    )


def pair_loss(params, x):
    return mse(layer(params, x), x)


def kinds(report):
    return {problem.kind for problem in report.problems}


def only(report, kind):
    found = [problem for problem in report.problems if problem.kind == kind]
    assert len(found) == 1, report
    return found[0]
