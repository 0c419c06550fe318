"""The rules of custom derivatives: what becomes of gradients in them.

The gradient of a mean over examples has, for each of them, a part that their number divides, and
for what all share a sum of such parts. A linear rule keeps both so. This one does not:

    >>> clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))

It bounds gradients that are four times as large where a microbatch is a quarter of the batch.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend import core

from zerojax._jaxpr import bind, called, is_real, opened, used
from zerojax.collectives.gradients._mixing import Value, meet
from zerojax.collectives.gradients._traces import Refused

_JAX = Path(jax.__file__).parent
_WANTED = "a backward rule has to be linear in the gradient of each example by itself"


def is_of_jax(eqn: Any) -> bool:
    """Whether JAX wrote a function and its custom rule, as those of relu or odeint."""
    rule = eqn.params["bwd" if "bwd" in eqn.params else "jvp_jaxpr_fun"]
    _, where = _source(opened(called(eqn))[0])
    both = (where, _source(rule)[1])
    # `jax.custom_gradient` makes the function that it returns in that file.
    return all(Path(x).is_relative_to(_JAX) for x in both) and "custom_derivatives.py:" not in where


def _source(function: Any) -> tuple[str, str]:
    name, _, where = (function.debug_info.func_src_info or "").rpartition(" at ")
    return name, where


def name_rule(refused: Refused, eqn: Any) -> None:
    """Say that it is a rule that is refused, and where the user wrote it."""
    refused.args = (f"{_WANTED}, and here {refused.args[0]}",)
    if "bwd" in eqn.params:  # what a backward rule does is traced with the line of its call
        name, refused.where = _source(eqn.params["bwd"])
        refused.name = f"{refused.name or eqn.primitive.name} in {name}"
        if Path(refused.where).is_relative_to(_JAX):
            refused.where = ""


def backward(eqn: Any) -> core.ClosedJaxpr:
    """Trace the backward pass of a rule: of operands and gradients, to those of the operands."""
    avals = [x.aval for x in (*eqn.invars, *filter(is_real, eqn.outvars))]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
    count, first = len(eqn.invars), eqn.params["num_consts"]

    def pulled(*values: Any) -> list[Any]:
        consts, operands, given = values[:first], values[first:count], iter(values[count:])
        _, pull = jax.vjp(lambda *xs: bind(eqn, (*consts, *xs)), *operands)
        none = jax.dtypes.float0
        grads = [next(given) if is_real(y) else np.zeros(y.aval.shape, none) for y in eqn.outvars]
        return [g for g in pull(grads) if g.dtype != none]

    try:
        traced = jax.make_jaxpr(pulled)(*shapes)
    except Exception as error:
        raise Refused(f"it can't be traced: {error}") from error
    return used(traced)


def gradient_of(value: Value, dim: int | None) -> Value:
    """Return what is known of the gradient of a value whose dim `dim` counts examples."""
    if dim is not None:
        return Value(value.outer, -1 - value.degree)
    return Value(degree=-value.degree, pooled=not value.pooled)


def check_gradients(found: Sequence[Value], wanted: Sequence[Value]) -> None:
    """Refuse gradients of a rule's operands that are not what those of a mean would be."""
    for one, other in zip(found, wanted, strict=True):
        if one.zero:
            continue
        if one.degree != other.degree or one.pooled > other.pooled:
            raise Refused("what it returns is not")
        meet([one, other])
