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
from zerojax.planner._time import OVERLAP


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"stage": 0}, "nothing"),
        ({"stage": 2}, "optimizer"),
        ({"stage": 3}, "ahead"),
        ({"stage": 3, "prefetch": 0}, "parameter"),
    ],
    ids=str,
)
@pytest.mark.parametrize("hardware", ["h100", "v5p"])
def test_links_run_beside_work_as_far_as_was_seen(hardware, options, kind):
    if hardware == "v5p" and kind == "ahead":
        options = options | {"prefetch": 1}
    time = plan_mix(hardware=hardware, **options).time
    overlap = OVERLAP[find_hardware(hardware).platform][kind]
    links = max(time.fast, time.slow)
    least, most = sorted([overlap["gathers"], overlap["reductions"]])
    hidden = [min(share * links, overlap["work"] * time.busy) for share in (least, most)]
    assert hidden[0] * (1 - 1e-9) <= links - time.exposed <= hidden[1] * (1 + 1e-9)
    assert time.step == time.busy + time.exposed


def test_a_cpu_hides_nothing():
    slow = dataclasses.replace(find_hardware("h100"), platform="cpu")
    for stage in range(4):
        time = plan_mix(hardware=slow, stage=stage).time
        assert time.exposed == max(time.fast, time.slow)
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
