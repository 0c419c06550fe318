"""Primitives of JAX by what they do, as `primitives.toml` lists them."""

import functools
from collections.abc import Mapping
from typing import Any

from zerojax._plain import read_table

LISTS: Mapping[str, Any] = read_table("zerojax", "primitives.toml")


@functools.cache
def primitives(*traits: str) -> frozenset[str]:
    """Return the names of primitives that have some of the traits."""
    return frozenset(name for trait in traits for name in LISTS[trait].split())
