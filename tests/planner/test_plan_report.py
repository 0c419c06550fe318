"""What a plan says: a table in words, and every figure as JSON."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from tests.planner.plans import PA_CPU, plan_mix
from zerojax.hardware import find_hardware


def test_it_says_what_is_planned_and_what_that_rests_on():
    found = plan_mix(
        64, num_devices=32, num_shards=8, model_axis=2, accumulate=2,
        remat=PA_CPU, offload=True,
    )  # fmt: skip
    text = " ".join(str(found).split())
    for part in (
        "ZeRO stage 2", f"{found.num_params:,} parameters", "32 x h100",
        "N = 8 in each of 2 groups", "model axis 2", "2 microbatches", "checkpoints partitioned",
        "activations and optimizer on the host", "kB", "MiB", "latency is left out",
        "model parallelism cuts", "the update waits", "remat='full'",
        "along model", "examples in a device's microbatch: 2",
    ):  # fmt: skip
        assert part in text, part
    assert "not known" not in text


def test_it_says_that_what_model_parallelism_moves_is_not_known():
    found = plan_mix(model_axis=2, loss_fn=lambda params, x: jnp.mean(x @ params["head"]))
    text = " ".join(str(found).split())
    assert "what model parallelism moves is not known" in text
    assert "model parallelism" not in str(plan_mix())


def test_it_says_whether_it_fits():
    tiny = dataclasses.replace(find_hardware("h100"), memory=10**6)
    assert plan_mix().fits
    found = plan_mix(hardware=tiny)
    assert not found.fits
    assert "does not fit: peak" in " ".join(str(found).split())


def test_the_hosts_memory_is_counted_as_the_devices_is():
    tiny = dataclasses.replace(find_hardware("h100"), host_memory=10**4)
    found = plan_mix(hardware=tiny, offload=True)
    assert found.bytes.host > 10**4
    assert not found.fits
    assert "does not fit the host: peak" in " ".join(str(found).split())
    assert plan_mix(hardware=tiny).fits, "nothing is offloaded"
