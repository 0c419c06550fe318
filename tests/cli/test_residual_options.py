"""ZeRO-R, model parallelism and the host's memory on the command line: refused, trained, asked."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.cli.running import TEXT, enter
from tests.texts import roundings
from zerojax import aot
from zerojax.checkpoint import read_manifest
from zerojax.cli import main
from zerojax.cli.compile import _request as question
from zerojax.cli.compile._request import read_axes
from zerojax.cli.shared import _residual_options as residual_options
from zerojax.cli.shared._optimizers import OPTIMIZERS
from zerojax.cli.shared._residual_options import Residual, find_remat
from zerojax.cli.train._options import Options
from zerojax.models import _gpt_config, gpt
from zerojax.recipe import LAYER_INPUT, OffloadPolicy, RematPolicy

SMALL = gpt.Config(num_layers=2, width=64, num_heads=4, vocab_size=256, context=16, init_scale=0.1)
ODD = dataclasses.replace(SMALL, vocab_size=257)
TRAIN = ["train", "--model", "tiny", "--eval-windows", "8", "--sample-bytes", "0", *TEXT]
COMPILE = ["compile", "--topology", "h100:1x8", "--model", "tiny"]
STEPS = ["--steps", "3", "--batch-size", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, with a small model and CPU devices in the place of chips."""
    folder = enter(tmp_path, monkeypatch)
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        question,
        "topology_mesh",
        lambda name, axes: jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        ),
    )
    monkeypatch.setattr(_gpt_config, "PRESETS", {**gpt.PRESETS, "tiny": SMALL})
    return folder


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ------------------------------------------------------------------ what is refused

BOTH = [
    ("--config C6", "give one of C1, C2, C3, C4, C5"),
    ("--config C4 --stage 3", "--config C4 is stage 2, and --stage 3 another"),
    ("--config C2 --stage 2", "--config C2 is stage 1, and --stage 2 another"),
    ("--config C4 --remat-policy none", "--remat-policy none keeps everything"),
    ("--model-axis 3", "--model-axis 3 does not divide 8 devices; these do: 1, 2, 4, 8"),
    ("--model-axis 8", "do not divide num_heads=4, and each takes whole heads; axes that fit: 1, "),
    ("--model-axis 0", "--model-axis"),
    ("--sequence-parallel", "give --model-axis 2 or more"),
    ("--sequence-parallel --config C4", "give --model-axis 2 or more"),
    ("--sequence-parallel --model-axis 4 --context 18", "18 tokens; give --context 20"),
    ("--remat-policy half", "give one of none, dots, full"),
    ("--offload gradients", "the host can keep optimizer and activations"),
    ("--offload activations --remat-policy none", "leave --no-remat and --remat-policy none out"),
    ("--loss-chunk 0", "--loss-chunk"),
]
COMPILED = [
    ("--config C4 --all-stages", "leave --all-stages out"),
    ("--config C4 --no-remat", "--remat-policy none keeps everything"),
    ("--no-remat --remat-policy dots", "contradict each other"),
    ("--no-remat --offload activations", "leave --no-remat and --remat-policy none out"),
    ("--mesh data=4,model=2 --model-axis 4", "name different sizes of the model axis"),
    ("--mesh data=8 --model-axis 2", "has 16 devices, and the topology h100:1x8 has 8"),
    ("--mesh model=4", "has 4 devices"),
    ("--mesh model=8", "do not divide num_heads=4"),
    ("--mesh data=4,expert=2", "not cut over an axis 'expert'"),
]
PLANNED = [
    ("--config C4 --stage 3", "--config C4 is stage 2, and --stage 3 another"),
    ("--config C6", "give one of C1, C2, C3, C4, C5"),
    ("--config C4 --no-remat", "--remat-policy none keeps everything"),
    ("--config C4 --search", "--search goes through all of them"),
    ("--config C4 --plot a.png", "--plot draws all of them"),
]
REFUSALS = [
    *((TRAIN, asked, said) for asked, said in (*BOTH, ("--model-axis 4 --batch-size 3", "groups"))),
    *((COMPILE, asked, said) for asked, said in (*BOTH, *COMPILED)),
    *((["plan", "--model", "tiny"], asked, said) for asked, said in PLANNED),
]


