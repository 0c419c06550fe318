"""Who uses a value of a program: its first real consumers, past copies and casts. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zerojax.hlo._loops import Frame
from zerojax.hlo._module import Instruction, Module

#: What hands a value on without computing with it.
PASSED_ON = frozenset(
    {
        "bitcast", "bitcast-convert", "broadcast", "convert", "copy", "copy-done", "copy-start",
        "optimization-barrier", "reshape", "slice", "transpose", "all-gather-done",
    }
)  # fmt: skip
#: Of these, what hands on a tuple as it is.
KEEPS_PART = frozenset({"all-gather-done", "copy-done", "optimization-barrier"})
#: A walk that has come to more places than this has gone astray.
MOST_PLACES = 2000


@dataclass(frozen=True)
class Use:
    """Hold a consumer and the dtypes that its value was cast to on the way."""

    instruction: Instruction
    casts: tuple[str, ...]


def uses_of(module: Module, name: str, computation: str, index: int | None = None) -> list[Use]:
    """List the first real consumers of an instruction's result, of one part of it for a tuple."""
    frame = Frame(computation=module.computations[computation])
    return list(_Walk(module).follow(_Value(frame, name, index)))


@dataclass(frozen=True)
class _Value:
    """Hold an instruction's result, or one part of a tuple, and the casts on the way to it."""

    frame: Frame
    name: str
    index: int | None
    casts: tuple[str, ...] = ()


class _Walk:
    """Follows a value through a module, past each place once."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._seen: set[tuple[str, str, int | None]] = set()

    def follow(self, value: _Value) -> Iterator[Use]:
        """Yield the real consumers of a value."""
        key = (value.frame.computation.name, value.name, value.index)
        if key in self._seen or len(self._seen) > MOST_PLACES:
            return
        self._seen.add(key)
        for user in value.frame.computation.users.get(value.name, []):
            if user.opcode in ("fusion", "call", "while"):
                yield from self._enter(value, user)
            elif user.opcode in PASSED_ON or user.opcode in ("tuple", "get-tuple-element"):
                for handed in _handed_on(value, user):
                    yield from self.follow(handed)
            else:
                yield Use(user, value.casts)
        yield from self._leave(value)

    def _enter(self, value: _Value, user: Instruction) -> Iterator[Use]:
        """Follow a value into a fusion or a loop's body."""
        if user.opcode == "while":
            body = self._module.computations.get(dict(user.called).get("body", ""))
        else:
            body = self._module.callee(user)
        if body is None:
            yield Use(user, value.casts)
            return
        inner = Frame(computation=body, caller=user, parent=value.frame)
        for number, operand in enumerate(user.operands):
            parameter = body.parameter(number) if operand == value.name else None
            if parameter is not None:
                yield from self.follow(replace(value, frame=inner, name=parameter.name))

    def _leave(self, value: _Value) -> Iterator[Use]:
        """Follow a fusion's result to those who use the fusion."""
        caller, parent = value.frame.caller, value.frame.parent
        root = value.frame.computation.root
        if caller is None or parent is None or caller.opcode == "while" or root.name != value.name:
            return
        index = value.index if root.opcode == "tuple" else None
        yield from self.follow(replace(value, frame=parent, name=caller.name, index=index))


def _handed_on(value: _Value, user: Instruction) -> Iterator[_Value]:
    """Give what an instruction that computes nothing makes of a value."""
    after = replace(value, name=user.name)
    if user.opcode == "get-tuple-element":
        if value.index is None or user.attribute("index") == str(value.index):
            yield replace(after, index=None)
    elif user.opcode == "tuple":
        for position, operand in enumerate(user.operands):
            if operand == value.name:
                yield replace(after, index=position)
    else:
        casts = value.casts
        if user.opcode == "convert":
            casts = (*casts, user.shapes[0].dtype)
        yield replace(after, index=value.index if user.opcode in KEEPS_PART else None, casts=casts)
