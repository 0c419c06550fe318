"""The loss scale: what a step does with it, and what it is in the next one."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zerojax._types import PyTree
from zerojax.layout import DynamicLossScale

#: Powers of two between these have a reciprocal that fp32 holds exactly.
_BOUNDS = (2.0**-126, 2.0**126)


class LossScale(NamedTuple):
    """Hold what a dynamic loss scale carries from step to step.

    Attributes:
        scale: float32 scalar, what the next loss is multiplied by.
        good_steps: int32 scalar, finite steps since the scale last changed.
    """

    scale: Any
    good_steps: Any


def check_loss_scale(policy: DynamicLossScale | None) -> None:
    """Raise a ValueError for values that can't be meant."""
    if policy is None:
        return
    if not isinstance(policy, DynamicLossScale):
        raise ValueError(
            f"Precision.loss_scale needs a DynamicLossScale or None, got {policy!r}; write "
            "Precision(loss_scale=DynamicLossScale(initial=...))"
        )
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name != "growth_interval" and not _is_power_of_two(value):
            raise ValueError(
                f"DynamicLossScale.{field.name} needs a power of two from 2**-126 to 2**126, so "
                f"that scaling rounds nothing, got {value!r}; write 2.0**n"
            )
    steps = policy.growth_interval
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 2**31:
        raise ValueError(
            f"DynamicLossScale.growth_interval needs a whole number of steps, 1 or more, got "
            f"{steps!r}"
        )
    if policy.factor <= 1:
        raise ValueError(
            f"DynamicLossScale.factor needs to be 2 or more, got {policy.factor!r}: by it the "
            "scale grows, and is divided when gradients overflow"
        )
    if not policy.smallest <= policy.initial <= policy.largest:
        raise ValueError(
            f"DynamicLossScale needs smallest <= initial <= largest, got {policy.smallest!r}, "
            f"{policy.initial!r}, {policy.largest!r}; move initial between the other two"
        )


def first_loss_scale(policy: DynamicLossScale | None) -> LossScale | None:
    """Give what a training starts with."""
    if policy is None:
        return None
    return LossScale(jnp.full((), policy.initial, jnp.float32), jnp.zeros((), jnp.int32))


def next_loss_scale(policy: DynamicLossScale, now: LossScale, finite: jax.Array) -> LossScale:
    """Give what the step after this one starts with."""
    good_steps = jnp.where(finite, now.good_steps + 1, 0)
    grows = good_steps >= policy.growth_interval
    grown = jnp.where(grows, jnp.minimum(now.scale * policy.factor, policy.largest), now.scale)
    shrunk = jnp.maximum(now.scale / policy.factor, policy.smallest)
    return LossScale(jnp.where(finite, grown, shrunk), jnp.where(grows, 0, good_steps))


def scaled(loss: Any, scale: jax.Array | None) -> Any:
    """Multiply a loss, at least in fp32: an fp16 loss times a scale overflows."""
    if scale is None:
        return loss
    loss = jnp.asarray(loss)
    return loss.astype(jnp.promote_types(loss.dtype, jnp.float32)) * scale


def unscaled(grads: PyTree, now: LossScale | None) -> PyTree:
    """Divide gradients by the scale that their loss had; exact, but where they underflow."""
    if now is None:
        return grads
    inverse = 1 / now.scale
    return jax.tree.map(lambda g: (g * inverse).astype(g.dtype), grads)


def _is_power_of_two(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return _BOUNDS[0] <= value <= _BOUNDS[1] and math.frexp(value)[0] == 0.5
