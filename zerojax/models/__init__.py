"""Show plain JAX models: nothing in here imports zerojax, so a user's model needs no change."""

from __future__ import annotations

from . import gpt, mlp
from .cross_entropy import chunked_cross_entropy

__all__ = ["chunked_cross_entropy", "gpt", "mlp"]
