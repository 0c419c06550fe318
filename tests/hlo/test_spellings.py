"""What compilers call things: every row's line reads as its row says."""

from __future__ import annotations

import re

import pytest

from zerojax.hlo import (
    find_host_moves,
    host_parameters,
    parse_collectives,
    parse_module,
    parse_schedule,
)
from zerojax.hlo._module import parse_instruction
from zerojax.hlo._spellings import OPCODES, SPELLINGS, having

REDUCE = "all-reduce(%p), replica_groups={{0,1}}, to_apply=%add"
#: What the collectives of a program with the row's line are: operation, spelling, whether async.
COLLECTIVES = {
    "scatter": [("reduce-scatter", "all-reduce-scatter fusion", False)],
    "async end": [("all-gather", "all-gather", True)],
    "async beside": [],
    "blocking": [("all-gather", "all-gather", False)],
    "between slices": [("all-reduce", "megascale", True)],
    "callback": [],
    "library call": None,
    "window": [("collective-permute", "windowed reduce-scatter", False)],
}
MARKS = {"window": "rs", "trip count": "6", "cycles": "36864", "between slices": "1,2",
         "callback": "true", "library call": "__nccl$AllReduce", "async end": "Start"}  # fmt: skip


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


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_mark_is_found_in_its_line_and_its_line_is_read(name):
    row = SPELLINGS[name]
    found = row.mark.search(row.line)
    assert found
    assert not row.mark.groups or found[1] == MARKS[name]
    assert parse_instruction(f"  {row.line}") is not None
    assert row.means
    assert row.seen


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_read_as_their_row_says(name):
    found = parse_collectives(program(SPELLINGS[name].line))
    expected = COLLECTIVES[name]
    if expected is None:
        assert found.unread
        return
    assert [(one.op, one.spelling, one.is_async) for one in found.records] == expected


def test_a_scatter_within_an_async_fusion_counts_at_its_start():
    """As libtpu writes it with xla_enable_async_reduce_scatter_fusion, v6e:2x4."""
    scatter = (
        "%reduce-scatter.7 = bf16[4]{0} reduce-scatter(%x), replica_groups={{0,1}}, "
        'dimensions={0}, to_apply=%add, frontend_attributes={chain_id="7"}'
    )
    line = SPELLINGS["async end"].line.replace("all-gather.21", "reduce-scatter.7")
    (record,) = parse_collectives(program(line, scatter)).records
    assert (record.op, record.is_async, record.shape) == ("reduce-scatter", True, (8,))
    done = line.replace("CollectiveStart", "CollectiveDone")
    assert not parse_collectives(program(done, scatter)).records


def test_a_trip_count_is_read_and_the_others_have_their_place():
    line = SPELLINGS["trip count"].line
    (record,) = parse_collectives(program(line)).records
    assert record.trips == (6,)


def test_what_the_host_holds_and_computes_is_read():
    moves = {
        name: next(find_host_moves(parse_module(program(SPELLINGS[name].line))))
        for name in ("host thread", "host call")
    }
    assert all((one.to_host, one.is_computed) == (32, True) for one in moves.values())
    (copied,) = find_host_moves(parse_module(program(SPELLINGS["host memory"].line)))
    assert (copied.to_host, copied.is_computed) == (32, False)
    held = parse_module(program("%y = f32[8]{0:S(5)} parameter(1)"))
    assert host_parameters(held) == {1}


@pytest.mark.parametrize("name", ["cycles", "rematerialised"])
def test_what_a_compiler_says_of_the_schedule_is_read(name):
    line = SPELLINGS[name].line
    text = program(line).replace("num_", "is_scheduled=true, num_", 1).replace(REDUCE, "copy(%p)")
    text = text.replace("f32[8]", "f32[1024]")  # what is smaller is not counted
    schedule = parse_schedule(parse_module(text))
    assert schedule is not None
    (one,) = schedule.operations
    assert one.cost.cycles == (36864 if name == "cycles" else 0)
    assert len(schedule.rematerialised) == (name == "rematerialised")


def test_every_row_is_tried_here():
    others = {"trip count", "host memory", "host thread", "host call", "cycles", "rematerialised"}
    assert {*COLLECTIVES, *others} == set(SPELLINGS)


@pytest.mark.parametrize(("opcode", "traits", "line"), OPCODES, ids=[row[0] for row in OPCODES])
def test_opcodes_are_read(opcode, traits, line):
    found = parse_instruction(f"  {line}")
    assert found is not None
    assert found.opcode == opcode
    assert traits <= {"moves", "keeps", "hands on", "whole", "no buffer", "stays"}


def test_an_opcode_has_one_row():
    names = [opcode for opcode, _, _ in OPCODES]
    assert len(names) == len(set(names))
    assert having("keeps") <= having("hands on")
