"""Where collectives stand in a program: loops, branches, fusions and async pairs. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.hlo._loops import Frame, trip_count
from zerojax.hlo._module import Computation, Instruction, Module, Shape

OPS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPCODE = re.compile(rf"(?:{'|'.join(OPS)})(?:-start|-update|-done)?|send|recv")
_MENTIONED = re.compile(rf" (?:{'|'.join(OPS)}|send|recv)(?:-start)?\(")
_FOREIGN = re.compile(r"nccl|nvshmem|collective|all_?(?:gather|reduce)|megascale", re.IGNORECASE)
_PASSED_ON = (
    "copy",
    "bitcast",
    "convert",
    "reshape",
    "copy-start",
    "copy-done",
    "get-tuple-element",
)
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Name a loop that a collective stands in; `trip_count` is None where the text doesn't tell."""

    name: str
    body: str
    op_name: str
    trip_count: int | None


@dataclass(frozen=True, kw_only=True)
class Site:
    """Hold a place in the program, and the collective that stands there."""

    frame: Frame
    instruction: Instruction | None = None
    loops: tuple[Loop, ...] = ()  # outermost first
    branches: tuple[tuple[str, int], ...] = ()  # (conditional, branch), outermost first
    is_async: bool = False
    keeps_part: bool = False  # within a TPU fusion that keeps one part of its all-reduce


def walk(module: Module) -> Iterator[Site]:
    """Visit every collective that the program runs, once for each place that calls it."""
    yield from _visit(module, Site(frame=Frame(computation=module.entry)))


def unread_lines(module: Module, read: set[tuple[str, str]]) -> list[str]:
    """List what looks like a collective and is not in `read`, as (computation, instruction)."""
    lines = [line for line in module.unread if _MENTIONED.search(line)]
    starts, repeats = set(), {}
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if is_collective(instruction):
                role, chain = async_role(computation, instruction)
                if role == "start":
                    starts.add(chain)
                if role == "repeat":
                    repeats.setdefault(chain, f"{computation.name}/{instruction.name}")
                    continue
                if instruction.opcode.endswith(("-done", "-update")):
                    continue
            elif not _is_foreign(instruction):
                continue
            if (computation.name, instruction.name) not in read:
                lines.append(f"{computation.name}/{instruction.name} = {instruction.opcode}(...)")
    return lines + [repeats[chain] + " starts nowhere" for chain in sorted(repeats.keys() - starts)]


def is_collective(instruction: Instruction) -> bool:
    """Tell whether an instruction moves data between devices, or waits for one that does."""
    return _OPCODE.fullmatch(instruction.opcode) is not None


def async_role(computation: Computation, instruction: Instruction) -> tuple[str, str]:
    """Return ("start" | "repeat" | "", chain) for a collective within a TPU async fusion.

    Such a fusion repeats its collective in its start, in every fusion that runs beside it and in
    its done; a chain id ties them together. Only the start counts.
    """
    chain = instruction.attribute("chain_id")
    targets = {
        user.attribute("custom_call_target")
        for user in computation.users.get(instruction.name, [])
        if user.opcode == "custom-call"
    }
    key = chain or instruction.attribute("channel_id") or ""
    if _START in targets:
        return "start", key
    beside = computation.name.startswith("async_collective_fusion")
    return ("repeat" if chain or _DONE in targets or beside else "", key)


def is_sliced(module: Module, frame: Frame, name: str, index: int | None = None) -> bool:
    """Tell whether every use of a value keeps only a slice of it; `index` picks from a tuple."""
    computation = frame.computation
    if computation.by_name[name].is_root and frame.caller is not None and frame.parent is not None:
        return is_sliced(module, frame.parent, frame.caller.name)
    users = computation.users.get(name, [])
    if index is not None:
        users = [user for user in users if user.attribute("index") == str(index)]
    return bool(users) and all(_slices(module, frame, user, name) for user in users)


def joined_shapes(module: Module, frame: Frame, name: str) -> list[Shape]:
    """List the shapes of the flat tensors that a value joins end to end, none for any other."""
    instruction = frame.computation.by_name.get(name)
    while instruction is not None and instruction.opcode in _PASSED_ON:
        instruction = frame.computation.by_name.get(instruction.operands[0])
    if instruction is None:
        return []
    callee = module.callee(instruction) if instruction.opcode == "fusion" else None
    if callee is not None:
        inner = Frame(computation=callee, caller=instruction, parent=frame)
        return joined_shapes(module, inner, callee.root.name)
    if instruction.opcode != "concatenate" or len(instruction.shapes[0].dims) != 1:
        return []
    operands = [frame.computation.by_name.get(operand) for operand in instruction.operands]
    return [operand.shapes[0] for operand in operands if operand is not None]


