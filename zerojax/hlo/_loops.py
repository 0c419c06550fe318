"""How often a while loop runs: what the backend says, or what its condition and body show. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from zerojax.hlo._module import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SAME = ("copy", "bitcast", "convert", "reshape", "optimization-barrier")


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Stand in a computation: `caller` is the instruction that runs it, within `parent`."""

    computation: Computation
    caller: Instruction | None = None
    parent: Frame | None = None


@dataclass(frozen=True)
class Linear:
    """Hold `element + offset`: an element of the loop's state, or a plain number without one."""

    element: int | None
    offset: int


def trip_count(module: Module, loop: Instruction, frame: Frame) -> int | None:
    """Return how often a while instruction runs its body, or None where the text doesn't tell.

    GPU and CPU print a known trip count. TPU prints none: it is read off the condition `i < n`, the
    body's `i + step`, and the first `i`, where all three lead to constants.
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
    compare, inner = _comparison(module, condition)
    if compare is None or inner is None:
        return None
    left, right = (_value(module, inner, operand) for operand in compare.operands)
    direction = compare.attribute("direction") or ""
    if left is not None and left.element is None:  # "n > i" is "i < n"
        left, right = right, left
        direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
    if left is None or right is None or left.element is None:
        return None
    limit = right.offset if right.element is None else _constant(module, loop, frame, body, right)
    first = _initial(module, loop, frame, left.element)
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


def _comparison(module: Module, frame: Frame) -> tuple[Instruction | None, Frame | None]:
    root = frame.computation.root
    while root.opcode in _SAME:
        root = frame.computation.by_name[root.operands[0]]
    inner = _inside(module, frame, root)
    if inner is not None:
        return _comparison(module, inner)
    return (root, frame) if root.opcode == "compare" else (None, None)


def _value(module: Module, frame: Frame, name: str) -> Linear | None:
    """Follow a scalar back to a constant or to an element of the state of the innermost loop."""
    instruction = frame.computation.by_name.get(name)
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        text = instruction.literal.strip()
        return Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if opcode in _SAME:
        return _value(module, frame, operands[0])
    if opcode in ("add", "subtract"):
        left, right = (_value(module, frame, operand) for operand in operands)
        return _combine(left, right, 1 if opcode == "add" else -1)
    if opcode == "parameter" and frame.caller is not None and frame.caller.opcode == "fusion":
        assert frame.parent is not None
        operand = frame.caller.operands[int(instruction.literal)]
        return _value(module, frame.parent, operand)
    if inner := _inside(module, frame, instruction):
        return _value(module, inner, inner.computation.root.name)
    if opcode == "get-tuple-element":
        return _element(module, frame, instruction)
    return None


def _element(module: Module, frame: Frame, instruction: Instruction) -> Linear | None:
    index = int(instruction.attribute("index") or 0)
    source = frame.computation.by_name.get(instruction.operands[0])
    if source is None:
        return None
    if source.opcode == "parameter" and frame.caller is not None:
        return Linear(index, 0) if frame.caller.opcode == "while" else None
    if source.opcode == "tuple":
        return _value(module, frame, source.operands[index])
    inner = _inside(module, frame, source)
    if inner is not None and inner.computation.root.opcode == "tuple":
        return _value(module, inner, inner.computation.root.operands[index])
    return None


def _inside(module: Module, frame: Frame, instruction: Instruction) -> Frame | None:
    """Step into a fusion."""
    callee = module.callee(instruction)
    if callee is None or instruction.opcode != "fusion":
        return None
    return Frame(computation=callee, caller=instruction, parent=frame)


def _combine(left: Linear | None, right: Linear | None, sign: int) -> Linear | None:
    if left is None or right is None:
        return None
    if right.element is not None and (left.element is not None or sign < 0):
        return None
    element = left.element if left.element is not None else right.element
    return Linear(element, left.offset + sign * right.offset)


def _initial(module: Module, loop: Instruction, frame: Frame, element: int) -> int | None:
    """Return the number that an element of a loop's state starts with."""
    state = frame.computation.by_name.get(loop.operands[0])
    while state is not None and state.opcode in _SAME:
        state = frame.computation.by_name.get(state.operands[0])
    if state is None or state.opcode != "tuple":
        return None
    value = _value(module, frame, state.operands[element])
    if value is None or value.element is None:
        return None if value is None else value.offset
    while frame.caller is not None and frame.caller.opcode != "while" and frame.parent is not None:
        frame = frame.parent
    if frame.caller is None or frame.parent is None:
        return None
    outer = _constant(module, frame.caller, frame.parent, frame, Linear(value.element, 0))
    return None if outer is None else outer + value.offset


def _constant(
    module: Module, loop: Instruction, frame: Frame, body: Frame, value: Linear
) -> int | None:
    """Return an element that the body passes on unchanged as the number that it starts with."""
    assert value.element is not None
    if _step(module, body, value.element) != 0:
        return None
    first = _initial(module, loop, frame, value.element)
    return None if first is None else first + value.offset


def _step(module: Module, body: Frame, element: int) -> int | None:
    """Return what the body adds to an element of the loop's state, or None."""
    root = body.computation.root
    if root.opcode != "tuple":
        return None
    value = _value(module, body, root.operands[element])
    return value.offset if value is not None and value.element == element else None
