"""What loops carry that grows there."""

from __future__ import annotations

import pytest

from tests.hlo.programs import wrap
from zerojax.hlo import find_carries, parse_module

STATE = "(s32[], f32[8])"
COMPUTATIONS = f"""
%body (p: {STATE}) -> {STATE} {{
  %p = {STATE} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %sum = f32[8] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %new = f32[8] add(%sum, %sum)
  ROOT %out = {STATE} tuple(%next, %new)
}}

%cond (q: {STATE}) -> pred[] {{
  %q = {STATE} parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %four = s32[] constant(4)
  ROOT %c = pred[] compare(%j, %four), direction=LT
}}

%small (t: {STATE}) -> {STATE} {{
  %t = {STATE} parameter(0)
  ROOT %v = {STATE} while(%t), condition=%cond, body=%body
}}
"""


@pytest.mark.parametrize("called", [False, True])
def test_a_sum_is_found_also_in_a_loop_that_is_called(called):
    """jax 0.12's CPU compiler runs small loops in computations of their own."""
    run = (
        "call(%state), to_apply=%small" if called else "while(%state), condition=%cond, body=%body"
    )
    program = wrap(
        "%zero = f32[] constant(0)",
        "%zeros = f32[8]{0} broadcast(%zero), dimensions={}",
        "%start = s32[] constant(0)",
        f"%state = {STATE} tuple(%start, %zeros)",
        f"%w = {STATE} {run}",
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
        computations=COMPUTATIONS,
    )
    (carry,) = (x for x in find_carries(parse_module(program)) if x.tensor.dims)
    assert carry.is_sum
    assert carry.tensor.dims == (8,)
