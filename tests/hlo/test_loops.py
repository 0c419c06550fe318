"""Trip counts: what the backend says, else what condition and body show, else unknown."""

from __future__ import annotations

import pytest

from tests.hlo.programs import REDUCE, wrap
from zerojax.hlo import parse_collectives


def loop(start: str, compare: str, step: str, bound: str = "%n") -> str:
    """Write `for (i = start; compare; step) all-reduce`; the state's third element is `bound`."""
    kind = "(s32[], f32[8], s32[])"
    computations = f"""
%body (p: {kind}) -> {kind} {{
  %p = {kind} parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8]{{0}} get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant(2)
  %next = s32[] {step}
  %sum = {REDUCE}
  ROOT %out = {kind} tuple(%next, %sum, {bound})
}}

%cond (q: {kind}) -> pred[] {{
  %q = {kind} parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %n = s32[] get-tuple-element(%q), index=2
  %seven = s32[] constant(7)
  ROOT %c = pred[] {compare}
}}
"""
    return wrap(
        "%x = f32[8]{0} parameter(0)",
        "%limit = s32[] constant(11)",
        f"%start = s32[] {start}",
        "%copied = s32[] copy(%start)",
        f"%state = {kind} tuple(%copied, %x, %limit)",
        f"%w = {kind} while(%state), condition=%cond, body=%body",
        "ROOT %r = f32[8]{0} get-tuple-element(%w), index=1",
        computations=computations,
    )


ADD, SUBTRACT = "add(%i, %one)", "subtract(%i, %one)"
LESS = "compare(%i, %seven), direction=LT"


@pytest.mark.parametrize(
    ("start", "compare", "step", "bound", "expected"),
    [
        ("constant(0)", LESS, ADD, "%n", len(range(0, 7, 2))),
        ("constant(1)", "compare(%i, %seven), direction=LE", ADD, "%n", len(range(1, 8, 2))),
        ("constant(1)", "compare(%i, %seven), direction=NE", ADD, "%n", len(range(1, 7, 2))),
        ("constant(0)", "compare(%i, %seven), direction=NE", ADD, "%n", None),  # it steps over 7
        ("constant(0)", "compare(%seven, %i), direction=GT", ADD, "%n", len(range(0, 7, 2))),
        (
            "constant(20)",
            "compare(%i, %seven), direction=GT",
            SUBTRACT,
            "%n",
            len(range(20, 7, -2)),
        ),
        (
            "constant(20)",
            "compare(%i, %seven), direction=GE",
            SUBTRACT,
            "%n",
            len(range(20, 6, -2)),
        ),
        ("constant(0)", "compare(%i, %n), direction=LT", ADD, "%n", len(range(0, 11, 2))),
        ("constant(0)", "compare(%i, %n), direction=LT", ADD, "%next", None),  # a moving bound
        ("constant(9)", LESS, ADD, "%n", 0),
        ("constant(0)", LESS, "multiply(%i, %one)", "%n", None),
        ("rng(%x)", LESS, ADD, "%n", None),
        ("constant(0)", "and(%i, %n)", ADD, "%n", None),
    ],
)
def test_trip_counts_are_read_off_condition_and_body(start, compare, step, bound, expected):
    (record,) = parse_collectives(loop(start, compare, step, bound)).records
    assert record.trips == (expected,)
    assert record.moved_elements == (1 if expected is None else expected) * 2 * 8 / 2


def test_a_known_trip_count_wins():
    text = loop("constant(0)", LESS, ADD)
    known = 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    (record,) = parse_collectives(text.replace("body=%body", known)).records
    assert record.runs == 5
