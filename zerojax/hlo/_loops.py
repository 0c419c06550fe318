"""How often a while loop runs: what the backend writes, or what its condition and body show."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import SPELLINGS
from zerojax.hlo._values import Frame, source_of

_KNOWN = SPELLINGS["trip count"].mark


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Name a loop that a collective stands in; `trip_count` is None where the text doesn't tell."""

    name: str
    body: str
    op_name: str
    trip_count: int | None


def total_trips(loops: Iterable[Loop]) -> int | None:
    """Return how often loops within each other run; None where one of them is unknown."""
    counts = [loop.trip_count for loop in loops]
    return None if None in counts else math.prod(count or 0 for count in counts)


@dataclass(frozen=True)
class Linear:
    """Hold `element + offset`: an element of the loop's state, or a plain number without one."""

    element: int | None
    offset: int


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """Return how often a while instruction runs its body, or None where the text doesn't tell.

    GPU and CPU print a known trip count. TPU prints none: it is read off the condition `i < n`, the
    body's `i + step`, and the first `i`, where all three lead to constants:

        %zero = s32[] constant(0)
        %state = (s32[], f32[8]) tuple(%zero, %x)
        %w = (s32[], f32[8]) while(%state), condition=%c, body=%b
        %c: %i = s32[] get-tuple-element(%s), index=0;  %six = s32[] constant(6)
            ROOT %less = pred[] compare(%i, %six), direction=LT
        %b: %next = s32[] add(%i, %one);  ROOT %t = (s32[], f32[8]) tuple(%next, %y)

    runs (6 - 0) / 1 = 6 times.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    called = dict(loop.called)
    test = module.computations.get(called.get("condition", ""))
    turn = module.computations.get(called.get("body", ""))
    if test is None or turn is None:
        return None
    condition = Frame(computation=test, caller=loop, parent=frame)
    body = Frame(computation=turn, caller=loop, parent=frame)
    inner, compare = source_of(module, condition, test.root.name) or (None, None)
    if compare is None or inner is None or compare.opcode != "compare":
        return None
    left, right = (_value(module, inner, operand) for operand in compare.operands)
    direction = compare.attribute("direction") or ""
    if left is not None and left.element is None:  # "n > i" is "i < n"
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
    if left is None or right is None or left.element is None:
        return None
    limit = right.offset if right.element is None else _constant(module, body, right)
    first = _initial(module, body, left.element)
    step = _step(module, body, left.element)
    if limit is None or first is None or not step:
        return None
    return _count(first + left.offset, limit, step, direction)


def _count(first: int, limit: int, step: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    if direction == "NE" and (limit - first) % step:
        return None
    if direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    return max(0, math.ceil((limit - first) / step))


def _value(module: Module, frame: Frame, name: str) -> Linear | None:
    """Follow a scalar back to a constant or to an element of the state of the innermost loop."""
    found = source_of(module, frame, name)
    if found is None:
        return None
    frame, line = found
    if line.opcode == "constant":
        text = line.literal.strip()
        return Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if line.opcode in ("add", "subtract"):
        left, right = (_value(module, frame, operand) for operand in line.operands)
        return left and right and _combine(left, right, 1 if line.opcode == "add" else -1)
    if line.opcode != "get-tuple-element":
        return None
    # An element of the loop's state, or of a tuple that was made within its body.
    index = int(line.attribute("index") or 0)
    frame, source = source_of(module, frame, line.operands[0]) or (frame, line)
    if source.opcode == "tuple":
        return _value(module, frame, source.operands[index])
    is_loop = frame.caller is not None and frame.caller.opcode == "while"
    return Linear(index, 0) if is_loop and source.opcode == "parameter" else None


def _combine(left: Linear, right: Linear, sign: int) -> Linear | None:
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if left.element is not None else right.element
    return Linear(element, left.offset + sign * right.offset)


def _initial(module: Module, body: Frame, element: int) -> int | None:
    """Return the number that an element of a loop's state starts with."""
    loop, frame = body.caller, body.parent
    found = loop and frame and source_of(module, frame, loop.operands[0])
    if not found or found[1].opcode != "tuple":
        return None
    frame, state = found
    value = _value(module, frame, state.operands[element])
    if value is None or value.element is None:
        return value and value.offset
    while frame.caller is not None and frame.caller.opcode != "while" and frame.parent is not None:
        frame = frame.parent
    return _constant(module, frame, value) if frame.caller is not None else None


def _constant(module: Module, body: Frame, value: Linear) -> int | None:
    """Return an element that the body passes on unchanged as the number that it starts with."""
    assert value.element is not None
    if _step(module, body, value.element) != 0:
        return None
    first = _initial(module, body, value.element)
    return None if first is None else first + value.offset


def _step(module: Module, body: Frame, element: int) -> int | None:
    """Return what the body adds to an element of the loop's state, or None."""
    root = body.computation.root
    if root.opcode != "tuple":
        return None
    value = _value(module, body, root.operands[element])
    return value.offset if value is not None and value.element == element else None
