"""`parse_collectives`: from the text of a program to its collectives, and to what was not read."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from zerojax.hlo._collectives import Collective, Collectives, parse_groups, parse_pairs
from zerojax.hlo._module import Computation, Instruction, Module, Tensor, parse_module
from zerojax.hlo._spellings import having, mark
from zerojax.hlo._values import KEEPS, Frame, is_sliced, is_zero, source_of
from zerojax.hlo._walk import Site, walk

OPS = having("moves")
_SCATTER_FUSION = "all-reduce-scatter fusion"
_WINDOW, _ASYNC_END, _ASYNC_BESIDE = map(mark, ("WINDOW", "ASYNC_END", "ASYNC_BESIDE"))
_BETWEEN_SLICES, _CALLBACK = mark("BETWEEN_SLICES"), mark("CALLBACK")
_LIBRARY_CALL = mark("LIBRARY_CALL")
_OPCODE = re.compile(rf"(?:{'|'.join(sorted(OPS))})(?:-start|-update|-done)?|send|recv")
#: A computation, an instruction in it, and which of its results.
_Part = tuple[str, str, int]
_MENTIONED = re.compile(rf" (?:{'|'.join(sorted(OPS))}|send|recv)(?:-start)?\(")


def parse_collectives(program: str | Module) -> Collectives:
    """Read every collective of `compiled.as_text()`, each counted once.

    Fusions, calls, async wrappers, while loops and conditionals are followed from the entry. What
    has the name of a collective and is not understood lands in `unread`.

        %ag = bf16[4096,1024] all-gather(%x), replica_groups={{0,1}}, dimensions={0}

    in a loop of 6 turns is one record: an all-gather of 4096 x 1024 between 2 devices, run 6 times.
    A text without an entry computation is a ValueError.
    """
    module = parse_module(program) if isinstance(program, str) else program
    records: list[Collective] = []
    read: set[tuple[str, str]] = set()
    sums: dict[tuple[str, str], _Part] = {}
    added: set[_Part] = set()
    for site, line in walk(module):
        if line.opcode == "add":
            left, right = (_first_sum(module, site.frame, x, sums) for x in line.operands)
            if left and right:
                sums[site.frame.computation.name, line.name] = left
                added.add(right)
        counts = is_collective(line) and not is_end(line)
        if not counts or async_role(site.frame.computation, line)[0] == "repeat":
            continue
        if (found := _read(module, site, line)) is not None:
            read.add((site.frame.computation.name, line.name))
            records += found
    # Permutes that stand in for a gather or scatter, within their loop and peeled off it.
    names = {"ag": "windowed all-gather", "rs": "windowed reduce-scatter"}
    windows = {
        (record.op, record.op_name, record.elements): names[match[1]]
        for record in records
        for loop in record.loops
        if record.op == "collective-permute" and (match := _WINDOW.search(loop.body))
    }
    for place, one in enumerate(records):
        spelling = windows.get((one.op, one.op_name, one.elements), one.spelling)
        is_added = (one.computation, one.name, one.part) in added
        records[place] = dataclasses.replace(one, spelling=spelling, is_added=is_added)
    return Collectives(records=tuple(records), unread=tuple(_unread_lines(module, read)))


def is_collective(line: Instruction) -> bool:
    return _OPCODE.fullmatch(line.opcode) is not None


def is_end(line: Instruction) -> bool:
    return line.opcode.endswith(("-done", "-update"))


def async_role(computation: Computation, line: Instruction) -> tuple[str, str]:
    """Return ("start" | "repeat" | "", chain) for a collective within a TPU async fusion.

    Such a fusion repeats its collective in its start, in every fusion that runs beside it and in
    its done; a chain id ties them together. Only the start counts.
    """
    chain = line.attribute("chain_id")
    key = chain or line.attribute("channel_id") or ""
    ends = async_ends(computation.users.get(line.name, []))
    if "Start" in ends:
        return "start", key
    return ("repeat" if chain or ends or _ASYNC_BESIDE.match(computation.name) else "", key)


def async_ends(lines: Iterable[Instruction]) -> set[str]:
    """Return "Start" and "Done", where a line is that end of a TPU's asynchronous collective."""
    return {end[1] for line in lines if (end := _ASYNC_END.search(line.attributes))}


