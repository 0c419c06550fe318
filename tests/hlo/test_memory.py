"""What lies in memory at one time, told by the schedule."""

from __future__ import annotations

import pytest

from zerojax.hlo import most_alive, parse_module

PROGRAM = """HloModule m, is_scheduled=true

%body (s: (f32[8], f32[8])) -> (f32[8], f32[8]) {{
  %s = (f32[8], f32[8]) parameter(0)
  %x = f32[8] get-tuple-element(%s), index=0
  %g = f32[8] all-gather(%x), dimensions={{0}}
  %y = f32[8] add(%g, %g)
  ROOT %t = (f32[8], f32[8]) tuple(%y, %y)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8] parameter(0)
{lines}
}}
"""
GATHER = "  %{0} = f32[8] all-gather(%p), dimensions={{0}}"
USE = "  %u{0} = f32[8] add(%{0}, %p)"
LOOP = "  %t = (f32[8], f32[8]) tuple(%p, %{0})\n  %w = (f32[8], f32[8]) while(%t), body=%body"

TUPLE = "  %t = (f32[8], f32[8]) tuple(%{0}, %p)"
PART = "  %c = f32[8] get-tuple-element(%t), index={0}"


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        ((GATHER, "a", USE, "a", GATHER, "b", USE, "b"), 8),
        ((GATHER, "a", GATHER, "b", USE, "a", USE, "b"), 16),
        ((GATHER, "a", "  %c = f32[8] bitcast(%{0})", "a", GATHER, "b", USE, "c"), 16),
        ((GATHER, "a", GATHER, "b", LOOP, "a"), 16),  # %a, and the loop's own
        ((GATHER, "a", USE, "a", LOOP, "p"), 8),
        ((GATHER, "a", TUPLE, "a", GATHER, "b", PART, "0", USE, "c"), 16),
        ((GATHER, "a", TUPLE, "a", GATHER, "b", PART, "1", USE, "c"), 8),
    ],
    ids=[
        "one by one",
        "at once",
        "by another name",
        "through a loop",
        "before a loop",
        "within a tuple",
        "beside another in a tuple",
    ],
)
def test_a_result_is_alive_from_where_it_is_made_to_its_last_use(lines, most):
    text = "\n".join(line.format(name) for line, name in zip(lines[::2], lines[1::2], strict=True))
    module = parse_module(PROGRAM.format(lines=text + "\n  ROOT %r = f32[8] add(%p, %p)"))
    sizes = {("main", "a"): 8, ("main", "b"): 8, ("body", "g"): 8}
    assert most_alive(module, sizes) == most
