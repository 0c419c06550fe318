"""Where a value of a program comes from and who uses it: through copies, casts and fusions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._spellings import having

#: What hands on the same values, in another place, shape or dtype.
KEEPS = having("keeps")
_ZEROS = ("0", "-0", "false")
_HANDS_ON, _WHOLE = having("hands on"), having("whole")
#: A walk that has come to more places than this has gone astray.
MOST_PLACES = 2000


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Hold a computation that runs: `caller` is the instruction that runs it, within `parent`."""

    computation: Computation
    caller: Instruction | None = None
    parent: Frame | None = None

    def enter(self, module: Module, caller: Instruction) -> Frame | None:
        """Step into what a fusion or a call of this computation runs; None where it runs none."""
        callee = module.callee(caller)
        return callee and Frame(computation=callee, caller=caller, parent=self)


@dataclass(frozen=True)
class Use:
    """Hold a consumer and the dtypes that its value was cast to on the way."""

    instruction: Instruction
    casts: tuple[str, ...]


def source_of(
    module: Module, frame: Frame, name: str, through: Collection[str] = KEEPS
) -> tuple[Frame, Instruction] | None:
    """Follow a value back to the instruction that makes it, and the frame that this stands in.

        %wrap { %p = f32[8] parameter(0);  ROOT %r = f32[8] copy(%p) }
        %sum = f32[8] add(%x, %y)
        %f = f32[8] fusion(%sum), calls=%wrap
        %c = f32[8] copy(%f)                     the source of %c is %sum

    Args:
        module: the program.
        frame: where the value stands.
        name: of the value.
        through: opcodes whose first operand is followed.
    """
    while (line := frame.computation.by_name.get(name)) is not None:
        inner = frame.enter(module, line) if line.opcode == "fusion" else None
        if line.opcode in through:
            name = line.operands[0]
        elif part := _part(module, frame, line):
            frame, name = part
        elif inner is not None:
            frame, name = inner, inner.computation.root.name
        elif line.opcode == "parameter" and frame.parent is not None and _is_fused(frame):
            assert frame.caller is not None
            frame, name = frame.parent, frame.caller.operands[int(line.literal)]
        else:
            return frame, line
    return None


def _part(module: Module, frame: Frame, line: Instruction) -> tuple[Frame, str] | None:
    """Step from an element of a fusion's result to what makes it."""
    made = frame.computation.by_name.get(line.operands[0]) if line.operands else None
    if line.opcode != "get-tuple-element" or made is None or made.opcode != "fusion":
        return None
    inner = frame.enter(module, made)
    if inner is None or inner.computation.root.opcode != "tuple":
        return None
    return inner, inner.computation.root.operands[int(line.attribute("index") or 0)]


def is_zero(module: Module, frame: Frame, name: str) -> bool:
    """Return whether a value is zero throughout."""
    found = source_of(module, frame, name, through=KEEPS | {"broadcast"})
    return found is not None and found[1].opcode == "constant" and found[1].literal in _ZEROS


def is_widened(module: Module, computation: str, name: str) -> bool:
    """Return whether a value was cast to a wider dtype just before, and only handed on since."""
    frame = Frame(computation=module.computations[computation])
    found = source_of(module, frame, name, through=_HANDS_ON - {"convert"})
    if found is None or found[1].opcode != "convert":
        return False
    inside, cast = found
    narrow = inside.computation.by_name[cast.operands[0]].shapes[0].bits
    wide = cast.shapes[0].bits
    return narrow is not None and wide is not None and narrow < wide


def is_sliced(module: Module, frame: Frame, name: str, index: int | None = None) -> bool:
    """Return whether every use of a value keeps only a slice of it; `index` picks from a tuple.

    %sum = f32[4096] all-reduce(%g)
    %own = f32[512] dynamic-slice(%sum, %at)     the only user: each device keeps its part
    """
    computation = frame.computation
    if computation.by_name[name].is_root and frame.caller is not None and frame.parent is not None:
        return is_sliced(module, frame.parent, frame.caller.name)
    users = computation.users.get(name, [])
    if index is not None:
        users = [user for user in users if user.attribute("index") == str(index)]
    return bool(users) and all(_slices(module, frame, user, name) for user in users)


def _slices(module: Module, frame: Frame, user: Instruction, name: str) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name
    if user.opcode in KEEPS or user.opcode == "get-tuple-element":
        return is_sliced(module, frame, user.name)
    if user.opcode == "tuple" and user.is_root and frame.caller is not None and frame.parent:
        position = user.operands.index(name)
        return _is_fused(frame) and is_sliced(module, frame.parent, frame.caller.name, position)
    inner = frame.enter(module, user) if user.opcode in ("fusion", "call") else None
    return inner is not None and all(
        is_sliced(module, inner, parameter.name) for parameter in _parameters(inner, name)
    )


def uses_of(module: Module, name: str, computation: str, index: int | None = None) -> list[Use]:
    """List the first real consumers of a result, or of one part of a tuple.

    %w = f32[64,128] all-gather(%shard)
    %low = bf16[64,128] convert(%w)
    %t = (bf16[64,128], s32[]) tuple(%low, %i)
    %loop = (bf16[64,128], s32[]) while(%t), body=%b
    %b: %y = bf16[8,128] dot(%x, %element_0)      the one use, with the cast ("bf16",)
    """
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
    """Follow a value through a module, past each place once."""

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
            elif user.opcode in _HANDS_ON or user.opcode in ("tuple", "get-tuple-element"):
                for handed in _handed_on(value, user):
                    yield from self.follow(handed)
            else:
                yield Use(user, value.casts)
        yield from self._leave(value)

    def _enter(self, value: _Value, user: Instruction) -> Iterator[Use]:
        """Follow a value into a fusion or a loop's body."""
        inner = value.frame.enter(self._module, user)
        if inner is None:
            yield Use(user, value.casts)
            return
        for parameter in _parameters(inner, value.name):
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
    """Return what an instruction that computes nothing makes of a value."""
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
        yield replace(after, index=value.index if user.opcode in _WHOLE else None, casts=casts)


def _parameters(inner: Frame, name: str) -> list[Instruction]:
    """List the parameters as which a callee is given a value."""
    operands = inner.caller.operands if inner.caller is not None else ()
    numbers = [number for number, operand in enumerate(operands) if operand == name]
    return [inner.computation.parameters[number] for number in numbers]


def _is_fused(frame: Frame) -> bool:
    return frame.caller is not None and frame.caller.opcode == "fusion"
