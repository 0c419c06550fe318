"""What is taken for elementwise, of all that JAX offers: of a part of its operands comes that part.

Weights that wait for their gather go through such operations slice by slice, transposed or joined.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from zerojax._jaxpr import bind, is_elementwise

SHAPE, PART = (4, 6), slice(1, 3)
KEY = jax.random.key(0)
ROOMS = (jnp, jax.nn, jax.lax, jax.scipy.special)


def ways():
    """Yield each function of JAX that takes a matrix, or two, or a key and matrices, as used so."""
    for room in (*ROOMS, jax.random):
        keys = (KEY,) if room is jax.random else ()
        for name in dir(room):
            function = getattr(room, name)
            if name[0] != "_" and callable(function) and not inspect.isclass(function):
                for count in (1, 2):
                    yield f"{room.__name__}.{name}", functools.partial(function, *keys), count


def equations(jaxpr):
    """Yield the equations of a program that hold no other."""
    for eqn in jaxpr.eqns:
        inner = [*core.jaxprs_in_params(eqn.params)]
        for held in inner:
            yield from equations(held)
        if not inner:
            yield eqn


def judged():
    """Map each equation that is judged elementwise, by what makes it another one, to its maker."""
    found = {}
    for name, function, count in ways():
        try:
            traced = jax.make_jaxpr(function)(*[jnp.ones(SHAPE)] * count)
        except Exception:  # noqa: BLE001  # it takes something else
            continue
        for eqn in equations(traced.jaxpr):
            shapes = [getattr(x.aval, "shape", None) for x in (*eqn.invars, *eqn.outvars)]
            if SHAPE in shapes and {*shapes} <= {SHAPE, ()} and is_elementwise(eqn):
                kinds = tuple(str(x.aval) for x in eqn.invars)
                found.setdefault((eqn.primitive.name, kinds, str(eqn.params)), (name, eqn))
    return found


def value_of(aval, random):
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(KEY, aval.shape) if aval.shape else KEY
    return jnp.asarray(random.uniform(0.2, 0.8, aval.shape) * 3).astype(aval.dtype)


@pytest.mark.filterwarnings("ignore")
def test_a_part_of_the_result_is_the_result_of_the_part():
    random, found = np.random.default_rng(0), judged()
    assert len(found) > 100
    wrong = []
    for (name, *_), (maker, eqn) in found.items():
        values = [value_of(x.aval, random) for x in eqn.invars]
        (whole,) = bind(eqn, values)
        (part,) = bind(eqn, [x[PART] if x.shape else x for x in values])
        is_real = jnp.issubdtype(part.dtype, jnp.inexact)
        if not np.array_equal(part, whole[PART], equal_nan=is_real):
            wrong.append(f"{name} of {maker}")
    assert wrong == []
