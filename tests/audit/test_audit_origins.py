"""Which values are made of a device's own examples, read from the text of a program."""

from types import SimpleNamespace

import pytest

from tests.hlo.programs import wrap
from zerojax.audit._origins import Origins
from zerojax.hlo import Frame, Value, parse_module

SCATTER = """
%there (g: f32[64]) -> f32[8] {
  %g = f32[64]{0} parameter(0)
  ROOT %rs = f32[8]{0} reduce-scatter(%g), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}, execution_thread="sparsecore"
"""


@pytest.mark.parametrize("reduced", [True, False])
def test_a_sum_of_sparse_cores_is_no_device_s_own(reduced):
    text = wrap(
        "%x = f32[64]{0} parameter(0)",
        "%g = f32[64]{0} negate(%x)",
        '%go = ((f32[64]), f32[8]) call-start(%g), async_execution_thread="sparsecore", '
        "to_apply=%there",
        "%end = f32[8]{0} call-done(%go)",
        "%own = f32[8]{0} slice(%g), slice={[0:8]}",
        f"ROOT %new = f32[8]{{0}} negate({'%end' if reduced else '%own'})",
        computations=SCATTER,
    )
    module = parse_module(text)
    batch = SimpleNamespace(kind="batch", argument=SimpleNamespace(number=0))
    value = Value(Frame(computation=module.entry), "new", None)
    assert Origins(module, [batch], []).are_of_examples([value]) is not reduced
