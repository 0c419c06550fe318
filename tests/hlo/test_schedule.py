"""The schedule: what costs how much, and where collectives begin and end."""

from __future__ import annotations

import re

import pytest

from tests.hlo.programs import FILES, text_of, wrap
from zerojax.hlo import parse_collectives, parse_module, parse_schedule

GPU = """
%dot (p: bf16[8,64], q: bf16[64,32]) -> bf16[8,32] {
  %p = bf16[8,64]{1,0} parameter(0)
  %q = bf16[64,32]{1,0} parameter(1)
  ROOT %d = bf16[8,32]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%row (s: bf16[6,64,32], i: s32[]) -> bf16[1,64,32] {
  %s = bf16[6,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %cut = bf16[1,64,32]{2,1,0} dynamic-slice(%s, %i), dynamic_slice_sizes={1,64,32}
}

%write (s: bf16[6,64,32], u: bf16[1,64,32], i: s32[]) -> bf16[6,64,32] {
  %s = bf16[6,64,32]{2,1,0} parameter(0)
  %u = bf16[1,64,32]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = bf16[6,64,32]{2,1,0} dynamic-update-slice(%s, %u, %i)
}

%mark (m: f32[256,2048], j: s32[256,2]) -> f32[256,2048] {
  %m = f32[256,2048]{1,0} parameter(0)
  %j = s32[256,2]{1,0} parameter(1)
  %minus = f32[] constant(-1)
  %ones = f32[256,1,1]{2,1,0} broadcast(%minus), dimensions={}
  ROOT %marked = f32[256,2048]{1,0} scatter(%m, %j, %ones), index_vector_dim=1, to_apply=%add
}
"""
LINES = (
    "%stack = bf16[6,64,32]{2,1,0} parameter(0)",
    "%x = bf16[8,64]{1,0} parameter(1)",
    "%i = s32[] parameter(2)",
    "%one = bf16[1,64,32]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%row",
    "%shard = bf16[64,32]{1,0} bitcast(%one)",
    "%ag = (bf16[64,32], bf16[128,32]) all-gather-start(%shard), replica_groups={}, dimensions={0}",
    "%y = bf16[8,32]{1,0} fusion(%x, %shard), kind=kCustom, calls=%dot",
    "%next = s32[] add(%i, %i)",
    "%whole = bf16[128,32]{1,0} all-gather-done(%ag)",
    "%sum = bf16[8,32]{1,0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add",
    "%put.remat = bf16[6,64,32]{2,1,0} fusion(%stack, %one, %i), kind=kLoop, calls=%write",
    "ROOT %t = (bf16[8,32]{1,0}, bf16[128,32]{1,0}) tuple(%sum, %whole)",
)


def scheduled(text):
    return parse_schedule(parse_module(text.replace("num_", "is_scheduled=true, num_", 1)))


def names(operations):
    return [one.name for one in operations]


def flat(operations):
    for one in operations:
        yield one
        for body in one.bodies:
            yield from flat(body)


def test_a_gpu_s_kernels_cost_their_products_and_the_bytes_that_they_touch():
    lines = (
        "%rows = f32[256,2048]{1,0} parameter(3)",
        "%ids = s32[256,2]{1,0} parameter(4)",
        "%marked = f32[256,2048]{1,0} fusion(%rows, %ids), kind=kInput, calls=%mark",
    )
    schedule = scheduled(wrap(*LINES[:-1], *lines, LINES[-1], computations=GPU))
    assert schedule is not None
    costs = {one.name: one.cost for one in schedule.operations}
    assert costs["y"].flops == 2 * 8 * 64 * 32
    assert costs["y"].bytes == 2 * (8 * 64 + 64 * 32 + 8 * 32)
    # A slice and an update in place touch a layer of the stack, twice, and the index.
    assert costs["one"].bytes == costs["put.remat"].bytes == 2 * (2 * 64 * 32) + 4
    # A scatter of one element a row touches these and their indices, not the rows.
    assert costs["marked"].bytes == 256 * 4 + 256 * 2 * 4
    assert not costs["ag"]
    assert "next" not in costs
    assert schedule.rematerialised == ("put.remat",)


def test_what_stands_between_start_and_done_is_in_order():
    schedule = scheduled(wrap(*LINES, computations=GPU))
    assert schedule is not None
    assert names(schedule.operations) == ["one", "ag", "y", "whole", "sum", "put.remat"]
    assert {one.name: one.ends for one in schedule.operations if one.ends} == {
        "whole": "ag",
        "sum": "sum",  # it blocks
    }


