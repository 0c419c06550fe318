"""What loops carry from turn to turn that grows there: sums, and stacks written layer by layer."""

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.hlo._module import Instruction, Module, Tensor
from zerojax.hlo._values import Frame, is_zero, source_of
from zerojax.hlo._walk import SCHEDULED, walk

_GROWS = ("add", "dynamic-update-slice")


@dataclass(frozen=True, kw_only=True)
class Carry:
    """Hold a tensor that a loop starts with zeros and adds to, or writes into."""

    loop: str  # the while instruction
    tensor: Tensor  # what it carries
    is_sum: bool  # whether it is added to; else each turn writes a part of it
    op_name: str  # the jax operation that adds or writes
    written: str  # the opcode that makes what is written, such as "all-gather"


def find_carries(module: Module) -> Iterator[Carry]:
    """Visit the sums and the stacks of every loop.

    %zeros = f32[8] broadcast(%zero)
    %state = (s32[], f32[8]) tuple(%i, %zeros)
    %w = (s32[], f32[8]) while(%state), body=%b
    %b: %sum = f32[8] get-tuple-element(%s), index=1;  %new = f32[8] add(%sum, %g)
        ROOT %t = (s32[], f32[8]) tuple(%j, %new)         %w carries a sum: f32[8]
    """
    for site, line in walk(module, SCHEDULED):
        body = site.frame.enter(module, line) if line.opcode == "while" else None
        start = source_of(module, site.frame, line.operands[0]) if body else None
        if body is None or start is None or start[1].opcode != "tuple":
            continue
        root = body.computation.root
        pairs = zip(start[1].operands, root.operands, strict=False)
        for index, (first, last) in enumerate(pairs if root.opcode == "tuple" else ()):
            frame, made = source_of(module, body, last) or (body, root)
            if made.opcode not in _GROWS or not is_zero(module, start[0], first):
                continue
            if _grows(module, frame, made, body, index):
                written = source_of(module, frame, made.operands[1])
                yield Carry(
                    loop=line.name,
                    tensor=line.shapes[index],
                    is_sum=made.opcode == "add",
                    op_name=made.op_name,
                    written=written[1].opcode.removesuffix("-done") if written else "",
                )


def _grows(module: Module, frame: Frame, line: Instruction, body: Frame, index: int) -> bool:
    """Return whether a value is an element of a loop's state that was added to or written into."""
    if line.opcode in _GROWS:
        operands = line.operands[: 2 if line.opcode == "add" else 1]
        found = (source_of(module, frame, operand) for operand in operands)
        return any(one is not None and _grows(module, *one, body, index) for one in found)
    is_state = frame.computation is body.computation and line.opcode == "get-tuple-element"
    return is_state and line.attribute("index") == str(index)