def _unread_lines(module: Module, read: set[tuple[str, str]]) -> list[str]:
    lines = [line for line in module.unread if _MENTIONED.search(line)]
    starts, repeats = set(), {}
    for computation in module.computations.values():
        for line in computation.instructions:
            if is_collective(line):
                role, chain = async_role(computation, line)
                if role == "start":
                    starts.add(chain)
                if role == "repeat":
                    repeats.setdefault(chain, f"{computation.name}/{line.name}")
                if role == "repeat" or is_end(line):
                    continue
            elif line.opcode != "custom-call" or not _LIBRARY_CALL.search(line.attributes):
                continue
            if (computation.name, line.name) not in read:
                lines.append(f"{computation.name}/{line.name} = {line.opcode}(...)")
    return lines + [repeats[chain] + " starts nowhere" for chain in sorted(repeats.keys() - starts)]


def _read(module: Module, site: Site, line: Instruction) -> list[Collective] | None:
    """Turn a line into records: none for what moves nothing between devices, None if unknown."""
    if line.opcode in ("send", "recv"):
        return _read_transfer(module, site, line)
    op = line.opcode.removesuffix("-start")
    if op == "collective-permute":
        groups = parse_pairs(line.attributes.partition("source_target_pairs=")[2])
    else:
        groups = parse_groups(line.attributes.partition("replica_groups=")[2], module.num_devices)
    operands = [site.frame.computation.by_name.get(name) for name in line.operands]
    known = [operand.shapes[0] for operand in operands if operand and len(operand.shapes) == 1]
    if groups is None or op not in OPS or len(known) != len(operands) or not known:
        return None
    size = module.num_devices if op == "collective-permute" else len(groups[0])
    dimension = re.search(r"\bdimensions=\{(\d+)\}", line.attributes)
    if op == "all-to-all" and dimension is None:  # one tensor, given as a part for each device
        known = [Tensor(known[0].dtype, (len(known), *known[0].dims))]
    if op == "all-gather" and dimension is not None:
        known = [_widen(tensor, int(dimension[1]), size) for tensor in known]
    if op == "ragged-all-to-all":
        known = known[:1]  # the others are the result's buffer, offsets and sizes
    joined = _joined(module, site, line) if op == "all-reduce" and len(known) == 1 else []
    known = joined or known
    if any(tensor.bits is None for tensor in known):
        return None
    records = []
    for index, tensor in enumerate(known):
        at = None if joined or len(known) == 1 else index
        spelling = _spell(module, site, line, at) if op == "all-reduce" else op
        records.append(
            _record(
                *(module, site, line, at or 0, tensor),
                op="reduce-scatter" if spelling == _SCATTER_FUSION else op,
                spelling=spelling,
                groups=groups,
                group_size=size,
                combined=len(known),
                part=index,
            )
        )
    return records


def _spell(module: Module, site: Site, line: Instruction, part: int | None) -> str:
    """Name what an all-reduce does; one of values that are zero but for one part is a gather.

    %zeros = bf16[4096] broadcast(%zero)
    %placed = bf16[4096] dynamic-update-slice(%zeros, %own, %at)
    %whole = bf16[4096] all-reduce(%placed)          the sum of parts is the whole
    """
    if site.keeps_part:
        return _SCATTER_FUSION
    users = site.frame.computation.users.get(line.name, [])
    done = next((user.name for user in users if user.opcode.endswith("-done")), line.name)
    if is_sliced(module, site.frame, done, part):
        return "all-reduce + slice"
    frame, placed = source_of(module, site.frame, line.operands[part or 0]) or (site.frame, line)
    is_placed = placed.opcode == "dynamic-update-slice"
    is_placed = is_placed and is_zero(module, frame, placed.operands[0])
    return "all-reduce of parts" if is_placed else "all-reduce"


