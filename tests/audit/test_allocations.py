"""What a TPU's program sets aside is read off its bytes; other bytes tell nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerojax.audit._allocations import allocated_bytes


def number(value):
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def field(at, value):
    """Encode a field of a message: a number, or bytes."""
    if isinstance(value, int):
        return number(at << 3) + number(value)
    return number(at << 3 | 2) + number(len(value)) + value


def block(data):
    return number(len(data)) + data


def program(allocations):
    """Encode (size, memory, bytes of another field) as libtpu's serialized programs have them."""
    encoded = b"".join(
        field(3, field(1, at) + field(2, size) + (field(8, memory) if memory else b"") + other)
        for at, (size, memory, other) in enumerate(allocations)
    )
    hlo = field(1, b"module") + field(3, field(1, b"logical buffer") + encoded)
    header, code = b"\x08\x03\x12\x04pjrt", bytes(range(256))
    return block(header) + block(code) + block(field(1, b"a") + field(6, hlo)) + block(b"\x9a")


ALLOCATIONS = st.tuples(
    st.integers(0, 2**40), st.integers(0, 7), st.sampled_from([b"", field(9, b"x"), b"\x25abcd"])
)


@given(st.lists(ALLOCATIONS, max_size=8))
def test_sizes_in_a_devices_own_memory_add_up(allocations):
    expected = sum(size for size, memory, _ in allocations if not memory)
    assert allocated_bytes(program(allocations)) == (expected or None)


@given(st.binary(max_size=400))
def test_other_bytes_tell_nothing_or_a_number(data):
    found = allocated_bytes(data)
    assert found is None or found > 0


def test_an_allocation_that_is_no_message_counts_nothing():
    for strange in (b"\x13\x01", b"\x0a\x05ab", b"\x08"):  # a group, cut off, without its number
        data = block(field(6, field(3, field(3, strange))))
        assert allocated_bytes(data) is None


def test_what_is_cut_off_tells_nothing():
    whole = program([(256, 0, b""), (512, 1, b"")])
    assert allocated_bytes(whole) == 256
    assert {allocated_bytes(whole[:end]) for end in range(260, len(whole) - 2)} <= {None, 256}
