"""Who uses a value of a program: its first real consumers, past copies and casts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.audit._loops import Frame
from zerojax.audit._module import Instruction, Module

#: What hands a value on without computing with it.
PASSED_ON = frozenset(
    {
        "bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start",
        "optimization-barrier", "reshape", "slice", "transpose", "all-gather-done",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Use:
    """Hold a consumer and the dtypes that its value was cast to on the way."""

    instruction: Instruction
    casts: tuple[str, ...]


def uses_of(module: Module, name: str, computation: str, index: int | None = None) -> list[Use]:
    """List the first real consumers of an instruction's result, of one part of it for a tuple."""
    frame = Frame(computation=module.computations[computation])
    return list(_follow(module, frame, name, index, (), set()))


def _follow(
    module: Module,
    frame: Frame,
    name: str,
    index: int | None,
    casts: tuple[str, ...],
    seen: set[tuple[str, str, int | None]],
) -> Iterator[Use]:
    key = (frame.computation.name, name, index)
    if key in seen or len(seen) > 2000:
        return
    seen.add(key)
    for user in frame.computation.users.get(name, []):
        if user.opcode == "get-tuple-element":
            if index is None or user.attribute("index") == str(index):
                yield from _follow(module, frame, user.name, None, casts, seen)
        elif user.opcode in PASSED_ON:
            more = (*casts, user.shapes[0].dtype) if user.opcode == "convert" else casts
            tuple_index = index if user.opcode in ("all-gather-done", "copy-done") else None
            if user.opcode == "optimization-barrier":
                tuple_index = index
            yield from _follow(module, frame, user.name, tuple_index, more, seen)
        elif user.opcode == "tuple":
            for position, operand in enumerate(user.operands):
                if operand == name:
                    yield from _follow(module, frame, user.name, position, casts, seen)
        elif user.opcode in ("fusion", "call", "while"):
            yield from _enter(module, frame, user, name, index, casts, seen)
        else:
            yield Use(user, casts)
    yield from _leave(module, frame, name, index, casts, seen)


def _enter(
    module: Module,
    frame: Frame,
    user: Instruction,
    name: str,
    index: int | None,
    casts: tuple[str, ...],
    seen: set[tuple[str, str, int | None]],
) -> Iterator[Use]:
    """Follow a value into a fusion or a loop's body."""
    if user.opcode == "while":
        body = module.computations.get(dict(user.called).get("body", ""))
    else:
        body = module.callee(user)
    if body is None:
        yield Use(user, casts)
        return
    inner = Frame(computation=body, caller=user, parent=frame)
    for number, operand in enumerate(user.operands):
        parameter = body.parameter(number) if operand == name else None
        if parameter is not None:
            yield from _follow(module, inner, parameter.name, index, casts, seen)


def _leave(
    module: Module,
    frame: Frame,
    name: str,
    index: int | None,
    casts: tuple[str, ...],
    seen: set[tuple[str, str, int | None]],
) -> Iterator[Use]:
    """Follow a fusion's result to those who use the fusion."""
    caller, parent = frame.caller, frame.parent
    root = frame.computation.root
    if caller is None or parent is None or caller.opcode == "while" or root.name != name:
        return
    position = index if root.opcode == "tuple" else None
    yield from _follow(module, parent, caller.name, position, casts, seen)
