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
from zerojax.checkpoint import read_manifest
from zerojax.cli import main
from zerojax.cli.compile import _request as request
from zerojax.cli.shared._options import BuiltStepOptions as options
from zerojax.cli.train._options import TrainOptions
from zerojax.memory import _host
from zerojax.models import _gpt_config, gpt
from zerojax.recipe import LAYER_INPUT, OffloadPolicy, RematPolicy

SMALL = gpt.Config(num_layers=2, width=64, num_heads=4, vocab_size=256, context=16, init_scale=0.1)
ODD = dataclasses.replace(SMALL, vocab_size=257)
TRAIN = ["train", "--model", "tiny", "--eval-windows", "8", *TEXT]
COMPILE = ["compile", "--topology", "h100:1x8", "--model", "tiny"]
STEPS = ["--steps", "3", "--batch-size", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, with a small model and CPU devices in the place of chips."""
    folder = enter(tmp_path, monkeypatch)
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        request,
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
    ("--config C6", "'C1', 'C2', 'C3', 'C4', 'C5'"),
    ("--config C4 --stage 3", "--config C4 is stage 2, and --stage 3 another"),
    ("--config C2 --stage 2", "--config C2 is stage 1, and --stage 2 another"),
    ("--config C4 --model-axis 2 --remat none", "give 'full' or 'dots'"),
    ("--model-axis 3", "--model-axis 3 does not divide 8 devices; these do: 1, 2, 4, 8"),
    ("--model-axis 8", "do not divide num_heads=4, and each takes whole heads; axes that fit: 1, "),
    ("--model-axis 0", "--model-axis"),
    ("--remat half", "'none', 'dots', 'full'"),
    ("--offload gradients", "the host can keep optimizer and activations"),
    ("--offload activations --remat none", "give 'full' or 'dots'"),
]
COMPILED = [
    ("--config C4 --all-stages", "leave them out, or --all-stages"),
    ("--stage 2 --all-stages", "leave them out, or --all-stages"),
]
PLANNED = [
    ("--config C4 --search", "leave --config out"),
    ("--config C4 --plot a.png", "--plot draws all stages"),
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
    monkeypatch.setattr(_host, "has_host_memory", lambda device: False)
    assert main([*command, *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert "'pinned_host' memory, and the backend 'cpu' of this mesh (cpu) has none" in err
    assert err.count("\n") == 1
    assert not out


# ------------------------------------------------------------------ what is asked for


def remat(**asked):
    return options(**asked).recipe().remat


def test_configurations_set_the_stage_and_the_checkpoints():
    assert [options(config=f"C{n}").chosen_stage for n in range(1, 6)] == [1, 1, 2, 2, 2]
    assert options().chosen_stage == 2
    assert options(stage=0).chosen_stage == 0
    assert options(config="C1", stage=1).chosen_stage == 1
    for name in ("C1", "C3"):
        assert remat(config=name, model_axis=2) == RematPolicy()
    for name in ("C2", "C4"):
        assert remat(config=name, model_axis=2) == RematPolicy(partition="model")
        assert remat(config=name) == RematPolicy()  # over a single device nothing is cut
    host = RematPolicy(partition="model", offload=(LAYER_INPUT,))
    assert remat(config="C5", model_axis=2) == host
    assert options(config="C5").mesh_axes(8) == {"data": 8}
    assert options(model_axis=2).mesh_axes(8) == {"data": 4, "model": 2}


def test_recomputation_goes_with_a_configuration():
    dots = RematPolicy(recompute="dots", partition="model")
    assert remat(config="C4", model_axis=2, remat="dots") == dots
    assert remat() is None  # the model recomputes by itself
    assert remat(remat="none") == RematPolicy(recompute="none")


@pytest.mark.parametrize(("parts", "rows"), [(1, 257), (2, 384), (4, 384), (6, 258)])
def test_a_vocabulary_that_the_axis_does_not_divide_is_filled_up(monkeypatch, parts, rows):
    odd = ODD if parts != 6 else dataclasses.replace(ODD, width=66, num_heads=6)
    monkeypatch.setattr(_gpt_config, "PRESETS", {"odd": odd, "tiny": SMALL})
    assert options(model="odd", model_axis=parts).chosen_model.vocab_rows == rows
    if parts != 6:
        assert options(model="tiny", model_axis=parts).chosen_model.vocab_rows == 256


def test_the_host_runs_optimizers_that_work_element_by_element():
    def offload(**asked):
        return options(**asked).recipe().offload

    both = ("activations", "optimizer")
    kinds: Any = ("optimizer", "master", "activation")
    assert offload(offload=both) == OffloadPolicy(kinds=kinds)
    with pytest.raises(ValueError, match=r"element by element, and muon does not.*leave"):
        options(offload=both, optimizer="muon")
    assert offload(config="C5") is None


# ------------------------------------------------------------------ what is planned and compiled


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("C1 --model-axis 2", "stage 1, {}, 8 x h100, N = 4, model axis 2, remat='full'; peak"),
        (
            "C4 --model-axis 2",
            "stage 2, {}, 8 x h100, N = 4, model axis 2, remat='full', checkpoints part",
        ),
        ("C5", "stage 2, {}, 8 x h100, N = 8, remat='full', activations on the host; peak"),
    ],
)
def test_a_plan_takes_the_configuration(monkeypatch, capsys, asked, shown):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--model", "tiny", "--devices", "8", "--config", *asked.split()]) == 0
    out = capsys.readouterr().out
    assert f"configuration {asked[:2]}\n" in out
    assert shown.format(f"{gpt.num_params(SMALL):,} parameters") in out


def test_a_configuration_is_compiled_and_audited(folder, capsys):
    asked = ["--config", "C4", "--model-axis", "2", "--offload", "optimizer"]
    assert main([*COMPILE, *asked, "--json", "step.json"]) == 0
    out = capsys.readouterr().out
    assert "data=4, model=2; config C4, offload optimizer\n" in out
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


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("--config C4 --model-axis 2 --devices 4", "model=2); config C4\n"),
        ("--config C5 --model-axis 4", "(data=2, model=4); config C5\n"),
        ("--config C2 --devices 2 --offload optimizer", "; config C2, offload optimizer\n"),
        ("--stage 3 --model-axis 2 --devices 4 --remat none", "; remat none\n"),
    ],
    ids=["C4", "C5", "C2", "stage 3"],
)
def test_the_losses_are_those_of_stage_2_alone(folder, capsys, plain, asked, shown):
    assert main([*TRAIN, *STEPS, *asked.split(), "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert ("on the host" in out) == ("--offload" in asked)
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
    assert "(data=4, model=2); config C4, offload optimizer" in out
    assert "on the host" in out


def test_a_checkpoint_from_before_these_options_is_taken_up():
    taken = TrainOptions(resume=True).taking_up({"stage": 1, "data": ["a.txt"]})
    assert (taken.stage, taken.data, taken.config) == (1, ("a.txt",), None)


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
    taken = TrainOptions(**asked, given=frozenset(asked)).taking_up(kept)
    assert taken.config == config
    assert taken.chosen_stage == stage
