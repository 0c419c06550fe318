"""HLO text as a structure: computations, their instructions and what those call. Pure."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from zerojax.hlo._spellings import having, mark

#   ROOT %sum.1 = (f32[8]{0}, u32[]) all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
# A tuple type ends where ") opcode(" follows.
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
# ENTRY %main.7 (x: f32[8]) -> f32[8] {
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{")
# bf16[2,3]{1,0:T(8,128)(2,1)S(5)}
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
# condition=%less.1, body=%layers.2
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
# branch_computations={%true.1, %false.2}
_CALLED_LIST = re.compile(r"\b(branch_computations|called_computations)=\{([^}]*)\}")
# input_output_alias={ {0}: (0, {}, may-alias), {1, 2}: (5, {}, must-alias) }
_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+),")
_RUN = ("calls", "to_apply", "body")
_MOVES, _HOST_MEMORY = having("moves"), mark("HOST_MEMORY")
# Metadata of a kernel takes lines of its own: `... kernel_metadata={`, `"block_q":"128"`, `}}, ...`
_GOES_ON = re.compile(r'\n(?="|\}\})')
# 1 "model.py"
# 3 {file_name_id=1 function_name_id=3 line=104 end_line=104 column=11 end_column=11}
_TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')

# /venv/lib/python3.12/site-packages/optax/_src/update.py:42
_LIBRARY = re.compile(r"site-packages/(jax|flax|optax|equinox|haliax|haiku)/")

# bf16, float32, u4, f8e4m3fn
_NUMBERED = re.compile(r"(?:bf|bfloat|f|float|s|int|u|uint|c|complex)(\d+)(?:_?e\d+m\d+\w*)?")


def element_bits(dtype: str) -> int | None:
    if dtype in ("pred", "bool"):
        return 8
    match = _NUMBERED.fullmatch(dtype)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Tensor:
    """Hold a tensor's dtype, as HLO spells it, and dims."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False  # whether it lies in the host's memory

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bits(self) -> int | None:
        return element_bits(self.dtype)

    @property
    def bytes(self) -> int:
        return self.elements * (self.bits or 0) // 8


