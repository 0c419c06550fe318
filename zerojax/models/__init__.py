"""A plain JAX model: nothing in here imports zerojax, so a user's model needs no change."""

from . import gpt

__all__ = ["gpt"]
