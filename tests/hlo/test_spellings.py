"""What compilers call things: a line of each reads as it should."""

from __future__ import annotations

import re

import pytest

from zerojax.hlo import find_host_moves, parse_collectives, parse_module, parse_schedule
from zerojax.hlo._spellings import OPCODES, having

REDUCE = "all-reduce(%p), replica_groups={{0,1}}, to_apply=%add"
#: What compilers wrote, shortened. libtpu 0.0.42, then the plugins of jax 0.10.2.
LINES = {
    "scatter": "%fusion.66 = bf16[512,1024]{1,0} fusion(%x), kind=kCustom, "
    "calls=%all-reduce-scatter.2, "
    'backend_config={"collective_algorithm_config":{"emitter":"AllReduceScatterFusion"}}',
    "window": "%while.5 = bf16[4096,128]{0,1} while(%x), "
    "condition=%windowed_dot_general_cond_rs.1, "
    "body=%wide.windowed_dot_general_body_rs.1.clone.sunk",
    "async end": "%custom-call.6 = bf16[1,4096,1024]{2,1,0} custom-call(%all-gather.21), "
    'custom_call_target="AsyncCollectiveStart"',
    "async beside": "%fusion.61 = bf16[1024,4096]{1,0} fusion(%x), kind=kOutput, "
    "calls=%async_collective_fusion.61",
    "cycles": "%fusion.51 = bf16[4096,2048]{1,0} fusion(%x), kind=kOutput, "
    "calls=%fused_computation.3, "
    'backend_config={"window_config":{"estimated_cycles":"36864","is_mask":false}}',
    "rematerialised": "%fusion.12.remat2 = bf16[4096,2048]{1,0} fusion(%x), kind=kLoop, "
    "calls=%fused_computation",
    "between slices": "%send = (bf16[8,128]{1,0}, u32[], token[]) send(%x, %after-all), "
    'channel_id=3, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",'
    '_xla_megascale_transfer_type="ALL_REDUCE"}',
    "host memory": "%c = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x)",
    "host thread": "%s = (f32[8]{0}, f32[8]{0}, u32[]) custom-call-start(%x), "
    'async_execution_thread="host", called_computations={%there}',
    "trip count": "%while.43 = (s32[], f32[8]{0}) while(%x), condition=%c, body=%b, "
    'backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}',
    "host call": '%s = f32[8]{0} custom-call(%x), custom_call_target="HostExecute"',
    "callback": "%send = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, "
    "is_host_transfer=true",
    "library call": '%c = f32[8]{0} custom-call(%x), custom_call_target="__nccl$AllReduce"',
}
#: What the collectives of a program with the line are: operation and spelling.
COLLECTIVES = {
    "scatter": [("reduce-scatter", "all-reduce-scatter fusion")],
    "async end": [("all-gather", "all-gather")],
    "async beside": [],
    "between slices": [("all-reduce", "megascale")],
    "callback": [],
    "library call": None,
    "window": [("collective-permute", "windowed reduce-scatter")],
}


def program(line, *before):
    """Put a line into a program: what it calls holds a collective, and %x is its operand."""
    callee = re.search(r"(?:calls|body)=%([\w.\-]+)", line)
    gather = re.search(r"custom-call\(%(all-gather[\w.\-]*)\)", line)
    inside = "collective-permute(%p), source_target_pairs={{0,1},{1,0}}"
    inside = inside if "body=" in line else REDUCE
    lines = [*before, "%x = f32[8]{0} parameter(0)"]
    if gather:
        lines.append(f"%{gather[1]} = f32[16]{{0}} all-gather(%x), replica_groups={{}}")
    body = "\n".join(f"  {one}" for one in [*lines, line])
    called = callee and f"\n%{callee[1]} (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n"
    called = f"{called}  ROOT %r = f32[8]{{0}} {inside}\n}}\n" if callee else ""
    entry = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return f"HloModule m, num_partitions=2\n{called}\n{entry}"


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_read_as_their_row_says(name):
    found = parse_collectives(program(LINES[name]))
    expected = COLLECTIVES[name]
    if expected is None:
        assert found.unread
        return
    assert [(one.op, one.spelling) for one in found.records] == expected


def test_a_scatter_within_an_async_fusion_counts_at_its_start():
    """As libtpu writes it with xla_enable_async_reduce_scatter_fusion, v6e:2x4."""
    scatter = (
        "%reduce-scatter.7 = bf16[4]{0} reduce-scatter(%x), replica_groups={{0,1}}, "
        'dimensions={0}, to_apply=%add, frontend_attributes={chain_id="7"}'
    )
    line = LINES["async end"].replace("all-gather.21", "reduce-scatter.7")
    (record,) = parse_collectives(program(line, scatter)).records
    assert (record.op, record.shape) == ("reduce-scatter", (8,))
    done = line.replace("CollectiveStart", "CollectiveDone")
    assert not parse_collectives(program(done, scatter)).records


def test_a_trip_count_is_read_and_the_others_have_their_place():
    line = LINES["trip count"]
    (record,) = parse_collectives(program(line)).records
    assert record.trips == (6,)


def test_what_the_host_holds_and_computes_is_read():
    moves = {
        name: next(find_host_moves(parse_module(program(LINES[name]))))
        for name in ("host thread", "host call")
    }
    assert all((one.to_host, one.is_computed) == (32, True) for one in moves.values())
    (copied,) = find_host_moves(parse_module(program(LINES["host memory"])))
    assert (copied.to_host, copied.is_computed) == (32, False)
    held = parse_module(program("%y = f32[8]{0:S(5)} parameter(1)"))
    assert held.host_parameters == {1}


@pytest.mark.parametrize("name", ["cycles", "rematerialised"])
def test_what_a_compiler_says_of_the_schedule_is_read(name):
    line = LINES[name]
    text = program(line).replace("num_", "is_scheduled=true, num_", 1).replace(REDUCE, "copy(%p)")
    text = text.replace("f32[8]", "f32[1024]")  # what is smaller is not counted
    schedule = parse_schedule(parse_module(text))
    assert schedule is not None
    (one,) = schedule.operations
    assert one.cost.cycles == (36864 if name == "cycles" else 0)
    assert len(schedule.rematerialised) == (name == "rematerialised")


def test_what_hands_on_the_same_values_moves_nothing_between_devices():
    assert having("whole") <= having("keeps") | having("selects")
    assert not having("moves") & set().union(*map(having, OPCODES.keys() - {"moves", "combined"}))