@pytest.mark.parametrize(("command", "asked", "said"), REFUSALS)
def test_what_cannot_be_done_is_refused_in_one_line(folder, capfd, command, asked, said):
    assert main([*command, *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("zerojax: ")
    assert not out
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", [TRAIN, COMPILE], ids=["train", "compile"])
@pytest.mark.parametrize("asked", ["--offload optimizer", "--config C5"])
def test_a_backend_without_memory_of_the_hosts_is_refused(monkeypatch, capfd, command, asked):
    monkeypatch.setattr(residual_options, "has_host_memory", lambda device: False)
    assert main([*command, *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert f"{asked} keeps" in err
    assert "in the host's memory (pinned_host), and the backend 'cpu' (cpu) has none" in err
    assert err.count("\n") == 1
    assert not out


# ------------------------------------------------------------------ what is asked for


def test_configurations_set_the_stage_and_the_checkpoints():
    assert [Residual(config=f"C{n}").stage(None) for n in range(1, 6)] == [1, 1, 2, 2, 2]
    assert Residual().stage(None) == 2
    assert Residual().stage(0) == 0
    assert Residual(config="C1").stage(1) == 1
    for name in ("C1", "C3"):  # the model recomputes by itself
        assert Residual(config=name).remat() is None
        assert Residual(config=name).model_axes == {}
    for name in ("C2", "C4"):
        assert Residual(config=name).remat() == RematPolicy(partition="model")
    host = RematPolicy(partition="model", offload=(LAYER_INPUT,))
    assert Residual(config="C5").remat() == host
    assert Residual(config="C5").axes(8) == {"data": 8, "model": 1}


def test_recomputation_goes_with_a_configuration():
    dots = Residual(config="C4", remat_policy="dots").remat()
    assert dots == RematPolicy(recompute="dots", partition="model")
    assert Residual(remat_policy="full").remat() is None
    none = Residual(remat_policy="none")
    assert none.remat() is None
    assert not none.model(SMALL).remat
    assert [find_remat(keeps, None) for keeps in (None, True, False)] == [None, None, "none"]


def test_a_residual_stream_cut_along_tokens_takes_the_place_of_pa():
    asked = Residual(config="C5", model_axis=2, sequence_parallel=True)
    assert asked.remat() == RematPolicy(offload=(LAYER_INPUT,))
    assert asked.model(SMALL).sequence_parallel


@pytest.mark.parametrize(("parts", "rows"), [(1, 257), (2, 384), (4, 384)])
def test_a_vocabulary_that_the_axis_does_not_divide_is_filled_up(parts, rows):
    assert Residual(model_axis=parts).model(ODD).vocab_rows == rows
    assert Residual(model_axis=parts).model(SMALL).vocab_rows == 256


def test_an_axis_that_divides_no_power_of_two_fills_up_to_a_multiple_of_itself():
    config = dataclasses.replace(ODD, width=66, num_heads=6)
    assert Residual(model_axis=6).model(config).vocab_rows == 258


def test_the_host_runs_optimizers_that_work_element_by_element():
    devices = jax.devices()
    both = Residual(offload=("activations", "optimizer"))
    kinds = ("activation", "optimizer", "master")
    assert both.offloads(OPTIMIZERS["adamw"], devices) == OffloadPolicy(kinds=kinds)
    muon = both.offloads(OPTIMIZERS["muon"], devices)
    assert muon == OffloadPolicy(kinds=kinds, update="device")
    assert Residual(config="C5").offloads(OPTIMIZERS["adamw"], devices) is None


def test_the_mesh_may_name_the_model_axis():
    topology = aot.parse_topology("h100:1x8")
    axis = Residual(model_axis=2)
    for given, asked in ((None, axis), ("data=4", axis), ("data=4,model=2", Residual())):
        assert list(read_axes(given, topology, asked).items()) == [("data", 4), ("model", 2)]
    assert read_axes("model=8", topology) == {"data": 1, "model": 8}
    assert read_axes("node=2,data=4", topology, Residual(config="C4"))["model"] == 1


# ------------------------------------------------------------------ what is planned and compiled


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("C1 --model-axis 2", "stage 1, {}, 8 x h100, N = 4, model axis 2\n"),
        ("C4 --model-axis 2", "stage 2, {}, 8 x h100, N = 4, model axis 2, checkpoints part"),
        ("C5", "stage 2, {}, 8 x h100, N = 8, activations on the host\n"),
    ],
)
def test_a_plan_takes_the_configuration(monkeypatch, capsys, asked, shown):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--model", "tiny", "--devices", "8", "--config", *asked.split()]) == 0
    out = capsys.readouterr().out
    assert f"configuration {asked[:2]}\n" in out
    assert shown.format(f"{gpt.num_params(SMALL):,} parameters") in out


def test_a_configuration_is_compiled_and_audited(folder, capsys):
    asked = ["--config", "C4", "--mesh", "data=4,model=2", "--offload", "optimizer"]
    assert main([*COMPILE, *asked, "--json", "step.json"]) == 0
    out = capsys.readouterr().out
    assert "data=4, model=2; C4: stage 2, activation checkpoints cut over the model axis" in out
    assert "clean: ZeRO stage 2 over data (N = 4)" in out
    held = json.loads((folder / "step.json").read_text())
    assert held["mesh"] == {"data": 4, "model": 2}
    assert (held["config"], held["model_axis"], held["offload"]) == ("C4", 2, ["optimizer"])
    # Two moments and masters, cut over all devices; the little that is small stays on the device.
    host = held["stages"][0]["report"]["memory"]["host"]
    assert host == pytest.approx(12 * held["num_params"] / 8, rel=0.05)


# ------------------------------------------------------------------ what is trained


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Give the losses of stage 2 on two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_gpt_config, "PRESETS", {"tiny": SMALL})
        run = enter(tmp_path_factory.mktemp("plain"), patch)
        assert main([*TRAIN, *STEPS, "--devices", "2", "--stage", "2", "--out", str(run)]) == 0
        return losses(run)


PA = "stage 2, activation checkpoints cut over the model axis (Pa)"
CUT = "stage 2, tokens cut over the model axis, on the host: activations, 64 logits"


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("--config C4 --model-axis 2 --devices 4 --sample-bytes 4", f"model=2); C4: {PA}"),
        (
            "--config C5 --model-axis 4 --sequence-parallel --loss-chunk 64",
            f"(data=2, model=4); C5: {CUT} of a token at a time",
        ),
        ("--config C2 --devices 2 --offload optimizer", "(Pa), on the host: optimizer"),
        ("--stage 3 --model-axis 2 --devices 4 --remat-policy none", "recomputed: nothing"),
    ],
    ids=["C4", "C5", "C2", "stage 3"],
)
def test_the_losses_are_those_of_stage_2_alone(folder, capsys, plain, asked, shown):
    assert main([*TRAIN, *STEPS, *asked.split(), "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert ("in the host's memory" in out) == ("--offload" in asked)
    bound = roundings(3, 8 * 16)  # steps; rows and tokens of a batch
    np.testing.assert_allclose(losses(folder / "run"), plain, rtol=bound)


def test_a_run_goes_on_as_it_was_configured(folder, capsys):
    given = [*TRAIN, "--batch-size", "8", "--out", "run", "--save-every", "2"]
    asked = "--config C4 --model-axis 2 --devices 4 --offload optimizer"
    assert main([*given, "--steps", "2", *asked.split()]) == 0
    kept = read_manifest(folder / "run/checkpoints/2").metadata["options"]
    assert {name: kept[name] for name in ("config", "stage", "model_axis", "offload")} == {
        "config": "C4", "stage": 2, "model_axis": 2, "offload": ["optimizer"],
    }  # fmt: skip
    capsys.readouterr()
    assert main([*TRAIN, "--out", "run", "--resume", "--steps", "3", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "(data=4, model=2); C4: stage 2" in out
    assert "in the host's memory" in out


def options(**changes):
    """Give options that ask for nothing, but for some."""
    asked: dict[str, Any] = {field.name: None for field in dataclasses.fields(Options)}
    return Options(**asked | {"data": (), "offload": (), "sequence_parallel": False} | changes)


def test_a_checkpoint_from_before_these_options_is_taken_up():
    taken = options().taking_up({"model": "tiny", "stage": 1, "data": ["a.txt"]}, frozenset())
    assert (taken.model, taken.stage, taken.data) == ("tiny", 1, ("a.txt",))
    assert taken.residual == Residual()


@pytest.mark.parametrize(
    ("asked", "config", "stage"),
    [
        ({}, "C4", 2),
        ({"config": "C1"}, "C1", 1),
        ({"stage": 2}, "C4", 2),
        ({"stage": 3}, None, 3),
    ],
)
def test_what_is_given_takes_the_place_of_what_was_kept(asked, config, stage):
    kept = {"config": "C4", "stage": 2}
    taken = options(**asked).taking_up(kept, frozenset(asked))
    assert taken.config == config
    assert taken.residual.stage(taken.stage) == stage
