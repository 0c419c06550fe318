"""Fragmentation: read from what a compiler records, and not told where it records nothing."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax.audit import Fragmentation
from zerojax.audit._fragmentation import LIVE, fragmentation_of
from zerojax.hlo._memory import _messages, most_alive
from zerojax.models import gpt

CONFIG = gpt.Config(num_layers=4, width=512, num_heads=4, vocab_size=1024, context=128)
ALLOC, FREE, SHARE = 0, 1, 2


def varint(value):
    out = b""
    while value >= 128:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(*fields):
    """Write fields as a protocol buffer does; zeros are left out."""
    out = b""
    for number, value in fields:
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif value:
            out += varint(number << 3) + varint(value)
    return out


def plan(sizes, *heaps, colors=None):
    """Write a BufferAssignmentProto: sizes of buffers by id, and events (kind, id, shared id)."""
    buffers = [
        (1, message((1, i), (2, size), (3, b"\x20\x07"), (4, (colors or {}).get(i, 0))))
        for i, size in enumerate(sizes)
    ]
    traces = [
        (4, message(*[(1, message(*zip((1, 2, 5), e, strict=False), (3, b"main"))) for e in heap]))
        for heap in heaps
    ]
    return message(*buffers, (3, message((1, 3), (2, 10**6))), *traces)


@pytest.mark.parametrize(
    ("proto", "live"),
    [
        (plan([100, 50, 120], [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1), (1, 2)]), 170),
        (plan([300, 400], [(0, 0), (1, 0), (0, 1), (1, 1)]), 400),
        # The memory of 0 is in use until 1, which took it over, is done.
        (plan([100, 100, 50], [(0, 0), (2, 1, 0), (1, 0), (0, 2), (1, 1), (1, 2)]), 150),
        (plan([100, 100, 50], [(0, 0), (2, 1, 0), (1, 0), (1, 1), (0, 2), (1, 2)]), 100),
        # Taken over when it was just freed, and by another that took it over.
        (plan([100] * 4, [(0, 0), (1, 0), (2, 1, 0), (2, 2, 1), (1, 1), (0, 3), (1, 2)]), 200),
        (plan([100, 50], [(0, 0), (0, 1)], colors={0: 1}), 50),  # not the device's own memory
        (plan([100, 50], [(0, 0), (1, 0)], [(0, 1), (1, 1)]), 150),  # two heaps
        (plan([100, 50]), None),
        (b"", None),
    ],
    ids=[
        "overlap",
        "apart",
        "shared",
        "released",
        "handed-on",
        "color",
        "two-heaps",
        "no-heap",
        "empty",
    ],
)
def test_a_heap_is_replayed(proto, live):
    assert most_alive(proto) == live


@pytest.mark.parametrize(
    ("proto", "said"),
    [
        (plan([100, 50], [(0, 0)])[:-1], "it ends within"),
        (b"\x0f", "wire type 7"),
        (b"\x80", "it ends within a number"),
        (plan([100], [(0, 9)]), "names buffer 9"),
    ],
    ids=["cut", "wire-type", "number", "buffer"],
)
def test_what_is_no_plan_is_refused(proto, said):
    with pytest.raises(ValueError, match=said):
        most_alive(proto)


def test_fields_of_every_width_are_passed_over():
    eight, four = b"\x09" + bytes(8), b"\x15" + bytes(4)
    assert most_alive(eight + four + plan([7], [(0, 0)])) == 7


@pytest.mark.parametrize(
    ("platform", "statistics", "found"),
    [
        ("gpu", {"temp": 200, "peak": 1160, "argument": 1000, "output": 610, "alias": 600}, 150),
        ("gpu", {"temp": 200, "peak": 1160, "argument": 1000, LIVE: 120}, 120),
        ("gpu", {"temp": 200, "peak": 1300, "argument": 1000}, 200),  # constants are in the peak
        ("gpu", {"temp": 200, "argument": 1000}, None),
        ("tpu", {"temp": 200, "peak": 1160, "argument": 1000}, None),
        ("cpu", {"temp": 200, "peak": 1160, "argument": 1000}, None),
        ("cpu", {"temp": 200, LIVE: 100}, 100),
        ("gpu", {}, None),
    ],
)
def test_it_is_told_where_the_compiler_told_enough(platform, statistics, found):
    suffix = {"peak": "peak_memory_in_bytes"}
    given = {
        name if name == LIVE else suffix.get(name, f"{name}_size_in_bytes"): value
        for name, value in statistics.items()
    }
    wanted = None if found is None else Fragmentation(allocated=200, live=found)
    assert fragmentation_of(platform, given) == wanted


def test_the_fraction_is_what_nobody_uses():
    assert Fragmentation(allocated=200, live=150).fraction == pytest.approx(0.25)
    assert Fragmentation(allocated=0, live=0).fraction == 0


def lowered(mesh, stage):
    init, key = functools.partial(gpt.init, CONFIG), jax.random.key(0)
    precision = zerojax.Precision(params=jnp.bfloat16, master=jnp.float32)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=stage)
    tx = optax.adamw(1e-3)
    batch = jax.ShapeDtypeStruct((8, CONFIG.context + 1), jnp.int32, sharding=layout.batch)
    loss = functools.partial(gpt.loss, CONFIG)
    step = zerojax.make_train_step(loss, tx, layout, zerojax.Recipe(precision=precision))
    return layout, step.lower(step.abstract_state(), batch)


@pytest.mark.parametrize(
    "target", ["cpu", pytest.param("v5p:2x2x2", marks=pytest.mark.aot("libtpu"))]
)
def test_a_compiler_that_does_not_tell_is_not_guessed(target):
    sizes = {"data": 8}
    mesh = zerojax.make_mesh(sizes) if target == "cpu" else zerojax.topology_mesh(target, sizes)
    layout, step = lowered(mesh, 2)
    report = zerojax.audit(step.compile(), layout)
    assert report.memory.fragmentation is None
    assert "not told by this compiler" in str(report)
    # The state is donated, and the new one takes its place.
    assert report.memory.reused == pytest.approx(report.memory.states, rel=0.01)
    assert f"{report.memory.reused:,}" in str(report)


@pytest.mark.aot("cuda")
def test_a_gpus_peak_is_that_of_its_heap(tmp_path):
    layout, step = lowered(zerojax.topology_mesh("h100:1x8", {"data": 8}), 3)
    compiled = step.compile(
        compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True}
    )
    found = zerojax.audit(compiled, layout).memory.fragmentation
    (dump,) = tmp_path.glob("*gpu_after_optimizations.hlo.pb")
    plans = [value for number, value in _messages(dump.read_bytes()) if number == 3]
    replayed = most_alive(plans[0])
    assert found.live == pytest.approx(replayed, abs=1024)  # constants
    assert 0 <= found.fraction < 0.02
