"""The learning rate that an update is multiplied with.

A schedule is a closure of the optimizer: its state holds a step count, and the rate only stands in
the traced update, as one of the scalars that its result is multiplied with last:

    { lambda ; g:f32[8] count:i32[] p:f32[8]. let
        ...
        c:f32[8] = div mean root                the direction
        d:f32[] = mul ...count...               the schedule, of the state alone
        e:f32[8] = mul d c                      the update
      in (e,) }
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._jaxpr import depending, is_variable, variables
from zerojax._traced import Traced, is_fill

#: Operations that change neither the values nor their order.
_PASSED_ON = frozenset({"convert_element_type", "copy", "reshape"})
#: Operations whose last two operands may each have been multiplied with a rate.
_JOINED = frozenset({"add", "sub", "select_n"})


def learning_rate(traced: Traced, num_leaves: int, state: Sequence[jax.Array]) -> jax.Array | None:
    """Return the rate of this update: what all leaves are multiplied with after anything else.

    Args:
        traced: `update(grads, state, params, ...)`, which returns updates and a state.
        num_leaves: leaves of `grads`, and of the updates.
        state: the leaves of the state before the update.

    Returns:
        A scalar; None where leaves have rates of their own, the loss decides the rate or a count
        whether there is an update, or it ends with another operation (inside `optax.MultiSteps`, in
        schedule-free optimizers), or with a sum of what has factors of its own, times -1.
    """
    held = traced.inputs[num_leaves : num_leaves + len(state)]
    decided = depending(traced.eqns, traced.inputs[2 * num_leaves + len(state) :])  # by the loss
    moving = depending(traced.eqns, set(traced.inputs) - set(held))
    results = [x for x in variables(traced.outputs[:num_leaves]) if x in moving]
    # In a leaf of one element a factor looks like the direction: others know better.
    results = [x for x in results if x.aval.size > 1] or results
    found = {_factors(traced, x, moving, decided) for x in results}
    factors = found.pop() if len(found) == 1 else None
    if factors in (None, ((), 1)):
        return None
    scalars, constant = factors
    needed = traced.slice(scalars, stop=lambda _: False)
    given = traced.consts | dict(zip(held, state, strict=True))
    values = needed.run([given[x] for x in needed.inputs])
    return functools.reduce(lambda rate, x: rate * x.reshape(()), values, jnp.float32(-constant))


def _factors(
    traced: Traced, var: Any, moving: set[Any], decided: set[Any]
) -> tuple[tuple[Any, ...], float] | None:
    """Return what a result is multiplied with last: scalars of the state alone, and a constant.

    Scalars that the gradients or parameters decide are part of the direction. None where a rate may
    stand further inside: in every term of a sum, or branch of a choice.
    """
    scalars, constant = [], 1.0
    while (eqn := traced.maker(var)) is not None:
        if eqn.primitive.name == "neg":
            constant, (var,) = -constant, eqn.invars
        elif eqn.primitive.name in _PASSED_ON:
            var = eqn.invars[0]
        elif eqn.primitive.name == "mul":
            # The factor first: what does not move, else the smaller one.
            factor, var = sorted(
                eqn.invars, key=lambda x: (is_variable(x) and x in moving, x.aval.size)
            )
            if factor.aval.size > 1 or not is_variable(var):
                break
            if not is_variable(factor):
                number = complex(factor.val)  # of complex parameters, with no imaginary part
                if number.imag:
                    break
                constant *= number.real
            elif factor not in moving:
                scalars.append(_source(traced, factor))
                if not jnp.issubdtype(scalars[-1].aval.dtype, jnp.floating):
                    return None  # whether there is an update
            elif factor in decided:
                return None
        else:
            if not scalars and abs(constant) == 1 and eqn.primitive.name in _JOINED:
                terms = [x for x in eqn.invars[-2:] if is_variable(x) and x in moving]
                own = [_factors(traced, x, moving, decided) for x in terms]
                if ((), 1) not in own and ((), -1) not in own:
                    return None
            break
    return tuple(scalars), constant


def _source(traced: Traced, var: Any) -> Any:
    """Return the scalar that was converted and broadcast to this one."""
    while (eqn := traced.maker(var)) is not None:
        is_same = eqn.primitive.name in _PASSED_ON or is_fill(eqn)
        if not is_same or not is_variable(eqn.invars[0]):
            break
        (var,) = eqn.invars
    return var
