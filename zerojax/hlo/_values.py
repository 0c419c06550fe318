"""Where a value of a program comes from and who uses it: through copies, casts and fusions."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from zerojax.hlo._module import Computation, Instruction, Module
from zerojax.hlo._spellings import having, mark

KEEPS = having("keeps")
_ZEROS = ("0", "-0", "false")
HANDS_ON = KEEPS | having("selects")
_WHOLE = having("whole")
_TRANSFER = mark("TRANSFER").pattern  # the name of an attribute
_COMBINED = having("combined")
_ENTERED = ("fusion", "call", "while")
#: What runs its computation once, in its place; jax 0.12's CPU compiler calls small loops so.
_INLINED = ("fusion", "call")
#: A walk that has come to more places than this has gone astray.
MOST_PLACES = 2000


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Hold a computation that runs: `caller` is the instruction that runs it, within `parent`."""

    computation: Computation
    caller: Instruction | None = None
    parent: "Frame | None" = None

    def enter(self, module: Module, caller: Instruction) -> "Frame | None":
        """Step into what a fusion or a call of this computation runs; None where it runs none."""
        callee = module.callee(caller)
        return callee and Frame(computation=callee, caller=caller, parent=self)


@dataclass(frozen=True)
class Value:
    """Hold an instruction's result, or one part of a tuple, and the casts on the way to it."""

    frame: Frame
    name: str
    index: int | None
    casts: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.frame.computation.name, self.name, self.index

    @property
    def line(self) -> Instruction:
        return self.frame.computation.by_name[self.name]

    def is_widened(self, module: Module) -> bool:
        """Return whether it was cast to a wider dtype just before, and only handed on since."""
        found = source_of(module, self.frame, self.name, through=HANDS_ON - {"convert"})
        if found is None or found[1].opcode != "convert":
            return False
        inside, cast = found
        narrow = inside.computation.by_name[cast.operands[0]].shapes[0].bits
        wide = cast.shapes[0].bits
        return narrow is not None and wide is not None and narrow < wide


def source_of(
    module: Module, frame: Frame, name: str, through: Collection[str] = KEEPS
) -> tuple[Frame, Instruction] | None:
    """Follow a value back to the instruction that makes it, and the frame that this stands in.

        %wrap { %p = f32[8] parameter(0);  ROOT %r = f32[8] copy(%p) }
        %sum = f32[8] add(%x, %y)
        %f = f32[8] fusion(%sum), calls=%wrap
        %c = f32[8] copy(%f)                     the source of %c is %sum

    `through` are the opcodes whose first operand is followed.
    """
    value = found = Value(frame, name, None)
    while (line := value.frame.computation.by_name.get(value.name)) is not None:
        if value.index is None:
            found = value
        is_part = line.opcode == "tuple" and value.index is not None
        caller = value.frame.caller
        is_input = line.opcode == "parameter" and caller and caller.opcode in _INLINED
        is_element = line.opcode == "get-tuple-element" and value.index is None
        if line.opcode in (through if value.index is None else _WHOLE.intersection(through)):
            value = replace(value, name=line.operands[0])
        elif is_part or is_input or is_element or line.opcode in _INLINED:
            value = next(_made_of(module, value))
        else:
            return found.frame, found.line
    return None


def is_zero(module: Module, frame: Frame, name: str) -> bool:
    found = source_of(module, frame, name, through=KEEPS | {"broadcast"})
    return found is not None and found[1].opcode == "constant" and found[1].literal in _ZEROS


def is_sliced(module: Module, frame: Frame, name: str, index: int | None = None) -> bool:
    """Return whether every use of a value keeps only a slice of it; `index` picks from a tuple.

    %sum = f32[4096] all-reduce(%g)
    %own = f32[512] dynamic-slice(%sum, %at)     the only user: each device keeps its part
    """
    uses = list(uses_of(module, Value(frame, name, index), through=KEEPS, into=_INLINED))
    return bool(uses) and all(use.line.opcode == "dynamic-slice" for use in uses)


