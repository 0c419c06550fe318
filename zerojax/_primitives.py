"""Primitives of JAX by what they do, as `primitives.toml` lists them."""

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

LISTS: Mapping[str, Any] = tomllib.loads(
    resources.files("zerojax").joinpath("primitives.toml").read_text("utf-8")
)


@functools.cache
def primitives(*traits: str) -> frozenset[str]:
    """Return the names of primitives that have some of the traits."""
    return frozenset(name for trait in traits for name in LISTS[trait].split())
