"""The winners of a search, compiled for hardware that is not here."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.planner import plans
from tests.planner.plans import TRACED, first_word
from zerojax.aot import DoesNotFit, Shortage, parse_topology, verify_plans
from zerojax.aot import _verify as aot_verify
from zerojax.aot._verify import topology_name
from zerojax.models import gpt
from zerojax.planner import HARDWARE, Space


@pytest.mark.parametrize("name", [name for name in HARDWARE if name != "v100"])
@pytest.mark.parametrize("num_devices", [8, 64, 1024])
def test_the_name_of_a_topology_is_one_of_so_many_devices(name, num_devices):
    topology = parse_topology(topology_name(HARDWARE[name], num_devices))
    assert topology.num_devices == num_devices


@pytest.mark.parametrize(
    ("hardware", "num_devices", "words"),
    [
        (HARDWARE["v100"], 16, ["v100", "can't be compiled for", "h100"]),
        (dataclasses.replace(HARDWARE["h100"], name="mine"), 8, ["mine", "can't be compiled"]),
        (HARDWARE["h100"], 12, ["12 x h100", "no whole nodes, slices or chips"]),
        (HARDWARE["v5e"], 384, ["384 x v5e", "no whole nodes, slices or chips"]),
        (HARDWARE["v7"], 1, ["1 x v7", "no whole nodes, slices or chips"]),
    ],
    ids=first_word,
)
def test_a_topology_without_a_name_is_refused_in_one_line(hardware, num_devices, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        topology_name(hardware, num_devices)
    assert len(str(caught.value).splitlines()) == 1
    for word in words:
        assert word in str(caught.value)


def test_it_asks_for_a_loss_and_for_hardware_that_can_be_compiled_for():
    with pytest.raises(ValueError, match=r"workload=Workload\(loss_fn="):
        verify_plans(plans.find(params=10**6))
    with pytest.raises(ValueError, match="v100 can't be compiled for"):
        verify_plans(plans.find(**TRACED, hardware="v100"))


def test_what_is_no_choices_is_refused():
    with pytest.raises(TypeError, match="a Choices is expected, got dict"):
        verify_plans({})  # pyright: ignore[reportArgumentType]


def test_scalars_of_a_batch_are_not_cut(monkeypatch, mesh8):
    def loss(params, batch):
        x, scale, key = batch
        noise = jax.random.normal(key, x.shape[-1:], x.dtype)
        return jnp.mean((x * scale + noise) @ params["w"])

    shapes = (jnp.ones((16, 64)), jnp.float32(2.0), jax.random.key(0))
    choices = zerojax.search_plans(
        {"w": jnp.ones((64, 64))},
        optax.sgd(1e-2),
        num_devices=8,
        hardware="h100",
        workload=zerojax.Workload(loss_fn=loss, batch=shapes),
        space=Space(stages=(2,), model_axes=(1,), offloads=(None,)),
    )
    devices = mesh8.devices.ravel()
    monkeypatch.setattr(
        aot_verify,
        "topology_mesh",
        lambda _, axes: jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices),
    )
    monkeypatch.setattr(aot_verify, "compile_step", lambda lowered: lowered.compile())
    verified = verify_plans(choices, count=1).verified
    assert verified[0].note.startswith("clean")


@pytest.mark.parametrize("wanted", [3, 1])
def test_winners_are_compiled_and_what_can_t_be_is_said(monkeypatch, mesh8, wanted):
    """The compiler is replaced by the CPU's lowering: what is compiled is what was chosen."""
    asked, refused = [], []

    def mesh(name, axes):
        asked.append((name, axes))
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=mesh8.devices.ravel())

    def compile_step(lowered):
        refused.append(lowered)
        if len(refused) == 1:
            raise DoesNotFit(Shortage(needed=10**12, available=10**9, message="too large"))
        return len(refused)

    class Report:
        verdict = "as planned"

        class memory:
            peak = 12345

    monkeypatch.setattr(aot_verify, "topology_mesh", mesh)
    monkeypatch.setattr(aot_verify, "compile_step", compile_step)
    monkeypatch.setattr(aot_verify, "audit", lambda *_, **__: Report)
    # On links and a host like these the fastest are model-parallel, their states on the host.
    quick = dataclasses.replace(HARDWARE["h100"], host_bandwidth=1e15, link_bandwidth=1e15)
    space = Space(model_axes=(1, 2), remats=("full", "none"))
    found = plans.find(**TRACED, num_devices=8, space=space, hardware=quick)
    assert found.verified == {}
    choices = verify_plans(found, count=wanted)
    assert choices[0].model_axis == 2
    assert choices[0].offload
    compiled = [number for number, one in choices.verified.items() if one.peak is not None]
    assert len(compiled) == wanted
    assert choices.verified[compiled[0]].peak == 10**12
    assert [choices.verified[n].peak for n in compiled[1:]] == [12345] * (len(compiled) - 1)
    assert asked == [("h100:1x8", {"data": 8})] * len(compiled)
    for number, one in choices.verified.items():
        cut = choices[number].model_axis > 1
        assert (one.peak is None) == cut
        assert (one.note == "not compiled: the loss would have to be model-parallel") == cut
    assert set(choices.verified) == set(range(max(compiled) + 1))
    text = " ".join(str(choices).split())
    assert f"choice {compiled[0] + 1}: 1,000.000 GB (1,000,000,000,000 B) compiled" in text
    if compiled[0]:
        assert f"choice 1: {choices.verified[0].note}" in text
    assert json.loads(choices.to_json())["verified"][str(compiled[0])]["peak"] == 10**12


@pytest.mark.aot("cuda")
def test_a_gpu_that_is_not_here_takes_what_was_planned():
    config = gpt.Config(num_layers=2, width=256, num_heads=4, vocab_size=16384, context=256)
    choices = zerojax.search_plans(
        jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0)), optax.adamw(1e-3),
        num_devices=8, hardware="h100", recipe=zerojax.Recipe(precision="bf16"),
        workload=zerojax.Workload(
            loss_fn=functools.partial(gpt.loss, config),
            batch=jax.ShapeDtypeStruct((64, config.context + 1), jnp.int32),
        ),
        space=Space(stages=(2, 3), model_axes=(1,), offloads=(None,), remats=("full",)),
    )  # fmt: skip
    choices = verify_plans(choices, count=2)
    for number, one in choices.verified.items():
        assert one.peak == pytest.approx(choices[number].bytes.total, rel=0.1)
        assert one.note.startswith("clean")
    assert len(choices.verified) == 2
