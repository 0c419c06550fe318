"""How long a planned step takes at the least, and what it waits for."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planner.plans import plan_mix
from zerojax.hardware import find_hardware
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
@pytest.mark.parametrize("hardware", ["h100", "v5e", "v5p"])
def test_links_run_beside_work_as_far_as_was_seen(hardware, options, kind):
    time = plan_mix(hardware=hardware, **options).time
    name = "sparse_cores" if hardware == "v5p" else find_hardware(hardware).platform
    overlap = OVERLAP[name][kind]
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
        "memory": {"hbm_bandwidth": 1e6},
        "fast links": {"link_bandwidth": 1e3},
        "slow links": {"slow_bandwidth": 1e3},
        "host link": {"host_bandwidth": 1e3},
    }
    for name, figures in changed.items():
        found = plan_mix(num_devices=16, offload=True, hardware=dataclasses.replace(one, **figures))
        assert found.time.bound_by == name
        assert f"bound by {name}" in str(found)