def arguments_of(
    module: Module,
    *values: Value,
    until: Callable[[Value], bool] = lambda _: False,
    seen: set[tuple[str, str, int | None]] | None = None,
) -> Iterator[int]:
    """Yield the numbers of the program's parameters of which some values are made.

    What comes through scalars does not count. Of an update `w - rate * (g + decay * w)`, these are
    those of `w`, and whatever the gradient `g` was computed from.

    `until` says which values are not followed further back; `seen` collects all keys.
    """
    waiting = list(values)
    seen = set() if seen is None else seen
    while waiting:
        value = waiting.pop()
        if value.key in seen:
            continue
        seen.add(value.key)
        line = value.line
        if until(value):
            continue
        if line.opcode == "parameter" and value.frame.parent is None:
            yield int(line.literal)
        elif value.index is not None or [one.elements > 1 for one in line.shapes] != [False]:
            waiting += _made_of(module, value)


def _made_of(module: Module, value: Value) -> Iterator[Value]:
    line, frame, index = value.line, value.frame, value.index
    inner = frame.enter(module, line) if line.opcode in _ENTERED else None
    if inner is not None:
        yield Value(inner, inner.computation.root.name, index)
    elif line.opcode == "get-tuple-element":
        yield Value(frame, line.operands[0], line.index)
    elif line.opcode == "tuple" and index is not None:
        yield Value(frame, line.operands[index], None)
    elif line.opcode == "parameter" and frame.caller is not None and frame.parent is not None:
        yield Value(frame.parent, frame.caller.operands[int(line.literal)], index)
        if frame.caller.opcode == "while":  # or of what the turn before made
            yield Value(frame, frame.computation.root.name, index)
    elif line.opcode == "recv":  # from another TPU slice, where the same program runs
        transfer = line.attribute(_TRANSFER)
        lines = (x for x in frame.computation.instructions if x.opcode == "send")
        pairs = (x for x in lines if x.attribute(_TRANSFER) == transfer)
        yield from (Value(frame, x.operands[0], None) for x in pairs)
    elif index is not None and line.opcode in _COMBINED and len(line.operands) > 1:
        yield Value(frame, line.operands[index], None)
    else:
        is_whole = line.opcode in _WHOLE or line.opcode.endswith("-done")
        part = index if is_whole else None
        yield from (Value(frame, operand, part) for operand in line.operands)


def uses_of(
    module: Module,
    value: Value,
    through: Collection[str] = HANDS_ON,
    into: Collection[str] = _ENTERED,
    seen: set[tuple[str, str, int | None]] | None = None,
) -> Iterator[Value]:
    """Yield the first real consumers of a value; returning it from a program or a loop is one.

    %w = f32[64,128] all-gather(%shard)
    %low = bf16[64,128] convert(%w)
    %t = (bf16[64,128], s32[]) tuple(%low, %i)
    %loop = (bf16[64,128], s32[]) while(%t), body=%b
    %b: %y = bf16[8,128] dot(%x, %element_0)      the one use, with the cast ("bf16",)

    It goes through opcodes that hand a value on and into computations, past each place once.
    """
    seen = set() if seen is None else seen
    if value.key in seen or len(seen) > MOST_PLACES:
        return
    seen.add(value.key)
    for user in value.frame.computation.users.get(value.name, []):
        inner = value.frame.enter(module, user) if user.opcode in into else None
        if user.opcode in through or user.opcode in ("tuple", "get-tuple-element"):
            after = _handed_on(value, user)
        elif inner is None:
            yield replace(value, name=user.name, index=None)
            continue
        else:
            given = (at for at, name in enumerate(user.operands) if name == value.name)
            names = (inner.computation.parameters[at].name for at in given)
            after = (replace(value, frame=inner, name=name) for name in names)
        for one in after:
            yield from uses_of(module, one, through, into, seen)
    if value.frame.computation.root.name == value.name:
        caller, parent = value.frame.caller, value.frame.parent
        if caller is None or parent is None or caller.opcode == "while":
            yield value
            return
        index = value.index if value.line.opcode == "tuple" else None
        outer = replace(value, frame=parent, name=caller.name, index=index)
        yield from uses_of(module, outer, through, into, seen)


def _handed_on(value: Value, user: Instruction) -> Iterator[Value]:
    after = replace(value, name=user.name)
    if user.opcode == "get-tuple-element":
        if value.index is None or user.index == value.index:
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
