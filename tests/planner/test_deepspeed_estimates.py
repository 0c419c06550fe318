"""DeepSpeed's estimators beside the paper's formulas: what differs, and why.

DeepSpeed 0.19.8, `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`, the branches
without offload for the device's memory. Two differences, and no third:

- It counts fp32 gradients (4 bytes) beside the 16-bit ones, as its optimizer makes them: at stage 2
  the partitioned part is 18 = 2 + 4 + 4 + 8 where the paper has 14 = 2 + 12. At stage 3 it has 18
  again, not 20: two bytes of the 16-bit parameters or gradients are left out.
- At stage 3 it adds the largest layer, gathered, with its gradient in 16 bits: 4 bytes for each of
  its parameters. The paper's formula holds states only; a plan counts gathered layers apart.

With optimizer offload at stage 2 the device is left with the parameters, 2 Psi, as in ZeRO-Offload;
without a partition of gradients on the device, as here.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerojax.planner import model_state_bytes

PARAMS = st.integers(10**6, 10**13)
SHARDS = st.integers(1, 4096)


def deepspeed_stage_2(params: int, num_shards: int) -> int:
    return 2 * params + int(18 * params / num_shards)


def deepspeed_stage_3(params: int, num_shards: int, largest_layer: int) -> int:
    return 4 * largest_layer + int(18 * params / num_shards)


@given(PARAMS, SHARDS)
def test_stage_2_differs_by_fp32_gradients(params, num_shards):
    ours = model_state_bytes(params, stage=2, num_shards=num_shards)
    theirs = deepspeed_stage_2(params, num_shards)
    assert abs(theirs - ours - 4 * params / num_shards) <= 1 + 1e-9 * theirs


@given(PARAMS, SHARDS, st.integers(1, 10**6))
def test_stage_3_differs_by_two_bytes_and_the_largest_layer(params, num_shards, largest):
    ours = model_state_bytes(params, stage=3, num_shards=num_shards)
    theirs = deepspeed_stage_3(params, num_shards, largest)
    assert abs(theirs - ours - 2 * params / num_shards - 4 * largest) <= 1 + 1e-9 * theirs


@pytest.mark.parametrize(
    ("params", "largest", "num_shards", "returned"),
    # What the functions of the package return, in bytes: stage 2, then stage 3.
    [
        (2_851_000_000, 32_000_000, 8, (12_116_750_000, 6_542_750_000)),
        (7_500_000_000, 205_000_000, 64, (17_109_375_000, 2_929_375_000)),
    ],
)
def test_values_of_the_package_itself(params, largest, num_shards, returned):
    assert deepspeed_stage_2(params, num_shards) == returned[0]
    assert deepspeed_stage_3(params, num_shards, largest) == returned[1]
    paper = [model_state_bytes(params, stage=stage, num_shards=num_shards) for stage in (2, 3)]
    assert paper[0] < returned[0]
    assert paper[1] < returned[1]
