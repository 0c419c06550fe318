"""Of all functions that JAX offers: a loss of one that is taken for a mean over examples is one."""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.collectives.gradients._separable import why_no_mean

ROOMS = (jnp, jax.nn, jax.random, jax.scipy.special)
RANDOM = np.random.default_rng(0)
X = jnp.asarray(RANDOM.uniform(0.3, 2.0, (8, 4)), jnp.float32)
Y = jnp.asarray(RANDOM.integers(0, 4, 8), jnp.int32)
W = jnp.asarray(RANDOM.uniform(0.5, 1.5, 4), jnp.float32)
WAYS = {
    "of products": lambda f, w, x, y: f(x * w),
    "with a weight": lambda f, w, x, y: f(x, w),
    "along the examples": lambda f, w, x, y: f(x * w, axis=0),
    "along the others": lambda f, w, x, y: f(x * w, axis=1),
    "with a number": lambda f, w, x, y: f(x * w, 2),
    "with labels": lambda f, w, x, y: f(x * w, y),
    "of labels": lambda f, w, x, y: f(y, 4) * w.sum(),
    "with their mean": lambda f, w, x, y: f(x * w, jnp.mean(x)),
}


def losses(room, way):
    """Yield the losses of a module's functions that can be traced, used in one way."""
    for name in dir(room):
        function = getattr(room, name)
        if name[0] == "_" or not callable(function) or inspect.isclass(function):
            continue
        if room is jax.random:
            function = functools.partial(function, jax.random.key(0))

        def loss(w, batch, _=None, function=function):
            found = jax.tree.leaves(WAYS[way](function, w, batch["x"], batch["y"]))
            return sum(jnp.mean(jnp.real(x).astype(jnp.float32)) for x in found)

        try:
            jax.eval_shape(loss, W, {"x": X, "y": Y})
        except Exception:  # noqa: BLE001  # it takes something else
            continue
        yield name, loss


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "count"), [*((way, 2) for way in WAYS), ("along the others", 8)])
def test_what_is_taken_for_a_mean_is_one(way, count):
    batch, wrong, taken = {"x": X, "y": Y}, [], 0
    given = [{name: x[i::count] for name, x in batch.items()} for i in range(count)]
    for room in ROOMS:
        for name, loss in losses(room, way):
            try:
                if why_no_mean(loss, W, batch, count):
                    continue
                whole, parts = loss(W, batch), [loss(W, part) for part in given]
            except (TypeError, ValueError, IndexError):  # of other sizes
                continue
            taken += 1
            if np.isfinite(whole) and not np.isclose(whole, np.mean(parts), rtol=1e-4, atol=1e-5):
                wrong.append(f"{room.__name__}.{name}: {whole}, of parts {np.mean(parts)}")
    assert wrong == []
    assert taken > 5
