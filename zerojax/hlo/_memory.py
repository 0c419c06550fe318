"""What temporaries take: the largest results in a text, and the most that is alive at one time.

Source of the field numbers: XLA's hlo.proto, BufferAssignmentProto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zerojax.hlo._module import Instruction, Module
from zerojax.hlo._spellings import SPELLINGS, having
from zerojax.hlo._walk import SCHEDULED, walk

_NO_BUFFER = having("no buffer")
_FAR = SPELLINGS["host memory"].mark
_DEVICE = 0  # the color of a device's own memory: not a TPU's vector memory, not the host's
_FREE, _SHARE = 1, 2  # events; 0 is an allocation


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


# ------------------------------------------------------------------ the simulated heap


def most_alive(proto: bytes) -> int | None:
    """Replay the simulated heap of a serialized BufferAssignmentProto.

        allocate A (100 B), allocate B (50 B), free A, B shares with C, allocate D (20 B)

    has 150 B alive at most: after the second event.

    Returns:
        Most bytes of device memory that temporaries use at one time; None where the proto has no
        record of a heap.

    Raises:
        ValueError: this is no such proto.
    """
    buffers, heaps = {}, []
    for number, value in _messages(proto):
        if number == 1:
            held = _numbers(value)
            buffers[held[1]] = held[2], held[4]
        elif number == 4:
            heaps.append([_numbers(event) for n, event in _messages(value) if n == 1])
    peaks = [_peak(heap, buffers) for heap in heaps]
    return sum(peaks) if peaks else None


def _peak(events: list[Counter[int]], buffers: Mapping[int, tuple[int, int]]) -> int:
    """Follow one heap: a buffer that shares another's memory keeps that from being freed."""
    live, most = 0, 0
    place: dict[int, int] = {}  # buffer to the one whose memory it has
    users: Counter[int] = Counter()
    for event in events:
        kind, buffer = event[1], event[2]
        owner = buffer
        if kind == _SHARE:
            owner = place.get(event[5], event[5])
        elif kind == _FREE:
            owner = place.get(buffer, buffer)
        if owner not in buffers or buffer not in buffers:
            raise ValueError(f"the heap's record names buffer {buffer}, which there is not")
        size, color = buffers[owner]
        size *= color == _DEVICE
        if kind == _FREE:
            users[owner] -= 1
            live -= 0 if users[owner] else size
            continue
        place[buffer] = owner
        # A result may take the place of an operand that was freed at the same instruction.
        live += 0 if users[owner] else size
        users[owner] += 1
        most = max(most, live)
    return most


def _messages(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Read the fields of a message that are messages or strings."""
    for number, value in _fields(message):
        if isinstance(value, bytes):
            yield number, value


def _numbers(message: bytes) -> Counter[int]:
    """Read the whole numbers of a message; one that is not there is 0."""
    return Counter({n: value for n, value in _fields(message) if isinstance(value, int)})


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Read the fields of a protocol buffer: their numbers, and numbers or bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"no protocol buffer: wire type {kind} at byte {at}")
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(message):
            raise ValueError(f"no protocol buffer: it ends within the field at byte {at}")
        yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits a byte, least first: AC 02 is 300."""
    value, shift = 0, 0
    while at < len(message):
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise ValueError("no protocol buffer: it ends within a number")