def is_placed(module: Module, frame: Frame, name: str) -> bool:
    """Tell whether a value is zero but for the part that this device writes into it."""
    instruction = frame.computation.by_name.get(name)
    while instruction is not None and instruction.opcode in _PASSED_ON:
        instruction = frame.computation.by_name.get(instruction.operands[0])
    if instruction is None:
        return False
    if instruction.opcode == "fusion":
        callee = module.callee(instruction)
        if callee is None:
            return False
        inner = Frame(computation=callee, caller=instruction, parent=frame)
        return is_placed(module, inner, callee.root.name)
    if instruction.opcode != "dynamic-update-slice":
        return False
    zeros = _origin(frame, instruction.operands[0])
    return zeros is not None and zeros.opcode == "constant" and zeros.literal in ("0", "false")


def _origin(frame: Frame, name: str) -> Instruction | None:
    """Follow a value through what keeps or repeats it, out of fusions too."""
    instruction = frame.computation.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode in _PASSED_ON or instruction.opcode == "broadcast":
        return _origin(frame, instruction.operands[0])
    caller, parent = frame.caller, frame.parent
    if parent is None or caller is None or instruction.opcode != "parameter":
        return instruction
    if caller.opcode != "fusion":
        return None
    return _origin(parent, caller.operands[int(instruction.literal)])


def _slices(module: Module, frame: Frame, user: Instruction, name: str) -> bool:
    if user.opcode == "dynamic-slice":
        return user.operands[0] == name
    if user.opcode in _PASSED_ON:
        return is_sliced(module, frame, user.name)
    if user.opcode == "tuple" and user.is_root and frame.caller is not None and frame.parent:
        index = user.operands.index(name)
        return frame.caller.opcode == "fusion" and is_sliced(
            module, frame.parent, frame.caller.name, index
        )
    callee = module.callee(user)
    if callee is not None and user.opcode in ("fusion", "call"):
        inner = Frame(computation=callee, caller=user, parent=frame)
        numbers = [number for number, operand in enumerate(user.operands) if operand == name]
        parameters = [callee.parameter(number) for number in numbers]
        return all(p is not None and is_sliced(module, inner, p.name) for p in parameters)
    return False


def _visit(module: Module, site: Site) -> Iterator[Site]:
    computation = site.frame.computation
    for instruction in computation.instructions:
        if is_collective(instruction):
            role, _ = async_role(computation, instruction)
            if role != "repeat" and not instruction.opcode.endswith(("-done", "-update")):
                is_async = site.is_async or role == "start" or _is_async(instruction)
                yield dataclasses.replace(site, instruction=instruction, is_async=is_async)
        elif instruction.opcode not in ("async-update", "async-done"):
            yield from _visit_called(module, site, instruction)


def _visit_called(module: Module, site: Site, instruction: Instruction) -> Iterator[Site]:
    for position, (_, name) in enumerate(instruction.called):
        if name not in module.computations:
            continue
        frame = Frame(computation=module.computations[name], caller=instruction, parent=site.frame)
        inner = dataclasses.replace(site, frame=frame)
        if instruction.opcode == "while":
            count = trip_count(module, instruction, site.frame)
            loop = Loop(
                name=instruction.name,
                body=name,
                op_name=instruction.op_name,
                trip_count=count,
            )
            inner = dataclasses.replace(inner, loops=(*site.loops, loop))
        elif instruction.opcode == "conditional":
            inner = dataclasses.replace(
                inner, branches=(*site.branches, (instruction.name, position))
            )
        elif instruction.opcode == "async-start":
            inner = dataclasses.replace(inner, is_async=True)
        elif instruction.opcode == "fusion":
            keeps = name.startswith("all-reduce-scatter")
            keeps = keeps or "AllReduceScatterFusion" in instruction.attributes
            inner = dataclasses.replace(inner, keeps_part=keeps)
        yield from _visit(module, inner)


def _is_async(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes


def _is_foreign(instruction: Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return False
    target = instruction.attribute("custom_call_target") or ""
    return target not in (_START, _DONE) and _FOREIGN.search(target) is not None
