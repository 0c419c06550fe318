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
