"""How long a planned step takes at the least, and what it waits for."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.planner.plans import (
    EVERYTHING,
    HOSTED,
    plan_mix,
)
from zerojax.planner import find_hardware


def test_what_overlaps_is_assumed_and_said():
    one = find_hardware("h100")
    found = {
        share: plan_mix(hardware=dataclasses.replace(one, overlap=share)) for share in (0, 0.25, 1)
    }
    time = found[0].time
    assert time.step == pytest.approx(time.busy + time.fast + time.slow)
    assert found[1].time.step == max(time.busy, time.fast, time.slow)
    between = 0.75 * found[0].step_time + 0.25 * found[1].step_time
    assert found[0.25].step_time == pytest.approx(between)
    assert any("25% of what can" in line for line in found[0.25].assumptions)
    assert max(time.compute, time.memory) <= time.busy <= time.compute + time.memory


def test_a_step_is_bound_by_what_takes_longest():
    one = find_hardware("h100")
    changed = {
        "compute": {"flops": 1e9, "flops_fp32": 1e9},
        "memory bandwidth": {"hbm_bandwidth": 1e6},
        "fast links": {"link_bandwidth": 1e3},
        "slow links": {"slow_bandwidth": 1e3},
        "host link": {"host_bandwidth": 1e3},
    }
    for name, figures in changed.items():
        found = plan_mix(
            num_devices=16, offload=HOSTED, hardware=dataclasses.replace(one, **figures)
        )
        assert found.bound_by == name
        assert f"bound by {name}" in str(found)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stage": 3},
        {"accumulate": 2},
        {"offload": HOSTED},
        {"num_devices": 16},
        {"model_axis": 2, "offload": HOSTED, "flops": 5e12},
        {"model_axis": 2, "offload": EVERYTHING, "remat": "full", "flops": 5e12},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_it_is_compute_bound_from_where_it_says(options):
    """Planned again at that batch, products take longest, and one example less they do not."""
    options = dict(options)
    fed = dataclasses.replace(find_hardware("h100"), hbm_bandwidth=1e15, host_bandwidth=1e10)
    flops = options.pop("flops", fed.flops)
    options["hardware"] = dataclasses.replace(fed, flops=flops, flops_fp32=flops)
    devices = options.get("num_devices", 8) // options.get("model_axis", 1)
    parts = devices * options.get("accumulate", 1)
    found = plan_mix(parts, **options)
    at = math.ceil(found.compute_bound_at)
    assert at >= 2, "this test would show nothing"
    there, below = (plan_mix(count * parts, **options) for count in (at, at - 1))
    assert there.bound_by == "compute"
    assert below.bound_by != "compute"
    assert there.compute_bound_at == pytest.approx(found.compute_bound_at)


def test_operations_that_wait_for_memory_never_become_compute_bound():
    slow = dataclasses.replace(find_hardware("h100"), hbm_bandwidth=1e6)
    found = plan_mix(hardware=slow)
    assert math.isinf(found.compute_bound_at)
    assert "no batch makes it compute-bound" in str(found)
    assert found.to_dict()["compute_bound_at"] is None
