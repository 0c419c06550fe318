"""What a loss asks for beside parameters and a batch, and what it may return."""

import functools
import inspect
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._types import LossFn

#: The parameters by which a loss asks for more than `loss_fn(params, batch)`.
ASKABLE = ("key", "step", "model_state")


def asked_of(loss_fn: LossFn) -> tuple[str, ...]:
    """Return what a loss asks for: its parameters after the first two that are named as `ASKABLE`.

    Others that have no default are refused.
    """
    names = parameters_of(loss_fn)
    for name, p in names.items():
        is_open = p.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if p.default is inspect.Parameter.empty and name not in ASKABLE and not is_open:
            raise TypeError(
                f"loss_fn asks for {name!r}, which no step gives: beside (params, batch) it may "
                f"name {', '.join(ASKABLE)}; put it into the batch, or bind it (functools.partial)"
            )
        is_key = re.fullmatch(r"(\w+_)?(key|rng|seed)s?", name)  # keypoints are none
        if p.default is None and name not in ASKABLE and is_key:
            told = f"loss_fn has a parameter {name!r}, which a step never fills: it stays None"
            warnings.warn(f"{told}, so nothing is drawn; for noise call it `key`", stacklevel=3)
    return tuple(name for name in ASKABLE if name in names)


def parameters_of(loss_fn: LossFn) -> dict[str, inspect.Parameter]:
    try:
        found = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # of a callable that does not say
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [name for name, p in found.items() if p.kind in positional][:2]
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    return {name: p for name, p in found.items() if name not in (*first, *bound)}


def read_loss(out: Any, *, has_aux: bool, has_state: bool) -> tuple[Any, Any]:
    more = "(aux, model_state)" if has_aux and has_state else "aux" if has_aux else "model_state"
    if has_aux or has_state:
        why = "with has_aux=True" if has_aux else "a loss that asks for model_state"
        tuples = (out, *out[1:]) if has_aux and has_state and isinstance(out, tuple) else (out,)
        if not all(isinstance(x, tuple) and len(x) == 2 for x in tuples):
            got = "an array" if isinstance(out, jax.Array) else type(out).__name__
            raise ValueError(f"{why}: loss_fn must return (loss, {more}), got {got}")
    loss, extra = out if has_aux or has_state else (out, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        why = "is a return missing?" if loss is None else "of (loss, aux) say so by has_aux=True"
        raise ValueError(f"loss_fn must return a scalar, got {type(loss).__name__}; {why}")
    if jnp.shape(loss):
        told = f"loss_fn must return a scalar, got shape {jnp.shape(loss)}: return the mean over it"
        raise ValueError(told)
    if isinstance(loss, float) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        got = f"the number {loss}" if isinstance(loss, float) else jnp.result_type(loss)
        told = f"loss_fn must return a floating scalar, got {got}: compute it from the parameters"
        raise ValueError(told)
    return loss, jax.tree.map(jnp.asarray, extra)
