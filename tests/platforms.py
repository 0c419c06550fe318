"""Steps that are built as for GPUs or TPUs, and run by virtual CPU devices.

What a step gathers ahead, in which order, in which phases and how it is written back depends on the
platform. None of it may change a number. So a layout is told that its devices are others:

    with built_for("v5p"):
        state, metrics = step(state, batch)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax.numpy as jnp

from zerojax.collectives.forms import _forms, _tiles
from zerojax.hardware import HARDWARE
from zerojax.layout import Layout, _torus
from zerojax.train import _step

#: Chips by name. Of v4 a collective spans one dim of the torus, and not two: on 2 x 2 x 2 there are
#: three phases.
CHIPS = {
    "gpu": HARDWARE["h100"],
    "v4": dataclasses.replace(HARDWARE["v4"], span=1),
    "v5e": HARDWARE["v5e"],
    "v5p": HARDWARE["v5p"],
}


@contextlib.contextmanager
def built_for(name: str) -> Iterator[None]:
    """Let layouts be of a chip, eight of which form a torus of 2 x 2 x 2; "cpu" changes nothing."""
    if name == "cpu":
        yield
        return
    chip, sum_over = CHIPS[name], _forms.PerDevice.sum_over

    def in_fp32(self: Any, x: Any, dim: int) -> Any:
        wide = jnp.promote_types(x.dtype, jnp.float32)  # XLA:CPU sums no 16-bit numbers
        return sum_over(self, x.astype(wide), dim).astype(x.dtype)

    with contextlib.ExitStack() as stack:
        for owner, attribute, value in (
            (Layout, "platform", chip.platform),
            (Layout, "hardware", chip),
            (_torus, "hardware_of", lambda kind: chip),
            (_torus, "_place", lambda x: (x.id % 2, x.id // 2 % 2, x.id // 4, 0)),
            (_forms.PerDevice, "sum_over", in_fp32),
            (_tiles, "_held", lambda x, order: x),  # how an array lies in memory
            (_step, "compiler_options", lambda *_: {}),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield
