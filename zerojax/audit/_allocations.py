"""What a TPU's program sets aside in a device's memory, read off the serialized program.

libtpu reports the bytes that are in use at the peak. It sets aside more, since one arena for all
temporaries has holes, and refuses a program by that. From jax 0.12 on it reports that too; before,
it stands in the serialized program alone, which is blocks with their lengths in front. One holds
XLA's messages (xla/service/hlo.proto) as protocol buffers, here with the numbers of their fields:

    block { 6: HloProto { 3: BufferAssignmentProto { 3: BufferAllocationProto, 3: ..., ... } } }
    BufferAllocationProto { 2: size, 8: memory, 0 and left out for the device's own, ... }

Example: 08 05  10 80 02  40 01 is an allocation: field 1 (08) is 5, field 2 (10) is 256, two bytes
of seven bits each, and field 8 (40) is 1, a TPU's vector memory.
"""

import contextlib
from collections.abc import Iterator

_HLO, _ASSIGNMENT, _ALLOCATION, _SIZE, _MEMORY = 6, 3, 3, 2, 8
#: Bytes of values of a fixed width, by the kind of a field; a 2 has its length in front.
_WIDTHS = {1: 8, 5: 4}


def allocated_bytes(serialized: bytes) -> int | None:
    """Count the bytes of a device's own memory that a program sets aside; None if it tells none."""
    messages = list(_blocks(memoryview(serialized)))
    for wanted in (_HLO, _ASSIGNMENT, _ALLOCATION):
        fields = (field for message in messages for field in _fields(message))
        messages = [x for number, x in fields if number == wanted and isinstance(x, memoryview)]
    found = [dict(_fields(allocation)) for allocation in messages]
    sizes = [one.get(_SIZE, 0) for one in found if not one.get(_MEMORY)]
    return sum(size for size in sizes if isinstance(size, int)) or None


def _blocks(data: memoryview) -> Iterator[memoryview]:
    at = 0
    with contextlib.suppress(IndexError):
        while at < len(data):
            size, at = _number(data, at)
            yield data[at : at + size]
            at += size


def _fields(data: memoryview) -> list[tuple[int, int | memoryview]]:
    """List the fields of a message, number and value; none where the data is no message."""
    found: list[tuple[int, int | memoryview]] = []
    at = 0
    with contextlib.suppress(IndexError, KeyError):
        while at < len(data):
            tag, at = _number(data, at)
            number, kind = tag >> 3, tag & 7
            if kind == 0:
                value, at = _number(data, at)
                found.append((number, value))
                continue
            size, at = (_WIDTHS[kind], at) if kind != 2 else _number(data, at)
            found.append((number, data[at : at + size]))
            at += size
    return found if at == len(data) else []


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, the lowest first; return what stands behind it too."""
    found = shift = 0
    while True:
        byte = data[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
