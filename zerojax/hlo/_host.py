"""What a program moves between a device and its host's memory.

Programs spell it three ways: a computation that the host runs takes its operands from where they
lie; a copy has its source in one memory and its result in the other; a slice is read from, or
written into, a tensor that the host's memory holds. The memory stands in the layout: `S(5)`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import HOST_COMPUTES, having
from zerojax.hlo._values import Frame
from zerojax.hlo._walk import SCHEDULED, num_runs, walk

_STAYS = having("stays")
#: Bytes: indices and other scalars ride along.
_SCALAR = 8


@dataclass(frozen=True, kw_only=True)
class HostMove:
    """Hold what one instruction moves each time it runs, in bytes of one device."""

    name: str  # the instruction
    to_host: int  # bytes from the device's memory to the host's
    from_host: int  # bytes the other way
    runs: int  # how often it runs in a step
    is_computed: bool  # whether the host computes with them


def find_host_moves(module: Module) -> Iterator[HostMove]:
    """Visit what moves bytes to or from the host's memory, once for each place that runs it.

    %far = f32[4,8]{1,0:S(5)} parameter(0)
    %near = f32[1,8]{1,0} dynamic-slice(%far, %i, %z)     from the host: 32 B
    %back = f32[8]{0:S(5)} copy(%x)                       to the host: 32 B
    """
    for site, line in walk(module, SCHEDULED):
        down, up, computed = (0, 0, False) if line.opcode in _STAYS else _moved(line, site.frame)
        if down or up:
            yield HostMove(
                name=line.name,
                to_host=down,
                from_host=up,
                runs=num_runs(site.loops),
                is_computed=computed,
            )


def host_parameters(module: Module) -> set[int]:
    """Return the numbers of the program's parameters that lie in the host's memory."""
    parameters = module.entry.parameters.items()
    return {number for number, line in parameters if any(x.is_far for x in line.shapes)}


def _moved(line: Instruction, frame: Frame) -> tuple[int, int, bool]:
    """Count the bytes that one instruction moves down and up."""
    by_name = frame.computation.by_name
    given = [x for name in line.operands if name in by_name for x in by_name[name].shapes]
    made = [*line.shapes]
    if HOST_COMPUTES.search(line.attributes):
        if line.opcode.endswith("-start"):  # operands, results, context
            made = made[len(given) : -1]
        near = [sum(x.bytes for x in tensors if not x.is_far) for tensors in (given, made)]
        return near[0], near[1], True
    if line.opcode == "copy-start":
        made = made[:1]
    elif line.opcode.endswith("-start"):  # counted where it is done
        return 0, 0, False
    if not given or not made or all(x.is_far == made[0].is_far for x in given + made):
        return 0, 0, False
    if made[0].is_far:  # a copy, or a slice written into what lies there
        inserted = sum(x.bytes for x in given if not x.is_far and x.bytes > _SCALAR)
        return min(made[0].bytes, inserted), 0, False
    return 0, min(made[0].bytes, sum(x.bytes for x in given if x.is_far)), False
