"""`zerojax train` does what it says, refuses in one line what it can't do, and ends cleanly."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zerojax
from tests.cli.running import COMMAND, NUM_BYTES, QUICK, TEXT, lines_of, steps_of
from tests.texts import bits_per_byte, prose
from zerojax._display import decimal
from zerojax.checkpoint import find_checkpoints, read_manifest
from zerojax.cli import main
from zerojax.cli._check import check
from zerojax.cli._compile import compile_
from zerojax.cli._launch import launch
from zerojax.cli._plan import plan
from zerojax.cli.shared._machine import find_devices
from zerojax.cli.shared._options import OPTIMIZERS, make_schedule
from zerojax.cli.train._command import train
from zerojax.cli.train._run import held_out_batches
from zerojax.cli.train._screen import Metrics
from zerojax.data import make_batches
from zerojax.models import gpt

#: Small enough for a test, and the same in all of them so that one compilation serves.
SMALL = ["--context", "16", "--save-every", "3", *TEXT, *QUICK]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("--stage 7", "--stage"),
        ("--stage two", "--stage"),
        ("--model no-such-model", "no model named 'no-such-model'"),
        ("--optimizer adamm", "'adamm' is not one of 'adamw'"),
        ("--precision fp8", "'bf16', 'fp16', 'fp32'"),
        ("--data missing.txt", "missing.txt"),
        ("--data empty.txt", "empty"),
        ("--data short.txt", "short"),
        ("--batch-size 30", "multiple of 8, such as 32"),
        ("--batch-size 24 --accumulate 2", "multiple of 16, such as 32"),
        ("--devices 9", "only 8"),
        ("--devices 100000", "at most 256"),
        ("--steps 0", "--steps"),
        ("--steps 3000000000", "--steps"),
        ("--steps 99999999999999999999", "--steps"),
        ("--seed 4294967296", "--seed"),
        ("--out=", "'--out': the path is empty"),
        ("--warmup 200", "--warmup"),
        ("--weight-decay inf", "--weight-decay must be a finite number of at least 0, got inf"),
        ("--lr inf", "--lr must be a finite number"),
        ("--model zero-170b", "takes"),
        ("--out file.txt", "can't write to --out file.txt"),
        ("--out file.txt/below", "can't write to --out"),
        ("--resume", "no whole checkpoint"),
        ("--no-such-option", "--no-such-option"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(folder, capfd, request_, said):
    for name, text in {"empty.txt": "", "short.txt": "short", "file.txt": "a file"}.items():
        (folder / name).write_text(text)
    text = () if "--data" in request_ else TEXT
    assert main(["train", *request_.split(), *text]) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("zerojax: ")
    assert not out
    assert not (folder / "runs").exists()  # nothing is left behind


def test_an_unknown_command_and_none(capsys):
    assert main(["trian"]) == 2
    assert "trian" in capsys.readouterr().err
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert "audit compiled ones (compile, check)" in " ".join(out.split())
    assert not err


def test_a_width_of_0_is_not_known():
    command = [sys.executable, "-m", "zerojax", "plan", "--params", "1e9"]
    env = {**os.environ, "COLUMNS": "0"}
    done = subprocess.run(command, env=env, capture_output=True, timeout=120, check=False)
    assert b"stage params" in done.stdout, done


@pytest.mark.parametrize("command", ["doctor", "plan --help", "--version"])
@pytest.mark.parametrize(
    ("where", "status", "said"),
    [(">&-", 2, "stdout is closed"), (">/dev/full", 1, "No space left on device")],
)
def test_a_stdout_that_takes_nothing_is_told_in_one_line(where, status, said, command):
    shell = f'"$@" {command} {where}'
    done = subprocess.run(
        ["sh", "-c", shell, "sh", *COMMAND],
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if line.startswith("zerojax: ")]
    assert (done.returncode, len(lines)) == (status, 1), done.stderr
    assert said in lines[0]
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_help_teaches(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("zerojax train --resume", "gpt2-xl", "adamw_8bit", "gradients", "Ctrl-C"):
        assert word in out
    assert main(["--version"]) == 0
    assert jax.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", [train, plan, compile_, launch, check])
def test_the_help_is_whole_on_80_columns(monkeypatch, capsys, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command.__name__.strip("_"), "--help"]) == 0
    assert "…" not in capsys.readouterr().out
    examples = command.__doc__.split("```")[1].splitlines()
    assert max(map(len, examples)) <= 4 + 76, examples


def test_the_storys_first_line_in_a_process_of_its_own(folder):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = "train --steps 6 --stage 2 --devices 8 --model tiny --out run --save-every 3"
    done = subprocess.run(
        [*COMMAND, *command.split(), *TEXT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert "8 x virtual CPU (data=8)" in done.stdout
    num_params = gpt.num_params(gpt.preset("tiny"))
    assert f"{num_params:,} parameters" in done.stdout
    row = next(line for line in done.stdout.splitlines() if line.startswith(" optimizer "))
    # Two moments in fp32: by the theory an eighth of them on each device.
    assert decimal(num_params) in row, row
    assert decimal(8 * num_params) in row, row
    assert "87%" in row, row
    assert list(find_checkpoints(folder / "run/checkpoints")) == [3, 6]
    assert (folder / "run/training.png").read_bytes().startswith(b"\x89PNG")
    lines = lines_of(folder / "run")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 6]
    # A uniform guess costs 8 bits; half of what the bytes' frequencies teach is soon learnt.
    assert lines[0]["validation_bits_per_byte"] == pytest.approx(8, abs=0.5)
    assert lines[-1]["validation_bits_per_byte"] < (8 + bits_per_byte(prose(NUM_BYTES))) / 2
    for line in lines[1:-1]:
        assert {"step", "loss", "grad_norm", "learning_rate", "tokens_per_second"} <= line.keys()


def test_a_resumed_run_equals_the_one_that_was_not_interrupted(folder, capsys):
    assert main(["train", "--steps", "6", "--stage", "3", "--out", "run", *SMALL]) == 0
    whole = steps_of(folder / "run")
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5, 6]
    shutil.rmtree(folder / "run/checkpoints/6")
    capsys.readouterr()

    assert main(["train", "--steps", "6", "--out", "run", *SMALL]) == 2  # would mix two runs
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--steps", "6", "--resume", "--seed", "1", "--out", "run"]) == 2
    assert "seed" in capsys.readouterr().err
    assert main(["train", "--steps", "6", "--resume", "--optimizer", "muon", "--out", "run"]) == 2
    assert "has states of adamw; leave it out" in capsys.readouterr().err

    assert main(["train", "--steps", "6", "--resume", "--out", "run", *QUICK]) == 0
    out = capsys.readouterr().out
    assert "going on from step 3" in out
    assert "stage 3" in out  # and the other options are those of the run that goes on
    assert steps_of(folder / "run") == whole
    assert list(find_checkpoints(folder / "run/checkpoints")) == [3, 6]

    assert main(["train", "--steps", "6", "--resume", "--out", "run", *QUICK]) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    assert steps_of(folder / "run") == whole


def test_a_run_goes_on_at_another_stage_on_other_devices(folder, capsys):
    options = "--steps 6 --stage 1 --precision bf16 --accumulate 2 --optimizer adamw_8bit"
    assert main(["train", *options.split(), "--out", "run", *SMALL]) == 0
    whole = steps_of(folder / "run")
    shutil.rmtree(folder / "run/checkpoints/6")
    manifest = read_manifest(folder / "run/checkpoints/3")
    assert manifest.stage == 1
    assert manifest.step == 3
    assert manifest.metadata["options"]["optimizer"] == "adamw_8bit"
    assert manifest.data["next_index"] == 3
    command = "train --steps 6 --resume --stage 3 --devices 4 --out run"
    assert main([*command.split(), *QUICK]) == 0
    for got, want in zip(steps_of(folder / "run"), whole, strict=True):
        # bf16 has 8 bits; the sums over devices are made of other parts.
        assert got["loss"] == pytest.approx(want["loss"], rel=2.0**-8)
    assert "masters" in capsys.readouterr().out


def test_ctrl_c_finishes_the_step_and_writes_what_there_is(folder):
    command = [
        *COMMAND,
        "train",
        "--steps",
        "100000",
        "--eval-every",
        "100000",
        "--out",
        "run",
        *SMALL,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    for line in process.stdout or ():
        if "saved run/checkpoints/3" in line:
            process.send_signal(signal.SIGINT)
            break
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "ending after this step" in err
    stopped = steps_of(folder / "run")[-1]["step"]
    assert f"interrupted after step {stopped} of 100000" in err
    assert "zerojax train --resume" in err
    assert list(find_checkpoints(folder / "run/checkpoints"))[-1] == stopped


def test_a_loss_that_is_not_finite_ends_the_run(folder, capsys):
    wild = ["--lr", "1e30", "--clip-norm", "0", "--warmup", "0"]
    assert main(["train", "--steps", "20", "--out", "run", *wild, *SMALL]) == 1
    err = capsys.readouterr().err
    assert "diverged" in err
    assert err.count("\n") == 1
    lines = lines_of(folder / "run")
    saved = find_checkpoints(folder / "run/checkpoints")
    assert all(step < lines[-1]["step"] for step in saved)  # a broken state is not saved


def test_a_loss_scale_that_mends_nothing_ends_the_run(folder, capsys):
    """Each step is skipped, and none changes anything once the scale is at its smallest."""
    wild = ["--precision", "fp16", "--lr", "1e8", "--warmup", "0", "--clip-norm", "0"]
    assert main(["train", "--steps", "40", "--out", "run", *wild, *SMALL]) == 1
    assert "training diverged; give a smaller --lr" in capsys.readouterr().err
    assert lines_of(folder / "run")[-1]["loss_scale"] == 1.0


def test_an_update_that_overflows_is_not_saved_over_what_is_whole(folder, capsys):
    """Its own loss is finite: that of the next step would say so, too late."""
    often = ["--save-every", "1", "--keep", "1", "--warmup", "0", "--clip-norm", "0"]
    assert main(["train", "--steps", "2", "--out", "run", *often, *SMALL]) == 0
    wild = ["--lr", "1e38", "--resume", "--steps", "4"]
    assert main(["train", "--out", "run", *often, *SMALL, *wild]) == 1
    assert "the norm of the parameters is inf at step 3: training div" in capsys.readouterr().err
    assert list(find_checkpoints(folder / "run/checkpoints")) == [2]


CUT = {"context": 8, "batch_size": 16}


@pytest.mark.parametrize(("asked", "looked_at"), [(21, 16), (40, 32), (3, 3)])
def test_an_evaluation_is_the_mean_over_whole_batches_of_windows(mesh8, asked, looked_at):
    config = gpt.Config(num_layers=1, width=20, num_heads=2, vocab_size=257, context=8)
    text = np.frombuffer(prose(4000), np.uint8)
    loss, init = functools.partial(gpt.loss, config), functools.partial(gpt.init, config)
    key = jax.random.key(0)
    rows = np.concatenate(list(make_batches(text, context=8, batch_size=1, num_epochs=1)))
    rows = np.resize(rows[:looked_at], (-(-looked_at // 16) * 16, 9))
    want = float(loss(init(key), jnp.asarray(rows)))
    for stage in (2, 3):
        layout = zerojax.make_layout(jax.eval_shape(init, key), mesh8, stage=stage, min_size=8)
        assert any(leaf.is_padded for leaf in layout.leaves)
        step = zerojax.make_train_step(loss, optax.sgd(1.0), layout)
        state, batches = step.init(init, key), held_out_batches(text, asked, **CUT, vocab_size=257)
        found = [float(step.evaluate(state, step.place(rows))) for rows in batches]
        assert np.mean(found) == pytest.approx(want, rel=1e-5)


def test_a_held_out_token_outside_the_vocabulary_is_refused():
    text = np.frombuffer(prose(4000), np.uint8)
    with pytest.raises(ValueError, match=r"the data have token \d+, the vocabulary 16 tokens"):
        held_out_batches(text, 3, **CUT, vocab_size=16)


def test_every_optimizer_is_made_for_the_model():
    config = gpt.Config(num_layers=1, width=16, num_heads=2, vocab_size=16, context=8)
    params = gpt.init(config, jax.random.key(0))
    for make in OPTIMIZERS.values():
        tx = make(make_schedule(None, 1, 10, config.width), 0.1)

        @jax.jit
        def moves(params, tx=tx):
            updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
            return jax.tree.map(lambda u: -u.mean(), updates)

        # A gradient of ones moves every parameter down, at no more than a sane rate.
        for moved in jax.tree.leaves(moves(params)):
            assert 0 < float(moved) < 0.2


def test_real_devices_are_used_where_there_are_enough(monkeypatch):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu, gpu])
    assert find_devices(None) == [gpu, gpu]
    assert find_devices(1) == [gpu]
    with pytest.raises(ValueError, match=r"only 2 here \(gpu\).*JAX_PLATFORMS=cpu"):
        find_devices(8)


@pytest.mark.parametrize(
    ("flags", "asked", "found"), [("", "None", 8), ("", "3", 3), ("=4", "None", 4), ("=4", "6", 6)]
)
def test_virtual_devices_are_as_many_as_asked_for(flags, asked, found):
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count{flags}" if flags else "",
    }
    module = "zerojax.cli.shared._machine"
    program = f"from {module} import find_devices; print(len(find_devices({asked})))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"{found}\n", done.stderr


@pytest.mark.parametrize(
    "damage", [b"", b"\0\0\0\n", b"junk\n", b"\xff\xfe\n", b"[1]\n", b'{"step": "1"}\n']
)
def test_the_metrics_keep_what_a_resumed_run_needs(tmp_path, damage):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    for step in (1, 2, 3):
        metrics.add(step=step, loss=1.0 / step)
    metrics.add(step=3, loss=float("nan"))
    with path.open("ab") as file:
        file.write(damage + b'{"step": 4, "lo')  # a crash in the middle of a line
    again = Metrics(path, 2)
    again.add(step=3, loss=0.5)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 0.5), (3, 0.5))]
    Metrics(path, 0)
    assert not path.read_text()
