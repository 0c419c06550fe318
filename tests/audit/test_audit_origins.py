"""Which values are made of a device's own examples, read from the text of a program."""

from types import SimpleNamespace

import pytest

from tests.hlo.programs import wrap
from zerojax.audit._origins import Origins
from zerojax.hlo import Frame, Value, parse_collectives, parse_module

SCATTER = """
%there (g: f32[64]) -> f32[8] {
  %g = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%g), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
"""
#: How a TPU's SparseCores run it, those of libtpu 0.0.50, and a GPU beside what follows (jax 0.12).
BESIDE = {
    "call": ["%go = ((f32[64]), f32[8]) call-start(%g), to_apply=%there"],
    "call, given later": [
        "%before = ((), (), (s32[1])) call-start(), to_apply=%there",
        "%go = ((f32[64]), f32[8]) call-update(%before, %g)",
    ],
    "fusion": ["%go = ((f32[64]), f32[8]) fusion-start(%g), kind=kCustom, calls=%there"],
}


@pytest.mark.parametrize("reduced", [True, False])
@pytest.mark.parametrize("spelling", BESIDE)
def test_a_sum_beside_the_program_is_no_device_s_own(spelling, reduced):
    text = wrap(
        "%x = f32[64]{0} parameter(0)",
        "%g = f32[64]{0} negate(%x)",
        *BESIDE[spelling],
        f"%end = f32[8]{{0}} {spelling.split(',')[0]}-done(%go)",
        "%own = f32[8]{0} slice(%g), slice={[0:8]}",
        f"ROOT %new = f32[8]{{0}} negate({'%end' if reduced else '%own'})",
        computations=SCATTER,
    )
    module = parse_module(text)
    (moved,) = parse_collectives(module).records
    assert moved.op == "reduce-scatter"
    batch = SimpleNamespace(
        kind="batch", argument=SimpleNamespace(number=0, shape=(64,), shard_shape=(8,))
    )
    value = Value(Frame(computation=module.entry), "new", None)
    assert Origins(module, [batch], [], []).are_of_examples([value]) is not reduced


def test_a_slice_beside_the_program_is_followed():
    """As GPUs slice stacks (jax 0.12): what was read before the slice is what it is made of."""
    text = wrap(
        "%x = f32[64]{0} parameter(0)",
        "%go = ((f32[64]), f32[8], u32[]) fusion-start(%x), kind=kLoop, calls=%first",
        "%end = f32[8]{0} fusion-done(%go)",
        "ROOT %new = f32[8]{0} negate(%end)",
        computations="""
%first (g: f32[64]) -> f32[8] {
  %g = f32[64]{0} parameter(0)
  ROOT %s = f32[8]{0} slice(%g), slice={[0:8]}
}
""",
    )
    module = parse_module(text)
    batch = SimpleNamespace(
        kind="batch", argument=SimpleNamespace(number=0, shape=(64,), shard_shape=(8,))
    )
    value = Value(Frame(computation=module.entry), "new", None)
    assert Origins(module, [batch], [], []).are_of_examples([value])


def test_what_is_gathered_in_parts_is_made_of_what_was_gathered_first():
    """A torus gathers a frozen base axis by axis; a gather of examples is no weight's."""
    text = wrap(
        "%base = f32[8,64]{1,0} parameter(0)",
        "%x = f32[8,64]{1,0} parameter(1)",
        "%part = f32[16,64]{1,0} all-gather(%base), replica_groups={{0,4},{1,5},{2,6},{3,7}}, "
        "dimensions={0}",
        "%whole = f32[64,64]{1,0} all-gather(%part), replica_groups={{0,1,2,3},{4,5,6,7}}, "
        "dimensions={0}",
        "%h = f32[8,64]{1,0} dot(%x, %whole), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "ROOT %all = f32[64,64]{1,0} all-gather(%h), replica_groups={{0,1,2,3,4,5,6,7}}, "
        "dimensions={0}",
    )
    module = parse_module(text)
    held = [
        SimpleNamespace(
            kind=kind,
            argument=SimpleNamespace(number=number, shape=(64, 64), shard_shape=(8, 64)),
        )
        for number, kind in enumerate(("other", "batch"))
    ]
    origins = Origins(module, held, [], [])
    values = {name: Value(Frame(computation=module.entry), name, None) for name in ("part", "h")}
    assert not origins.are_of_examples([values["part"]])  # it was made by a collective
    assert origins.is_given(values["part"])
    assert not origins.is_given(values["h"])
    assert origins.are_of_examples([values["h"]])


def test_an_instruction_that_sums_a_gradient_among_others_is_no_activation():
    """A TPU sums vectors of several leaves in one all-reduce; it ends a walk if one is judged."""
    text = wrap(
        "%x = f32[64]{0} parameter(0)",
        "%y = f32[8]{0} slice(%x), slice={[0:8]}",
        "%both = (f32[64]{0}, f32[8]{0}) all-reduce(%x, %y), replica_groups={{0,1,2,3}}, "
        "to_apply=%add",
        "%sum = f32[64]{0} get-tuple-element(%both), index=0",
        "ROOT %new = f32[64]{0} negate(%sum)",
    )
    module = parse_module(text)
    leaf = SimpleNamespace(number=0, shape=(64,), shard_shape=(8,))
    record = SimpleNamespace(computation=module.entry.name, name="both")
    moves = [SimpleNamespace(is_ours=is_ours, record=record) for is_ours in (True, False)]
    value = Value(Frame(computation=module.entry), "new", None)
    held = [SimpleNamespace(kind="batch", argument=leaf)]
    assert not Origins(module, held, moves, []).are_of_examples([value])
    assert Origins(module, held, moves[1:], []).are_of_examples([value])
