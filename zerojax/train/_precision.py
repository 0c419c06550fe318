"""Casts between masters and parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from zerojax._tree import floating_dtype
from zerojax._types import PyTree
from zerojax.layout import Precision
from zerojax.train._loss_scale import check_loss_scale


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Cast the floating leaves of a tree; None casts nothing."""
    return jax.tree.map(lambda x: x.astype(floating_dtype(x.dtype, dtype)), tree)


def updated_dtype(precision: Precision) -> Any:
    """Give the dtype of what the optimizer updates: masters, or the parameters themselves."""
    return precision.master if precision.master is not None else precision.params


def check_precision(precision: Precision | None) -> Precision:
    """Fill in the default; refuse dtypes that are not floating and a bad loss scale."""
    precision = precision or Precision()
    for name in ("params", "master", "reduce"):
        dtype = getattr(precision, name)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"Precision.{name} needs a floating dtype, got {jnp.dtype(dtype)}")
    check_loss_scale(precision.loss_scale)
    return precision
