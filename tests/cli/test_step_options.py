"""ZeRO-R, model parallelism and the host's memory on the command line: refused, trained, asked."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.cli.running import TEXT, enter
from tests.texts import roundings
from zerojax.checkpoint import read_manifest
from zerojax.cli import _compile, main
from zerojax.cli.shared._options import BuiltStepOptions as options
from zerojax.cli.train._options import TrainOptions
from zerojax.memory import _remat
from zerojax.models import gpt
from zerojax.recipe import LAYER_INPUT, RematPolicy

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
        _compile,
        "topology_mesh",
        lambda name, axes: jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        ),
    )
    monkeypatch.setattr(gpt, "PRESETS", {**gpt.PRESETS, "tiny": SMALL})
    return folder


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ------------------------------------------------------------------ what is refused

BOTH = [
    ("--partition-activations", "give --model-axis of at least 2"),
    ("--partition-activations --model-axis 2 --remat none", "give 'full' or 'dots'"),
    ("--model-axis 3", "--model-axis 3 does not divide 8 devices; these do: 1, 2, 4, 8"),
    ("--model-axis 8", "do not divide num_heads=4, and each takes whole heads; axes that fit: 1, "),
    ("--model-axis 0", "--model-axis"),
    ("--remat half", "'none', 'dots', 'full'"),
    ("--offload gradients", "the host can keep optimizer and activations"),
    ("--offload activations --remat none", "give 'full' or 'dots'"),
]
COMPILED = [("--stage 2 --all-stages", "leave one of them out")]
BOTH += [("--keep-gathered", "keeps what stage 3 gathers: give --stage 3")]
REFUSALS = [
    *((TRAIN, asked, said) for asked, said in (*BOTH, ("--model-axis 4 --batch-size 3", "groups"))),
    *((COMPILE, asked, said) for asked, said in (*BOTH, *COMPILED)),
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
@pytest.mark.parametrize("asked", ["--offload optimizer", "--offload activations"])
def test_a_backend_without_memory_of_the_hosts_is_refused(monkeypatch, capfd, command, asked):
    monkeypatch.setattr(_remat, "memory_kinds", lambda device: ("device",))
    assert main([*command, *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert "'pinned_host' memory, and the backend 'cpu' of this mesh (cpu) has none" in err
    assert err.count("\n") == 1
    assert not out


# ------------------------------------------------------------------ what is asked for


def remat(**asked):
    return options(**asked).recipe().remat


def test_checkpoints_are_cut_and_leave_for_the_host():
    assert remat() is None  # the model recomputes by itself
    assert remat(remat="none") == RematPolicy(recompute="none")
    cut = {"partition_activations": True, "model_axis": 2}
    assert remat(**cut) == RematPolicy(partition="model")
    assert remat(**cut, remat="dots") == RematPolicy(recompute="dots", partition="model")
    host = RematPolicy(partition="model", offload=(LAYER_INPUT,))
    assert remat(**cut, offload=("activations",)) == host


def test_devices_are_shared_between_data_and_model():
    assert options().mesh_axes(8) == {"data": 8}
    assert options(model_axis=2).mesh_axes(8) == {"data": 4, "model": 2}


@pytest.mark.parametrize(("parts", "rows"), [(1, 257), (2, 384), (4, 384), (6, 258)])
def test_a_vocabulary_that_the_axis_does_not_divide_is_filled_up(monkeypatch, parts, rows):
    odd = ODD if parts != 6 else dataclasses.replace(ODD, width=66, num_heads=6)
    monkeypatch.setattr(gpt, "PRESETS", {"odd": odd, "tiny": SMALL})
    assert options(model="odd", model_axis=parts).chosen_model.vocab_rows == rows
    if parts != 6:
        assert options(model="tiny", model_axis=parts).chosen_model.vocab_rows == 256


def test_the_host_runs_optimizers_that_work_element_by_element():
    def offload(**asked):
        return options(**asked).recipe().offload

    both = ("activations", "optimizer")
    assert offload(offload=both) is True
    with pytest.raises(ValueError, match=r"element by element, and muon does not.*leave"):
        options(offload=both, optimizer="muon")
    assert offload(offload=("activations",)) is False


# ------------------------------------------------------------------ what is planned and compiled


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (
            "--model-axis 2 --partition-activations",
            "stage 2, {}, 8 x h100, N = 4, model axis 2, remat='full', checkpoints part",
        ),
        (
            "--offload activations",
            "stage 2, {}, 8 x h100, N = 8, remat='full', activations on the host; peak",
        ),
    ],
)
def test_a_plan_says_where_checkpoints_are(monkeypatch, capsys, asked, shown):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", "--model", "tiny", "--stage", "2", *asked.split()]) == 0
    out = capsys.readouterr().out
    assert shown.format(f"{gpt.num_params(SMALL):,} parameters") in out


def test_cut_checkpoints_are_compiled_and_audited(capsys):
    asked = ["--partition-activations", "--model-axis", "2", "--offload", "optimizer"]
    assert main([*COMPILE, *asked]) == 0
    out = capsys.readouterr().out
    assert "data=4, model=2; offload optimizer, checkpoints partitioned\n" in out
    assert "clean: ZeRO stage 2 over data (N = 4)" in out
    assert "host" in out


# ------------------------------------------------------------------ what is trained


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Give the losses of stage 2 on two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt, "PRESETS", {"tiny": SMALL})
        run = enter(tmp_path_factory.mktemp("plain"), patch)
        assert main([*TRAIN, *STEPS, "--devices", "2", "--stage", "2", "--out", str(run)]) == 0
        return losses(run)


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        (
            "--partition-activations --model-axis 2 --devices 4",
            "model=2); checkpoints partitioned\n",
        ),
        (
            "--partition-activations --model-axis 4 --offload activations",
            "(data=2, model=4); offload activations, checkpoints partitioned\n",
        ),
        ("--stage 1 --devices 2 --offload optimizer", "; offload optimizer\n"),
        ("--stage 3 --model-axis 2 --devices 4 --remat none", "; remat none\n"),
        ("--stage 3 --keep-gathered", "stage 3"),
    ],
    ids=["C4", "C5", "stage 1", "stage 3", "stage 3 kept"],
)
def test_the_losses_are_those_of_stage_2_alone(folder, capsys, plain, asked, shown):
    assert main([*TRAIN, *STEPS, *asked.split(), "--out", "run"]) == 0
    out = capsys.readouterr().out
    assert shown in out
    assert ("on the host" in out) == ("--offload optimizer" in asked)
    bound = roundings(3, 8 * 16)  # steps; rows and tokens of a batch
    np.testing.assert_allclose(losses(folder / "run"), plain, rtol=bound)


def test_a_run_goes_on_as_it_was_configured(folder, capsys):
    given = [*TRAIN, "--batch-size", "8", "--out", "run", "--save-every", "2"]
    asked = "--partition-activations --model-axis 2 --devices 4 --offload optimizer"
    assert main([*given, "--steps", "2", *asked.split()]) == 0
    kept = read_manifest(folder / "run/checkpoints/2").metadata["options"]
    assert (kept["stage"], kept["model_axis"], kept["offload"]) == (2, 2, ["optimizer"])
    capsys.readouterr()
    assert main([*TRAIN, "--out", "run", "--resume", "--steps", "3", "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "(data=4, model=2); offload optimizer, checkpoints partitioned" in out
    assert "on the host" in out


def test_what_is_given_takes_the_place_of_what_was_kept():
    kept = {"stage": 1, "data": ["a.txt"], "gone": 3}
    taken = TrainOptions(resume=True).taking_up(kept)
    assert (taken.stage, taken.data, taken.model_axis) == (1, ("a.txt",), 1)
    assert TrainOptions(stage=3, given=frozenset({"stage"})).taking_up(kept).stage == 3
    other = TrainOptions(optimizer="muon", given=frozenset({"optimizer"}))
    with pytest.raises(ValueError, match="has states of adamw; leave it out, or start a run"):
        other.taking_up(kept | {"optimizer": "adamw"})
