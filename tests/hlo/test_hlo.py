"""The HLO parser: programs of each backend read as their formulas say, and nothing is dropped.

`tests/golden` holds what `scripts/golden` compiled, by jax version; the programs and their sizes
are written there. Everything expected below follows from those sizes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.hlo.programs import FILES, MANUAL, MLP, REDUCE, SCAN, text_of, wrap
from zerojax.hlo import (
    Collective,
    Collectives,
    Frame,
    Value,
    arguments_of,
    mesh_axes,
    parse_collectives,
    parse_module,
    sum_moved,
)
from zerojax.hlo._module import Computation, parse_shapes

DIM, HIDDEN, LAYERS, MICROBATCHES = 1024, 4096, 6, 3  # of scripts/golden
PSI = 2 * DIM * HIDDEN  # one layer: up and down
MESHES = {"2d": {"data": 2, "model": 4}, "3d": {"x": 2, "y": 2, "z": 2}}


def read(name: str) -> Collectives:
    return parse_collectives(text_of(name))


def ring(record: Collective) -> float:
    return (record.group_size - 1) / record.group_size


def test_both_jax_versions_and_all_backends_are_there():
    versions = {name.split("/")[0] for name in FILES}
    assert len(versions) >= 2
    for version in versions:
        backends = {name.split(".")[-1].split("-")[0] for name in FILES if version in name}
        assert {"v5e", "v5p", "v6e", "h100", "cpu"} <= backends


@pytest.mark.parametrize("name", FILES)
def test_every_line_is_read(name):
    assert read(name).unread == ()


@pytest.mark.parametrize("name", MLP)
def test_stage_2_moves_each_parameter_twice(name):
    found = read(name)
    gathers = [r for r in found.records if r.op == "all-gather"]
    reductions = [r for r in found.records if r.op != "all-gather"]
    assert sum(r.moved_elements for r in gathers) == PSI * 7 / 8
    spelled = {r.spelling for r in reductions}
    reduced = sum(r.moved_elements for r in reductions)
    if spelled == {"all-reduce + slice"}:  # CPU never scatters: twice the bytes
        assert reduced == 2 * PSI * 7 / 8
    elif spelled == {"windowed reduce-scatter"}:  # nine hops of an eighth where a ring needs seven
        assert reduced == PSI * 9 / 8
    else:
        assert spelled <= {"reduce-scatter", "all-reduce-scatter fusion"}
        assert reduced == PSI * 7 / 8
    assert sum_moved(found.records) == sum(r.moved_elements for r in found.records)


@pytest.mark.parametrize("name", SCAN)
def test_stage_3_moves_each_layer_three_times_in_two_nested_loops(name):
    found = read(name)
    for record in found.records:
        assert [loop.trip_count for loop in record.loops] == [MICROBATCHES, LAYERS]
        assert record.runs == MICROBATCHES * LAYERS
        assert record.elements == DIM * HIDDEN
        assert record.dtype == ("f32" if name.endswith("cpu") else "bf16")  # CPU reduces in fp32
        assert not record.branches
    factors = {"all-gather": 1, "reduce-scatter": 1, "all-reduce-scatter fusion": 1}
    factors |= {"all-reduce + slice": 2, "all-reduce of parts": 2}
    gathers = [r for r in found.records if r.spelling in ("all-gather", "all-reduce of parts")]
    assert len(gathers) == 4  # two leaves, forward and again for the backward pass
    assert len(found.records) == 6
    expected = sum(
        factors[r.spelling] * ring(r) * DIM * HIDDEN * LAYERS * MICROBATCHES for r in found.records
    )
    assert sum_moved(found.records) == expected


@pytest.mark.parametrize("name", SCAN)
def test_each_backend_spells_gathers_and_scatters_its_own_way(name):
    spelled = {
        "h100": {"all-gather", "reduce-scatter"},
        "v6e": {"all-gather", "all-reduce-scatter fusion"},
        "v6e-sparse": {"all-gather", "reduce-scatter"},
        "cpu": {"all-gather", "all-reduce + slice"},
        "v5p": {"all-gather", "all-reduce + slice"},
        "v5e-wide": {"all-gather", "all-reduce + slice"},
        "v5p-whole": {"all-reduce of parts", "all-reduce + slice"},
    }
    assert {record.spelling for record in read(name).records} == spelled[name.split(".")[-1]]


def test_a_whole_torus_turns_gathers_and_scatters_into_all_reduces():
    for name in (name for name in SCAN if name.endswith("v5p-whole")):
        spelled = {record.spelling for record in read(name).records}
        assert spelled == {"all-reduce of parts", "all-reduce + slice"}
        assert sum_moved(read(name).records) == 6 * PSI * 63 / 64 * LAYERS * MICROBATCHES


def test_an_async_collective_counts_once_though_a_tpu_fusion_repeats_it():
    for name in (name for name in SCAN if name.endswith("v5e-wide")):
        text = text_of(name)
        starts = len(re.findall(r'custom_call_target="AsyncCollectiveStart"', text))
        repeated = len(re.findall(r' all-gather\(.*chain_id="', text))
        assert repeated >= 3 * starts > 0
        gathers = [r.computation for r in read(name).records if r.op == "all-gather"]
        assert sum(within.startswith("fused") for within in gathers) == starts


@pytest.mark.parametrize("name", MANUAL)
def test_each_kind_is_found_once_wherever_it_stands(name):
    padding = [r for r in read(name).records if r.op == "collective-permute" and r.elements < 1e6]
    records = [r for r in read(name).records if r not in padding]
    scattered = {"reduce-scatter", "all-reduce-scatter fusion", "all-reduce + slice"}
    kinds = sorted("scatter" if r.spelling in scattered else r.op for r in records)
    permute, reduce = "collective-permute", "all-reduce"
    assert kinds == ["all-gather", reduce, reduce, reduce, "all-to-all", permute, "scatter"]
    plain = [r for r in records if r.spelling == reduce]
    assert sorted(len(r.branches) for r in plain) == [0, 0, 1]
    looped = [r for r in plain if r.loops]
    assert [r.trips for r in looped] == [(None,)]  # the length of this loop is an argument
    assert looped[0].moved_elements == 2 * ring(looped[0]) * looped[0].elements


@pytest.mark.parametrize("name", MANUAL)
def test_every_record_says_where_it_came_from(name):
    for record in read(name).records:
        assert re.fullmatch(r"scripts/golden:\d+", record.source)
        assert record.op_name.startswith("jit(body)/")


@pytest.mark.parametrize("name", [name for name in FILES if name.rsplit("-")[-1] in MESHES])
def test_groups_lead_to_mesh_axes(name):
    sizes = MESHES[name.rsplit("-")[-1]]
    expected = ("model",) if "model" in sizes else tuple(sizes)
    for record in read(name).records:
        permutes = record.op == "collective-permute"
        axes = mesh_axes(record.groups, sizes, pairs=permutes)
        assert axes == expected
        assert permutes or len(record.groups[0]) == record.group_size


def test_transfers_between_slices_are_read():
    for name in (name for name in FILES if name.endswith("v5e-slices")):
        between = [r for r in read(name).records if r.spelling == "megascale"]
        assert [r.op for r in between].count("all-reduce") == 2
        reduced = [r.moved_elements for r in between if r.op == "all-reduce"]
        assert sum(reduced) == PSI / 4  # each of four chips sends its quarter to the other slice
        assert {r.group_size for r in between} == {2}


BETWEEN = """HloModule between
ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %t = token[] after-all()
  %send = (f32[8]{0}, u32[], token[]) send(%p, %t), frontend_attributes={_xla_host_transfer_rendezvous="sum_0"}
  %other = (f32[8]{0}, u32[], token[]) send(%q, %t), frontend_attributes={_xla_host_transfer_rendezvous="sum_1"}
  %recv = (f32[8]{0}, u32[], token[]) recv(%t), frontend_attributes={_xla_host_transfer_rendezvous="sum_0"}
  %done = (f32[8]{0}, token[]) recv-done(%recv)
  ROOT %r = f32[8]{0} get-tuple-element(%done), index=0
}
"""  # noqa: E501


def test_what_another_slice_sends_is_what_this_one_would_send():
    module = parse_module(BETWEEN)
    assert {*arguments_of(module, Value(Frame(computation=module.entry), "r", None))} == {0}


COMBINED = """HloModule combined
ENTRY %main (p: f32[1,4], q: f32[1,4]) -> f32[8,4] {
  %p = f32[1,4]{1,0} parameter(0)
  %q = f32[1,4]{1,0} parameter(1)
  %start = ((f32[1,4], f32[1,4]), (f32[8,4], f32[8,4])) all-gather-start(%p, %q), dimensions={0}
  %done = (f32[8,4], f32[8,4]) all-gather-done(%start)
  %a = f32[8,4]{1,0} get-tuple-element(%done), index=1
  %b = f32[8,4]{1,0} get-tuple-element(%done), index=0
  %sums = (f32[8,4], f32[8,4]) all-reduce(%a, %b), to_apply=%add
  ROOT %r = f32[8,4]{1,0} get-tuple-element(%sums), index=INDEX
}
"""


@pytest.mark.parametrize("index", [0, 1])
def test_each_result_of_a_combined_collective_is_made_of_its_own_operand(index):
    module = parse_module(COMBINED.replace("INDEX", str(index)))
    made_of = arguments_of(module, Value(Frame(computation=module.entry), "r", None))
    assert {*made_of} == {1 - index}


def test_the_donated_outputs_are_read_from_the_header():
    for name in MLP:
        assert parse_module(text_of(name)).aliases == {*range(4)}  # two parameters, two momenta


# ------------------------------------------------------------------ nothing is dropped


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("replica_groups=mesh[", "replica_groups=lattice["),
        lambda text: text.replace("bf16[1024,4096]", "b7[1024,4096]"),
        lambda text: text.replace(" all-gather(", " all-gather(%nobody, "),
        lambda text: text.replace("body=", "trunk="),
    ],
    ids=["unknown groups", "unknown dtype", "unknown operand", "unreached computation"],
)
def test_a_collective_that_is_not_understood_is_reported(change):
    name = next(name for name in SCAN if name.endswith(".v6e"))
    before, after = read(name), parse_collectives(change(text_of(name)))
    lost = {record.name for record in before.records} - {record.name for record in after.records}
    assert lost
    assert all(any(name in line for line in after.unread) for name in lost), after.unread


def test_a_line_that_is_no_instruction_but_names_a_collective_is_reported():
    name = next(name for name in SCAN if name.endswith(".v6e"))
    broken = re.sub(r"(\nENTRY .*\n)", r"\1  %odd := bf16[8] all-gather(%x)\n", text_of(name))
    assert parse_collectives(broken).unread == ("%odd := bf16[8] all-gather(%x)",)


def test_a_kernels_metadata_may_stand_on_lines_of_its_own():
    """As libtpu writes splash attention; the computation goes on behind it."""
    program = wrap(
        "%x = f32[8]{0} parameter(0)",
        '%c = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"block_q":"128"\n}}, metadata={op_name="splash"}',
        "ROOT %r = f32[8]{0} all-reduce(%c), replica_groups={{0,1}}, to_apply=%add",
    )
    module = parse_module(program)
    assert not module.unread
    assert [line.name for line in module.entry.instructions] == ["x", "c", "r"]
    assert module.entry.by_name["c"].op_name == "splash"
    assert [record.name for record in parse_collectives(module).records] == ["r"]


def test_a_library_call_that_communicates_is_reported():
    program = wrap(
        "%x = f32[8]{0} parameter(0)",
        '%c = f32[8]{0} custom-call(%x), custom_call_target="__nccl$AllReduce"',
        "ROOT %r = f32[8]{0} copy(%c)",
    )
    assert parse_collectives(program).unread == ("main/c = custom-call(...)",)


def test_an_async_collective_that_starts_nowhere_is_reported():
    for name in (name for name in SCAN if name.endswith("v5e-wide")):
        text = text_of(name).replace('"AsyncCollectiveStart"', '"SomethingElse"')
        assert any("starts nowhere" in line for line in parse_collectives(text).unread)


def test_what_is_not_a_program_is_refused():
    with pytest.raises(ValueError, match=r"no ENTRY computation.*as_text"):
        parse_collectives("module @jit_step { }")


# ------------------------------------------------------------------ records


RECORD = Collective(
    op="all-gather",
    spelling="all-gather",
    name="c",
    dtype="bf16",
    shape=(16, 4),
    item_bits=16,
    groups=((0, 1, 2, 3),),
    group_size=4,
    frame=Frame(computation=Computation(name="main", is_entry=True)),
)


@pytest.mark.parametrize(
    ("op", "factor"),
    [
        ("all-gather", 3 / 4),
        ("reduce-scatter", 3 / 4),
        ("all-to-all", 3 / 4),
        ("all-reduce", 6 / 4),
        ("collective-broadcast", 1),
    ],
)
def test_volumes_follow_the_ring(op, factor):
    assert replace(RECORD, op=op).moved_elements == 64 * factor
    assert replace(RECORD, op=op).moved_bytes == 64 * factor * 2
    assert replace(RECORD, op=op, group_size=1).moved_elements == 0


def test_a_permute_moves_the_whole_unless_it_stays():
    shift, stay = ((0, 1), (1, 0)), ((0, 0), (1, 1))
    assert replace(RECORD, op="collective-permute", groups=shift).moved_elements == 64
    assert replace(RECORD, op="collective-permute", groups=stay).moved_elements == 0


def test_a_conditional_counts_its_heaviest_branch():
    inner = [replace(RECORD, branches=(("a", 0), ("b", i)), shape=(8 * (i + 1),)) for i in range(2)]
    other = replace(RECORD, branches=(("a", 1),), shape=(8,))
    plain = replace(RECORD, shape=(4,))
    assert sum_moved([plain, other, *inner]) == (4 + 16) * 3 / 4


def test_an_async_wrapper_counts_once():
    inside = "\n%wrapped (p: f32[8]) -> f32[8] {\n  %v = f32[8]{0} parameter(0)\n"
    kind = "((f32[8]{0}), f32[8]{0}, u32[])"
    program = wrap(
        "%x = f32[8]{0} parameter(0)",
        f"%s = {kind} async-start(%x), calls=%wrapped",
        f"%u = {kind} async-update(%s), calls=%wrapped",
        "ROOT %d = f32[8]{0} async-done(%u), calls=%wrapped",
        computations=f"{inside}  ROOT %r = {REDUCE}\n}}\n",
    )
    found = parse_collectives(program)
    assert [r.op for r in found.records] == ["all-reduce"]
    assert found.unread == ()


def test_combined_tensors_are_split_and_a_tuple_all_to_all_is_one():
    program = wrap(
        "%x = f32[8]{0} parameter(0)",
        "%y = bf16[4,2]{1,0} parameter(1)",
        "%s = ((f32[8]{0}, bf16[4,2]{1,0}), (f32[16]{0}, bf16[8,2]{1,0})) "
        "all-gather-start(%x, %y), replica_groups={}, dimensions={0}",
        "%d = (f32[16]{0}, bf16[8,2]{1,0}) all-gather-done(%s)",
        "%t = (f32[8]{0}, f32[8]{0}) all-to-all(%x, %x), replica_groups={{0,1}}",
        "ROOT %r = f32[8]{0} get-tuple-element(%t), index=0",
    )
    found = parse_collectives(program)
    assert found.unread == ()
    assert [(r.op, r.dtype, r.shape, r.combined) for r in found.records] == [
        ("all-gather", "f32", (16,), 2),
        ("all-gather", "bf16", (8, 2), 2),
        ("all-to-all", "f32", (2, 8), 1),
    ]
    assert sum_moved(found.records) == (16 + 16 + 16) / 2


def test_shapes_of_every_kind_of_type():
    assert [s.dims for s in parse_shapes("(f32[], bf16[2,3]{1,0:T(8,128)(2,1)S(1)})")] == [
        (),
        (2, 3),
    ]
    assert parse_shapes("f8e4m3fn[4]")[0].bits == 8
    assert parse_shapes("s4[4]")[0].bits == 4
    assert parse_shapes("q9[4]")[0].bits is None


def test_reductions_that_are_added_up_are_told_whatever_their_number():
    """Such as the norms of 1,500 leaves: the first is counted, the others could go with it."""
    count = 1500
    reduced = [f"%r{i} = {REDUCE.replace('%v', '%x')}" for i in range(count)]
    sums = [
        f"%s{i} = f32[8] add(%{f's{i - 1}' if i > 1 else 'r0'}, %r{i})" for i in range(1, count)
    ]
    program = wrap("%x = f32[8] parameter(0)", *reduced, *sums[:-1], f"ROOT {sums[-1]}")
    records = parse_collectives(program).records
    assert [record.is_added for record in records] == [False, *[True] * (count - 1)]