def _read_transfer(module: Module, site: Site, line: Instruction) -> list[Collective] | None:
    between = _BETWEEN_SLICES.search(line.attributes)
    if between is None:
        return [] if _CALLBACK.search(line.attributes) else None
    op, size = between[2].lower().replace("_", "-"), len(between[1].split(","))
    if line.opcode == "recv":
        return []
    if op not in OPS or not line.shapes or line.shapes[0].bits is None:
        return None
    tensor = _widen(line.shapes[0], 0, size) if op == "all-gather" else line.shapes[0]
    named = {"op": op, "spelling": "megascale"}
    return [_record(module, site, line, 0, tensor, groups=(), group_size=size, **named)]


def _record(
    module: Module, site: Site, line: Instruction, operand: int, tensor: Tensor, **told: Any
) -> Collective:
    origin = _origin(site.frame, line, operand)
    return Collective(
        name=line.name,
        dtype=tensor.dtype,
        shape=tensor.dims,
        item_bits=tensor.bits or 0,
        loops=site.loops,
        branches=site.branches,
        frame=site.frame,
        op_name=origin.op_name,
        source=module.source(origin),
        **told,
    )


def _origin(frame: Frame, line: Instruction, part: int) -> Instruction:
    """Return the line that tells where a part came from: a combined one has no name of its own."""
    while not line.op_name and part < len(line.operands):
        operand = frame.computation.by_name.get(line.operands[part])
        if operand is None:
            break
        line, part = operand, 0
        if operand.opcode == "parameter" and frame.caller is not None and frame.parent is not None:
            if frame.caller.opcode != "fusion":
                break
            line, part = frame.caller, int(operand.literal)
            frame = frame.parent
    return line


def _joined(module: Module, site: Site, line: Instruction) -> list[Tensor]:
    """List what a GPU joins end to end before it reduces it as one tensor, none elsewhere.

    %flat = f32[96] concatenate(%bias, %scale), dimensions={0}
    %sum = f32[96] all-reduce(%flat)                 two tensors: of %bias's and of %scale's size
    """
    (whole,) = site.frame.computation.by_name[line.operands[0]].shapes
    found = source_of(module, site.frame, line.operands[0])
    if found is None or found[1].opcode != "concatenate" or len(found[1].shapes[0].dims) != 1:
        return []
    frame, joined = found
    operands = [frame.computation.by_name.get(operand) for operand in joined.operands]
    parts = [Tensor(whole.dtype, operand.shapes[0].dims) for operand in operands if operand]
    return parts if sum(part.elements for part in parts) == whole.elements else []


def _first_sum(
    module: Module, frame: Frame, name: str, sums: Mapping[tuple[str, str], _Part]
) -> _Part | None:
    """Return the first all-reduce that a value is a sum of; `sums` has that of each earlier add.

    %a = f32[8] all-reduce(%x);  %own_a = f32[1] dynamic-slice(%a, %at)
    %b = f32[8] all-reduce(%y);  %own_b = f32[1] dynamic-slice(%b, %at)
    %g = f32[1] add(%own_a, %own_b)       %a: one all-reduce of x + y would do, %b is added to it
    """
    found = source_of(module, frame, name, through=KEEPS | {"dynamic-slice", "transpose"})
    if found is None:
        return None
    frame, line = found
    if line.opcode == "add":
        return sums.get((frame.computation.name, line.name))
    part = 0
    if line.opcode == "get-tuple-element":
        part, line = line.index, frame.computation.by_name[line.operands[0]]
    is_sum = line.opcode in ("all-reduce", "all-reduce-done")
    return (frame.computation.name, line.name, part) if is_sum else None


def _widen(tensor: Tensor, dim: int, size: int) -> Tensor:
    dims = list(tensor.dims)
    dims[dim] *= size
    return Tensor(tensor.dtype, tuple(dims))
