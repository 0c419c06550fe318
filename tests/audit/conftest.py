"""Layouts of the programs that the audit's tests write by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from jax.sharding import Mesh

from tests.audit.audit_programs import layout_of


@pytest.fixture(scope="module")
def make(mesh8: Mesh) -> Callable[..., Any]:
    """Return what makes the layout of a stage: `make(3, "stack")`."""
    return functools.partial(layout_of, mesh8)
