"""The largest results of a program: what its temporaries are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import SPELLINGS, having
from zerojax.hlo._walk import SCHEDULED, walk

_NO_BUFFER = having("no buffer")
_FAR = SPELLINGS["host memory"].mark


@dataclass(frozen=True, kw_only=True)
class Result:
    """Name the result of an instruction, in bytes of one device."""

    name: str
    shape: str
    bytes: int
    op_name: str


def largest_results(module: Module, count: int) -> list[Result]:
    """List the largest results that lie in a device's memory; some of them share a buffer."""
    lines = {id(line): line for _, line in walk(module, SCHEDULED)}
    found = [
        Result(name=line.name, shape=_text(line), bytes=size, op_name=line.op_name)
        for line in lines.values()
        if line.opcode not in _NO_BUFFER
        and not _FAR.search(line.type)
        and (size := sum(tensor.bytes for tensor in line.shapes))
    ]
    return sorted(found, key=lambda one: -one.bytes)[:count]


def _text(line: Instruction) -> str:
    """Write the shapes of a result, the largest first; of a tuple not what is next to nothing."""
    sizes = Counter((one.elements, f"{one.dtype}{list(one.dims)}") for one in line.shapes)
    ordered = sorted(sizes.items(), key=lambda item: -item[0][0])
    texts = [
        f"{count} x {text}" if count > 1 else text
        for (elements, text), count in ordered
        if elements >= ordered[0][0][0] / 100
    ]
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")
