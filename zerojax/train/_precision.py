"""Casts between masters and parameters."""

from __future__ import annotations

from typing import Any

import jax

from zerojax._tree import floating_dtype
from zerojax._types import PyTree


def cast_floating(tree: PyTree, dtype: Any) -> PyTree:
    """Cast the floating leaves of a tree; None casts nothing."""
    return jax.tree.map(lambda x: x.astype(floating_dtype(x.dtype, dtype)), tree)
