"""What a compiler's memory plan loses between temporaries, and what it saves by donation. Pure.

XLA places every temporary of a step before the step runs: one arena, each buffer at an offset of
its own. Bytes of the arena that are not in use at the worst moment are what fragmentation costs.
How many are in use comes from the compiler: from its record of the simulated heap, where it hands
the record over, or on a GPU from the peak that it computed from that record.

Source: arXiv 1910.02054, section 6.3 (MD); field numbers: XLA's hlo.proto, BufferAssignmentProto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

#: Under this name a program keeps what its heap record says; not one of `memory_analysis`.
LIVE = "live_temp_size_in_bytes"

_DEVICE = 0  # the color of a device's own memory: not a TPU's vector memory, not the host's
_FREE, _SHARE = 1, 2  # events; 0 is an allocation


@dataclass(frozen=True, kw_only=True)
class Fragmentation:
    """Compare the arena of a program's temporaries with what is in use of it; bytes.

    Attributes:
        allocated: size of the arena.
        live: most bytes in use at one time.
    """

    allocated: int
    live: int

    @property
    def fraction(self) -> float:
        """Give the part of the arena that no temporary uses at the worst moment."""
        return 1 - self.live / self.allocated if self.allocated else 0.0


def fragmentation_of(platform: str, statistics: Mapping[str, int]) -> Fragmentation | None:
    """Say what fragmentation costs a program; None where its compiler does not tell.

    Args:
        platform: "cpu", "gpu" or "tpu".
        statistics: those of a `Program`.
    """
    allocated = statistics.get("temp_size_in_bytes")
    live = statistics.get(LIVE)
    if live is None and platform == "gpu":
        live = _live_by_peak(statistics)
    # A TPU's peak counts vector memory too, and a CPU's no temporaries.
    if allocated is None or live is None:
        return None
    return Fragmentation(allocated=allocated, live=min(live, allocated))


def _live_by_peak(statistics: Mapping[str, int]) -> int | None:
    """Take from a peak what is there all the time: arguments, and results of their own."""
    peak = statistics.get("peak_memory_in_bytes", 0)
    fixed = statistics.get("argument_size_in_bytes", 0) + results_apart(statistics)
    return peak - fixed if peak >= fixed > 0 else None


def results_apart(statistics: Mapping[str, int]) -> int:
    """Count the bytes of results that take no argument's buffer."""
    names = ("output_size_in_bytes", "alias_size_in_bytes")
    whole, donated = (statistics.get(name, 0) for name in names)
    return max(whole - donated, 0)


def most_alive(proto: bytes) -> int | None:
    """Replay the simulated heap of a serialized BufferAssignmentProto.

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
    """Read a number of seven bits a byte, least first, and say where it ends."""
    value, shift = 0, 0
    while at < len(message):
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    raise ValueError("no protocol buffer: it ends within a number")
