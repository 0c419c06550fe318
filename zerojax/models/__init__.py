"""A plain JAX model: nothing in here imports zerojax, so a user's model needs no change."""

from __future__ import annotations

from . import gpt
from .cross_entropy import chunked_cross_entropy

__all__ = ["chunked_cross_entropy", "gpt"]
