"""Collectives of a compiled program: HLO text -> records. Pure: no jax, and nothing is run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from zerojax.hlo._groups import Groups, parse_groups, parse_pairs
from zerojax.hlo._module import Instruction, Module, Shape, parse_module
from zerojax.hlo._walk import (
    OPS,
    Loop,
    Site,
    is_placed,
    is_sliced,
    joined_shapes,
    unread_lines,
    walk,
)

_WINDOW = re.compile(r"windowed_dot_general_body_(ag|rs)")
_WINDOWS = {"ag": "windowed all-gather", "rs": "windowed reduce-scatter"}
_SLICES = re.compile(r"\{([\d,]+)\}x")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Record one tensor that one instruction moves; a combined instruction gives several records.

    `shape` is the whole: what a gather returns, what a reduction, a scatter or a permute takes.
    `spelling` tells how the backend wrote it: "all-reduce-scatter fusion" (TPU), "all-reduce +
    slice" (an all-reduce of which each device keeps one part), "all-reduce of parts" (a gather as
    the sum of tensors that are zero but for one part), "windowed all-gather" and "windowed
    reduce-scatter" (permutes that a matmul overlaps), "megascale" (between TPU slices), or `op`.
    """

    op: str
    spelling: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bits: int
    groups: Groups  # of a permute: (source, target) pairs
    group_size: int
    loops: tuple[Loop, ...] = ()  # outermost first
    branches: tuple[tuple[str, int], ...] = ()  # (conditional, branch), outermost first
    is_async: bool = False
    combined: int = 1  # how many tensors the instruction carries
    part: int = 0  # which of them this is
    computation: str = ""  # where the instruction stands
    op_name: str = ""
    source: str = ""  # file:line

    @property
    def elements(self) -> int:
        """Count the elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def trip_count(self) -> int | None:
        """Return how often a step runs it; None where a loop around it has an unknown count."""
        counts = [loop.trip_count for loop in self.loops]
        return None if None in counts else math.prod(count or 0 for count in counts)

    @property
    def moved_elements(self) -> float:
        """Count the elements that a device sends in a step, by the ring algorithm.

        (n-1)/n of the whole for a gather, a scatter and an all-to-all over n devices, twice that
        for an all-reduce, the whole for a permute or a broadcast (Patarasuk and Yuan, 2009). A loop
        of unknown count is taken as one turn.
        """
        known = math.prod(1 if loop.trip_count is None else loop.trip_count for loop in self.loops)
        ring = (self.group_size - 1) / self.group_size
        moves = float(self.group_size > 1)
        if self.op == "collective-permute":
            moves = float(any(source != target for source, target in self.groups))
        whole = {"collective-permute": moves, "collective-broadcast": moves, "all-reduce": 2 * ring}
        return known * self.elements * whole.get(self.op, ring)

    @property
    def moved_bytes(self) -> float:
        """Count the bytes that a device sends in a step."""
        return self.moved_elements * self.item_bits / 8


@dataclass(frozen=True, kw_only=True)
class Collectives:
    """Hold what was read: records, and the lines with a collective that could not be."""

    records: tuple[Collective, ...]
    unread: tuple[str, ...]

    @property
    def moved_elements(self) -> float:
        """Count the elements that a device sends in a step, a conditional's worst branch."""
        return sum_moved(self.records)


def parse_collectives(program: str | Module) -> Collectives:
    """Read every collective of `compiled.as_text()`, each counted once.

    Fusions, calls, async wrappers, while loops and conditionals are followed from the entry. What
    has the name of a collective and is not understood lands in `unread`. ValueError for a text
    without an entry computation.
    """
    module = parse_module(program) if isinstance(program, str) else program
    records: list[Collective] = []
    read: set[tuple[str, str]] = set()
    for site in walk(module):
        found = _read(module, site)
        if found is not None and site.instruction is not None:
            read.add((site.frame.computation.name, site.instruction.name))
            records += found
    unread = unread_lines(module, read)
    return Collectives(records=tuple(_name_windows(records)), unread=tuple(unread))


def sum_moved(
    records: Iterable[Any],
    depth: int = 0,
    value: Callable[[Any], float] = lambda record: record.moved_elements,
) -> float:
    """Add the moved elements, or another value, with each conditional's worst branch.

    Args:
        records: collectives, or anything that has their `branches`.
        depth: how many conditionals are around.
        value: what to add.
    """
    total = 0.0
    inside: dict[str, dict[int, list[Any]]] = {}
    for record in records:
        if len(record.branches) == depth:
            total += value(record)
        else:
            name, branch = record.branches[depth]
            inside.setdefault(name, {}).setdefault(branch, []).append(record)
    for branches in inside.values():
        total += max(sum_moved(branch, depth + 1, value) for branch in branches.values())
    return total


