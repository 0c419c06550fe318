"""What a user may hand over as an optimizer, and the optimizer inside."""

from __future__ import annotations

from typing import Any

import optax

#: The attribute of a wrapper's `init` that holds the optimizer inside.
WRAPPED = "zerojax_wrapped"


def as_transformation(tx: Any) -> optax.GradientTransformationExtraArgs:
    """Return the bare optax optimizer: what `zerojax.sharded` wrapped, or what was handed over.

    Raises:
        TypeError: it is no optax optimizer.
    """
    if hasattr(tx, "gradient_transformation"):  # optax.MultiSteps
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"an optax GradientTransformation (init and update) is expected, got "
            f"{type(tx).__name__}; hand over the optimizer itself, as in optax.adamw(1e-3)"
        )
    return getattr(tx.init, WRAPPED, None) or optax.with_extra_args_support(tx)
