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

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._jaxpr import Traced, is_fill, is_variable, variables
from zerojax._types import PyTree

#: Operations that change neither the values nor their order.
_PASSED_ON = frozenset({"convert_element_type", "copy", "reshape"})


def learning_rate(
    tx: optax.GradientTransformationExtraArgs, params: PyTree, opt_state: PyTree, loss: Any
) -> jax.Array | None:
    """Return the rate of this update: what all leaves are multiplied with after anything else.

    Args:
        tx: the optimizer.
        params: arrays or shapes of what it updates.
        opt_state: its state before the update.
        loss: a scalar, for optimizers that ask for it.

    Returns:
        A scalar; None where leaves have rates of their own, or the update ends with another
        operation (inside `optax.MultiSteps`, in schedule-free optimizers).
    """

    def update(grads: PyTree, params: PyTree, loss: Any, opt_state: PyTree) -> PyTree:
        return tx.update(grads, opt_state, params, value=loss, grad=grads)[0]

    traced = Traced(update, (params, params, loss, opt_state))
    state = jax.tree.leaves(opt_state)
    held = traced.inputs[len(traced.inputs) - len(state) :]
    moving = traced.depending(x for x in traced.inputs if x not in held)
    results = [x for x in variables(traced.outputs) if x in moving]
    # In a leaf of one element a factor looks like the direction: others know better.
    results = [x for x in results if x.aval.size > 1] or results
    found = {_factors(traced, x, moving) for x in results}
    if len(found) != 1:
        return None
    scalars, constant = found.pop()
    if not scalars and constant == 1:
        return None
    needed = traced.slice(scalars, stop=lambda _: False)
    given = traced.consts | dict(zip(held, state, strict=True))
    values = needed.run([given[x] for x in needed.inputs])
    rate = jnp.float32(-constant)
    for value in values:
        rate *= value.reshape(())
    return rate


def _factors(traced: Traced, var: Any, moving: set[Any]) -> tuple[tuple[Any, ...], float]:
    """Return what a result is multiplied with last: scalars of the state alone, and a constant.

    Scalars that the gradients or parameters decide are part of the direction.
    """
    scalars, constant = [], 1.0
    while (eqn := traced.maker(var)) is not None:
        if eqn.primitive.name == "neg":
            constant, (var,) = -constant, eqn.invars
        elif eqn.primitive.name in _PASSED_ON:
            var = eqn.invars[0]
        elif eqn.primitive.name == "mul":
            # The factor first: what does not move, else the smaller one.
            factor, var = sorted(eqn.invars, key=lambda x: (_in(x, moving), x.aval.size))
            if factor.aval.size > 1 or not is_variable(var):
                break
            if not is_variable(factor):
                constant *= float(factor.val)
            elif factor not in moving:
                scalars.append(_source(traced, factor))
        else:
            break
    return tuple(scalars), constant


def _source(traced: Traced, var: Any) -> Any:
    """Return the scalar that was converted and broadcast to this one."""
    while (eqn := traced.maker(var)) is not None:
        if eqn.primitive.name not in _PASSED_ON and not is_fill(eqn):
            break
        if not is_variable(eqn.invars[0]):
            break
        (var,) = eqn.invars
    return var


def _in(atom: Any, moving: set[Any]) -> bool:
    return is_variable(atom) and atom in moving