def _read(module: Module, site: Site) -> list[Collective] | None:
    """Turn a site into records: none for what moves nothing between devices, None if unknown."""
    instruction = site.instruction
    assert instruction is not None
    if instruction.opcode in ("send", "recv"):
        return _read_transfer(module, site, instruction)
    op = instruction.opcode.removesuffix("-start")
    groups = _groups(module, instruction, op)
    operands = [site.frame.computation.by_name.get(name) for name in instruction.operands]
    known = [operand.shapes[0] for operand in operands if operand and len(operand.shapes) == 1]
    if groups is None or op not in OPS or len(known) != len(operands) or not known:
        return None
    size = module.num_devices if op == "collective-permute" else len(groups[0])
    dimension = re.search(r"\bdimensions=\{(\d+)\}", instruction.attributes)
    if op == "all-to-all" and dimension is None:  # one tensor, given as a part for each device
        known = [Shape(known[0].dtype, (len(known), *known[0].dims))]
    if op == "all-gather" and dimension is not None:
        known = [_widen(shape, int(dimension[1]), size) for shape in known]
    if op == "ragged-all-to-all":
        known = known[:1]  # the others are the result's buffer, offsets and sizes
    joined = _joined(module, site) if op == "all-reduce" and len(known) == 1 else []
    known = joined or known
    spelling = op
    if site.keeps_part and op == "all-reduce":
        op, spelling = "reduce-scatter", "all-reduce-scatter fusion"
    records = []
    for index, shape in enumerate(known):
        part, num_parts = (0, 1) if joined else (index, len(known))
        record = _build(module, site, op, shape, groups, size, part)
        if record is None:
            return None
        if spelling == "all-reduce" and _keeps_slice(module, site, part, num_parts):
            record = dataclasses.replace(record, spelling="all-reduce + slice")
        elif spelling == "all-reduce" and is_placed(module, site.frame, instruction.operands[part]):
            record = dataclasses.replace(record, spelling="all-reduce of parts")
        elif spelling != op:
            record = dataclasses.replace(record, spelling=spelling)
        records.append(dataclasses.replace(record, combined=len(known), part=index))
    return records


def _read_transfer(module: Module, site: Site, instruction: Instruction) -> list[Collective] | None:
    """Read a send between TPU slices; its recv is the other end, a host's callback is none."""
    kind = instruction.attribute("_xla_megascale_transfer_type")
    if kind is None:
        return [] if instruction.attribute("is_host_transfer") == "true" else None
    slices = _SLICES.search(instruction.attribute("_xla_megascale_target") or "")
    op = kind.lower().replace("_", "-")
    if instruction.opcode == "recv":
        return []
    if slices is None or op not in OPS or not instruction.shapes:
        return None
    size = len(slices[1].split(","))
    shape = instruction.shapes[0]
    shape = _widen(shape, 0, size) if op == "all-gather" else shape
    record = _build(module, site, op, shape, (), size)
    return record and [dataclasses.replace(record, spelling="megascale", is_async=True)]


def _build(
    module: Module, site: Site, op: str, shape: Shape, groups: Groups, size: int, index: int = 0
) -> Collective | None:
    instruction = site.instruction
    assert instruction is not None
    origin = _origin(site, index)
    bits = shape.bits
    if bits is None:
        return None
    return Collective(
        op=op,
        spelling=op,
        name=instruction.name,
        dtype=shape.dtype,
        shape=shape.dims,
        item_bits=bits,
        groups=groups,
        group_size=size,
        loops=site.loops,
        branches=site.branches,
        is_async=site.is_async,
        computation=site.frame.computation.name,
        op_name=origin.op_name,
        source=module.source(origin),
    )


def _origin(site: Site, index: int) -> Instruction:
    """Return the line that tells where a part came from: a combined one has no name of its own."""
    frame, instruction = site.frame, site.instruction
    assert instruction is not None
    while not instruction.op_name and index < len(instruction.operands):
        operand = frame.computation.by_name.get(instruction.operands[index])
        if operand is None:
            break
        instruction, index = operand, 0
        if operand.opcode == "parameter" and frame.caller is not None and frame.parent is not None:
            if frame.caller.opcode != "fusion":
                break
            instruction, index = frame.caller, int(operand.literal)
            frame = frame.parent
    return instruction


def _groups(module: Module, instruction: Instruction, op: str) -> Groups | None:
    key = "source_target_pairs=" if op == "collective-permute" else "replica_groups="
    start = instruction.attributes.find(key)
    if start < 0:
        return None
    text = instruction.attributes[start + len(key) :]
    if op == "collective-permute":
        return parse_pairs(text)
    return parse_groups(text, module.num_devices)


def _keeps_slice(module: Module, site: Site, index: int, num_parts: int) -> bool:
    instruction, computation = site.instruction, site.frame.computation
    assert instruction is not None
    done = [u for u in computation.users.get(instruction.name, []) if u.opcode.endswith("-done")]
    name = done[0].name if done else instruction.name
    return is_sliced(module, site.frame, name, index if num_parts > 1 else None)


def _joined(module: Module, site: Site) -> list[Shape]:
    """List what a GPU joins end to end before it reduces it as one tensor, none elsewhere."""
    instruction = site.instruction
    assert instruction is not None
    (whole,) = site.frame.computation.by_name[instruction.operands[0]].shapes
    joined = joined_shapes(module, site.frame, instruction.operands[0])
    if sum(shape.elements for shape in joined) != whole.elements:
        return []
    return [Shape(whole.dtype, shape.dims) for shape in joined]


def _widen(shape: Shape, dim: int, size: int) -> Shape:
    dims = list(shape.dims)
    dims[dim] *= size
    return Shape(shape.dtype, tuple(dims))


def _name_windows(records: list[Collective]) -> list[Collective]:
    """Name permutes that stand in for a gather or scatter, within their loop and peeled off it."""
    kinds: dict[tuple[str, int], str] = {}
    for record in records:
        for loop in record.loops:
            if (match := _WINDOW.search(loop.body)) and record.op == "collective-permute":
                kinds[record.op_name, record.elements] = _WINDOWS[match[1]]
    return [
        dataclasses.replace(record, spelling=kinds[record.op_name, record.elements])
        if record.op == "collective-permute" and (record.op_name, record.elements) in kinds
        else record
        for record in records
    ]