@dataclass(frozen=True)
class Instruction:
    """Hold one line of a computation; `attributes` is the text after the operands."""

    name: str
    opcode: str
    type: str
    operands: tuple[str, ...]
    literal: str  # what stands between the parentheses
    attributes: str
    is_root: bool

    @cached_property
    def shapes(self) -> tuple[Tensor, ...]:
        return parse_shapes(self.type)

    @cached_property
    def called(self) -> tuple[tuple[str, str], ...]:
        """List (role, computation) for every computation that this instruction names."""
        if "=%" not in self.attributes and "computations={" not in self.attributes:
            return ()  # most lines: worth not searching
        found = _CALLED.findall(self.attributes)
        for role, names in _CALLED_LIST.findall(self.attributes):
            found += [(role, name) for name in re.findall(r"%?([\w.\-]+)", names)]
        return tuple(found)

    def attribute(self, name: str) -> str | None:
        """Return the quoted or plain value of an attribute, here or in a nested list."""
        match = re.search(rf'\b{name}=(?:"((?:[^"\\]|\\.)*)"|([\w.\-]+))', self.attributes)
        return None if match is None else match[1] if match[1] is not None else match[2]

    @cached_property
    def index(self) -> int:
        """Return which part of a tuple a get-tuple-element is."""
        return int(self.attribute("index") or 0)

    @property
    def op_name(self) -> str:
        """Return the path of the jax operation that this line came from, or nothing."""
        return self.attribute("op_name") or ""


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Hold a computation's instructions in the order of their schedule."""

    name: str
    is_entry: bool
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                users.setdefault(operand, []).append(instruction)
        return users

    @cached_property
    def root(self) -> Instruction:
        return next((line for line in self.instructions if line.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        found = (line for line in self.instructions if line.opcode == "parameter")
        return {int(line.literal): line for line in found}


@dataclass(frozen=True, kw_only=True)
class Module:
    header: str
    computations: dict[str, Computation]
    unread: tuple[str, ...]  # lines that were not understood
    tables: dict[str, dict[int, str]]

    @property
    def entry(self) -> Computation:
        return next(c for c in self.computations.values() if c.is_entry)

    def callee(self, instruction: Instruction) -> Computation | None:
        """Return the computation that a fusion or a call runs, or the body of a loop."""
        names = [name for role, name in instruction.called if role in _RUN]
        return self.computations.get(names[0]) if names else None

    @cached_property
    def num_devices(self) -> int:
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        return math.prod(map(int, counts))

    @cached_property
    def aliases(self) -> frozenset[int]:
        """Number the parameters whose donated buffers results are written to."""
        text = self.header.partition("input_output_alias={")[2]
        return frozenset(map(int, _ALIAS.findall(text[: _closing(text, "{}")])))

    @property
    def host_parameters(self) -> set[int]:
        parameters = self.entry.parameters.items()
        return {number for number, line in parameters if any(x.on_host for x in line.shapes)}

    def source(self, instruction: Instruction) -> str:
        """Return "file:line" of the user's code, or nothing where the text doesn't tell.

        Lines of the libraries that models and steps are written with are left out, unless they are
        all there is: of an update in optax the line is told that calls it.
        """
        places = list(self._places(int(instruction.attribute("stack_frame_id") or -1)))
        return next((x for x in places if not _LIBRARY.search(x)), places[0] if places else "")

    def _places(self, frame: int) -> Iterator[str]:
        """Yield "file:line" of a stack frame and of its callers.

        2 {file_location_id=2 parent_frame_id=2}     called by frame 1: parents' numbers are one up
        """
        while row := self.tables["StackFrames"].get(frame, ""):
            location = self.tables["FileLocations"].get(_number(row, "file_location_id"), "")
            if file := self.tables["FileNames"].get(_number(location, "file_name_id"), ""):
                yield f"{file}:{_number(location, 'line')}"
            frame = min(_number(row, "parent_frame_id"), frame) - 1


def parse_module(text: str) -> Module:
    """Read the text of `compiled.as_text()`; ValueError where it has no entry computation."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {
        name: {} for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    }
    unread: list[str] = []
    header, table = "", ""
    current: Computation | None = None
    for line in _GOES_ON.sub("", text).splitlines():
        if current is not None and line.startswith("}"):
            current = None
        elif current is not None:
            instruction = parse_instruction(line)
            if instruction is not None:
                current.instructions.append(instruction)
            elif line.strip():
                unread.append(line.strip())
        elif line.startswith("HloModule"):
            header = line
        elif line.strip() in tables:
            table = line.strip()
        elif match := _COMPUTATION.match(line):
            current = Computation(name=match[2], is_entry=bool(match[1]))
            computations[match[2]] = current
        elif table and (row := _TABLE_ROW.match(line)):
            tables[table][int(row[1])] = row[2] if row[2] is not None else row[3]
    if not any(computation.is_entry for computation in computations.values()):
        raise ValueError(
            "This is not the HLO text of a compiled program: it has no ENTRY computation. "
            f"It starts with {text[:60]!r}; pass what compiled.as_text() returns."
        )
    for computation in computations.values():
        lines = _join_starts(computation.instructions)
        computation.instructions[:] = _in_place(lines, computations)
    return Module(header=header, computations=computations, unread=tuple(unread), tables=tables)


def _join_starts(lines: list[Instruction]) -> list[Instruction]:
    """Join what starts without operands with the update that gives them.

    libtpu 0.0.50 starts a SparseCore before that has what it works on:

        %s = ((), (), (s32[1])) call-start(), to_apply=%gather
        %u = ((bf16[64]), bf16[512]) call-update(%s, %x)
        %d = bf16[512] call-done(%u)

    The first two are read as `%u = ((bf16[64]), bf16[512]) call-start(%x), to_apply=%gather`.
    """
    updates = {x.operands[0]: x for x in lines if x.opcode.endswith("-update") and x.operands}
    starts = {x.name: x for x in lines if x.name in updates and not x.operands}
    joined = {
        x.name: replace(starts[name], name=x.name, type=x.type, operands=x.operands[1:])
        for name, x in updates.items()
        if name in starts
    }
    return [joined.get(x.name, x) for x in lines if x.name not in starts]


def _in_place(lines: list[Instruction], known: dict[str, Computation]) -> list[Instruction]:
    """Read asynchronous fusions without a collective, as XLA slices stacks on GPUs, as plain ones.

    `%s = ((f32[8]), f32[8], u32[]) fusion-start(%x), calls=%f` and `%d = f32[8] fusion-done(%s)`
    (jax 0.12) are read as `%s = f32[8] fusion(%x), calls=%f` and `%d = f32[8] copy-done(%s)`.
    """
    ends = {x.operands[0]: x for x in lines if x.opcode == "fusion-done"}
    plain: dict[str, Instruction] = {}
    for start in (x for x in lines if x.name in ends):
        called = [known[name] for _, name in start.called if name in known]
        if not any(x.opcode in _MOVES for one in called for x in one.instructions):
            end = ends[start.name]
            plain[start.name] = replace(start, opcode="fusion", type=end.type)
            plain[end.name] = replace(end, opcode="copy-done")
    return [plain.get(x.name, x) for x in lines]


def parse_instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    root, name, kind, opcode, rest = match.groups()
    end = rest.find(")")
    if "(" in rest[:end]:  # a type or a literal with parentheses of its own
        end = _closing(rest, "()")
    literal, attributes = rest[:end], rest[end + 1 :]
    operands = tuple(re.findall(r"%([\w.\-]+)", literal))
    return Instruction(name, opcode, kind, operands, literal, attributes, root is not None)


def parse_shapes(text: str) -> tuple[Tensor, ...]:
    """List the tensors that a type names, in order."""
    found = _SHAPE.findall(text.replace("<=", ""))
    sizes = ((x, tuple(map(int, filter(None, dims.split(",")))), where) for x, dims, where in found)
    return tuple(
        Tensor(x, dims, _HOST_MEMORY.search(where) is not None) for x, dims, where in sizes
    )


def _closing(text: str, pair: str) -> int:
    """Return where the bracket closes that is open at the start: 5 for `a(b)c), d` and `()`."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == pair[0]) - (character == pair[1])
        if depth == 0:
            return position
    return len(text)


def _number(text: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", text)
    return int(match[1]) if match else -1