def test_a_tpu_s_asynchronous_fusion_begins_once_and_its_cycles_count_beside_it():
    schedule = parse_schedule(parse_module(text_of("jax-0.10.2/scan.v5e-wide")))
    assert schedule is not None
    (microbatches,) = (one for one in schedule.operations if one.bodies)
    forward, backward = (one for one in microbatches.bodies[0] if one.bodies)
    assert (microbatches.times, forward.times, backward.times) == (3, 6, 6)
    told = [(x.name, x.cost.cycles, [k[1] for k in x.begins], x.ends) for x in forward.bodies[0]]
    start = told.index(("async-collective-start", 0, ["all-gather.21"], ""))
    end = told.index(("async-collective-done", 0, [], "async-collective-start"))
    assert [x for x in told[start:end] if x[0] == "fusion.61"] == [("fusion.61", 73564, [], "")]
    assert ("all-gather.42", 0, ["all-gather.42"], "all-gather.42") in told


def test_a_fusion_beside_the_program_costs_what_it_costs_in_its_place():
    """jax 0.12 slices and updates stacks so on a GPU."""
    old, new = (f"jax-{version}/scan.h100" for version in ("0.10.2", "0.12.0"))
    assert " fusion-start(" in text_of(new)
    moved = []
    for name in (old, new):
        schedule = parse_schedule(parse_module(text_of(name)))
        assert schedule is not None
        moved.append(sum(one.cost.bytes for one in flat(schedule.operations)))
    assert moved[1] == pytest.approx(moved[0], rel=0.01)


@pytest.mark.parametrize("given_later", [False, True])
def test_a_gather_on_sparse_cores_moves_beside_what_follows(given_later):
    """libtpu 0.0.50 (jax 0.12) starts a SparseCore first, and an update gives it its operand."""
    gather = "all-gather(%s), replica_groups={{0,1}}, dimensions={0}"
    there = f"""
%there (s: f32[512]) -> f32[1024] {{
  %s = f32[512]{{0}} parameter(0)
  ROOT %ag = f32[1024]{{0}} {gather}
}}, execution_thread="sparsecore"
"""
    where = 'async_execution_thread="sparsecore", to_apply=%there'
    starts = {
        False: [f"%go = ((f32[512]), f32[1024]) call-start(%x), {where}"],
        True: [
            f"%before = ((), (), (s32[1])) call-start(), {where}",
            "%go = ((f32[512]), f32[1024]) call-update(%before, %x)",
        ],
    }
    text = wrap(
        "%x = f32[512]{0} parameter(0)",
        *starts[given_later],
        "%y = f32[512]{0} copy(%x)",
        "ROOT %end = f32[1024]{0} call-done(%go)",
        computations=there,
    )
    schedule = scheduled(text)
    assert schedule is not None
    assert names(schedule.operations) == ["go", "y", "end"]
    (record,) = parse_collectives(text).records
    assert schedule.operations[0].begins == ((record.computation, record.name, ()),)
    assert schedule.operations[-1].ends == "go"


@pytest.mark.parametrize("name", FILES)
def test_every_collective_of_every_backend_begins_once_and_ends(name):
    module = parse_module(text_of(name))
    schedule = parse_schedule(module)
    assert schedule is not None
    found = list(flat(schedule.operations))
    records = parse_collectives(module).records
    keys = {(one.computation, one.name, one.loops) for one in records}
    begun = [key for one in found for key in one.begins]
    assert len(begun) == len(set(begun))
    assert set(begun) == keys
    begins = {one.name for one in found if one.begins}
    assert {one.ends for one in found if one.ends} == begins


def test_an_estimate_of_the_compiler_is_taken_as_it_is():
    schedule = parse_schedule(parse_module(text_of("jax-0.10.2/scan.v6e")))
    assert schedule is not None
    cycles = [one.cost.cycles for one in flat(schedule.operations)]
    told = re.findall(r'"estimated_cycles":"(\d+)"', text_of("jax-0.10.2/scan.v6e"))
    assert sorted(filter(None, cycles)) == sorted(map(int, told))


def test_a_program_without_a_schedule_has_none():
    assert parse_schedule(parse_module(wrap(*LINES, computations=GPU))) is None
