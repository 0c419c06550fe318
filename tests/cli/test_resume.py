"""A run that was stopped goes on as if it had not been, from the newest whole checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess

import pytest

from tests.cli.running import COMMAND, QUICK, TEXT
from tests.texts import roundings
from zerojax.checkpoint import find_checkpoints, read_manifest
from zerojax.checkpoint._manifest import write_manifest
from zerojax.cli import main
from zerojax.cli.train._screen import TrainScreen

SMALL = ["--context", "16", *TEXT, *QUICK]


def columns(run, *names):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: tuple(map(line.get, names)) for line in lines if "loss" in line}


def losses(run):
    return {step: loss for step, (loss,) in columns(run, "loss").items()}


def test_sigterm_saves_and_the_curve_is_that_of_a_run_without_it(folder, capsys):
    """Equal to the bit on the same mesh, within roundings on another one at another stage."""
    options = ["--steps", "24", "--stage", "2", "--eval-every", "24", *SMALL]
    assert main(["train", *options, "--out", "whole"]) == 0
    command = [*COMMAND, "train", *options, "--out", "a run", "--devices", "8"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    metrics = folder / "a run/metrics.jsonl"
    while process.poll() is None and '"step": 9' not in (
        metrics.read_text() if metrics.exists() else ""
    ):
        signal.sigtimedwait([], 0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 75, (out, err)
    (stopped,) = find_checkpoints(folder / "a run/checkpoints")  # though none was asked for
    assert 9 <= stopped < 24
    assert f"preempted after step {stopped} of 24; go on with: zerojax train --resume --out" in err
    assert "--out 'a run' --devices 8\n" in err
    shutil.copytree(folder / "a run", folder / "elsewhere")
    capsys.readouterr()

    assert main(["train", "--resume", "--out", "a run"]) == 0  # the other options are kept
    assert f"going on from step {stopped}" in capsys.readouterr().out
    assert losses(folder / "a run") == losses(folder / "whole")

    bound = roundings(24 - stopped, 32 * 16)  # rows and tokens of a batch
    assert main(["train", "--resume", "--out", "elsewhere", "--devices", "4", "--stage", "3"]) == 0
    assert losses(folder / "elsewhere") == pytest.approx(losses(folder / "whole"), rel=bound)


def test_damaged_checkpoints_are_named_and_passed_over(folder, capsys):
    options = ["--steps", "6", "--save-every", "2", *SMALL]
    assert main(["train", *options, "--out", "run"]) == 0
    want = losses(folder / "run")
    saved = find_checkpoints(folder / "run/checkpoints")
    assert list(saved) == [2, 4, 6]
    largest = max(saved[6].rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    (saved[4] / "checkpoint.json").unlink()  # a save that was cut short
    capsys.readouterr()

    assert main(["train", "--resume", "--out", "run", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "checkpoints/6 is damaged" in out
    assert "checkpoints/4 is a save that was cut short" in out
    assert largest.name in out
    assert "going on from step 2" in out
    assert losses(folder / "run") == want
    assert list(find_checkpoints(folder / "run/checkpoints")) == [2, 4, 6]
    assert (folder / "run/checkpoints/6.damaged").is_dir()  # nothing is lost

    for path in (folder / "run/checkpoints").iterdir():
        (path / "checkpoint.json").write_text("{}")
    assert main(["train", "--resume", "--out", "run", *QUICK]) == 2
    err = capsys.readouterr().err
    assert "no whole checkpoint" in err
    assert err.count("\n") == 1


def test_a_place_that_the_data_do_not_have_is_refused_in_one_line(folder, capsys):
    assert main(["train", "--steps", "1", "--save-every", "1", *SMALL, "--out", "run"]) == 0
    saved = folder / "run/checkpoints/1"
    manifest = read_manifest(saved)
    for place in ({"next_index": x} for x in (10**30, -5, "x")):
        write_manifest(saved, dataclasses.replace(manifest, data={**manifest.data, **place}))
        capsys.readouterr()
        assert main(["train", "--resume", "--steps", "2", "--out", "run"]) == 2
        err = capsys.readouterr().err
        assert "run/checkpoints/1 names no place in the data" in err
        assert "remove it to go on from an older one" in err
        assert err.count("\n") == 1


def test_the_loss_scale_goes_on_and_precisions_change(folder, capsys):
    """The scale halves where gradients overflow, which no other line of the curve would show."""
    options = ["--steps", "6", "--save-every", "3", "--precision", "fp16", *SMALL]
    assert main(["train", *options, "--out", "run"]) == 0
    want = columns(folder / "run", "loss", "loss_scale", "grad_norm")
    shutil.rmtree(folder / "run/checkpoints/6")
    assert main(["train", "--resume", "--out", "run"]) == 0
    assert columns(folder / "run", "loss", "loss_scale", "grad_norm") == want
    capsys.readouterr()
    for steps, precision in (("7", "bf16"), ("8", "fp16")):
        options = ["--resume", "--steps", steps, "--precision", precision]
        assert main(["train", *options, "--out", "run"]) == 0
        assert f"going on from step {int(steps) - 1}" in capsys.readouterr().out
    found = columns(folder / "run", "loss_scale")
    assert [step for step, (scale,) in found.items() if scale] == [1, 2, 3, 4, 5, 6, 8]


def test_the_newest_ones_are_kept(folder):
    options = ["--steps", "6", "--save-every", "1", "--keep", "2", *SMALL]
    assert main(["train", *options, "--out", "run"]) == 0
    assert list(find_checkpoints(folder / "run/checkpoints")) == [5, 6]
    assert sorted(path.name for path in (folder / "run/checkpoints").iterdir()) == ["5", "6"]
    assert read_manifest(folder / "run/checkpoints/6").step == 6


def test_a_run_starts_from_weights_that_are_given(folder, capsys):
    assert main(["train", "--steps", "8", "--save-every", "8", "--out", "run", *SMALL]) == 0
    assert main(["checkpoint", "export", "run", "w.safetensors"]) == 0
    trained = json.loads((folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    for number, given in enumerate(("run", "w.safetensors")):
        out = f"from-{number}"
        options = ["--steps", "1", "--stage", "3", "--devices", "4", "--init", given, *SMALL]
        assert main(["train", *options, "--out", out]) == 0
        first = json.loads((folder / out / "metrics.jsonl").read_text().splitlines()[0])
        assert first["step"] == 0
        assert first["validation_bits_per_byte"] == pytest.approx(
            trained["validation_bits_per_byte"],
            rel=roundings(2, 20 * 16),  # of two evaluations
        )
    capsys.readouterr()
    assert main(["train", "--model", "gpt2-small", "--init", "run", "--out", "other"]) == 2
    err = capsys.readouterr().err
    assert "wanted" in err
    assert err.count("\n") == 1
    assert main(["train", "--init", "nothing", "--out", "other"]) == 2
    assert "no folder nothing" in capsys.readouterr().err


def test_another_model_of_the_same_shapes_is_refused(folder, capsys):
    """Heads change no shape, and a run with sizes of its own takes nothing else from --model."""
    sizes = ["--layers", "1", "--width", "32", *SMALL]
    asked = ["--steps", "1", "--save-every", "1", "--heads", "2", *sizes]
    assert main(["train", *asked, "--out", "run"]) == 0
    told = "--init: run has 2 heads, this model {}; give --heads 2\n"
    for given, message in {
        "--resume --heads 4 --out run": "--heads 4: the checkpoint has states of 2; leave it out\n",
        "--resume --model gpt2-small --out run": (
            "--model gpt2-small: the checkpoint has states of tiny; leave it out\n"
        ),
        "--init run --heads 8 --out other": told.format(8),
        "--init run --out other": told.format(4),  # those of tiny
    }.items():
        capsys.readouterr()
        assert main(["train", "--steps", "2", *sizes, *given.split()]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert main(["train", "--resume", "--heads", "2", "--model", "tiny", "--out", "run"]) == 0
    asked = ["--steps", "1", "--heads", "2", *sizes]
    assert main(["train", "--init", "run", "--out", "other", *asked]) == 0


@pytest.mark.parametrize(("evaluation", "step"), [(1, 1), (2, 2)])
def test_a_signal_during_an_evaluation_saves_as_well(folder, monkeypatch, evaluation, step):
    """The first is before the first step, and the last after the last one."""
    asked = itertools.count()

    def evaluated(self, done, last):
        if not done and next(asked) == evaluation:
            signal.raise_signal(signal.SIGTERM)
        assert not self._signals.seen or not done, "it is given up after the batch"

    monkeypatch.setattr(TrainScreen, "evaluated", evaluated)
    assert main(["train", "--steps", "2", "--eval-every", "1", *SMALL, "--out", "run"]) == 75
    assert list(find_checkpoints(folder / "run/checkpoints")) == [step]
