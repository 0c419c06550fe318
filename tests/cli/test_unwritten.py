"""A run that can't write what it tells, to a closed pipe or a full disk, saves and ends."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess

import pytest

from tests.cli.running import COMMAND, QUICK, TEXT, lines_of, steps_of
from zerojax.checkpoint import Checkpoints, find_checkpoints
from zerojax.cli import main
from zerojax.cli.train._screen import Metrics
from zerojax.cli.train._signals import Signals


def test_a_reader_that_leaves_ends_the_run_saved(folder):
    """Of as many steps as a counter holds, whose rates no memory would."""
    steps = str(2**31 - 1)
    command = [*COMMAND, "train", "--steps", steps, "--eval-every", steps, "--out", "run"]
    command += ["--context", "16", *TEXT, *QUICK]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1, err
    stopped = steps_of(folder / "run")[-1]["step"]
    assert f"can't write to stdout: its reader has ended; ended after step {stopped} of" in err
    assert "go on with: zerojax train --resume --out run" in err
    assert err.count("\n") == 1
    assert list(find_checkpoints(folder / "run/checkpoints")) == [stopped]


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_full_disk_ends_the_run_saved_where_it_can_be(folder, capsys, monkeypatch, is_saved):
    full = OSError(errno.ENOSPC, "No space left on device")
    path, add = folder / "run/metrics.jsonl", Metrics.add
    path.parent.mkdir()
    path.write_text('{"step": 9}\n')

    def fail(*given, step, **more):
        if step == 2 or given[1:]:
            raise full
        add(*given, step=step, **more)

    monkeypatch.setattr(Metrics, "add", fail)
    if not is_saved:
        monkeypatch.setattr(Checkpoints, "save", lambda *given, **more: fail(step=2))
    command = ["train", "--steps", "5", "--context", "16", "--out", "run"]
    assert main([*command, *TEXT, *QUICK]) == 1
    out, err = capsys.readouterr()
    assert "replaces the metrics of an earlier run in run" in out
    told = "zerojax: can't write to run/metrics.jsonl: No space left on device; "
    then = "ended after step 2 of 5; go on with: zerojax train --resume --out run"
    assert err.startswith(told + (then if is_saved else "can't save a checkpoint: [Errno 28]"))
    assert err.count("\n") == 1
    assert list(find_checkpoints(folder / "run/checkpoints")) == [2] * is_saved
    assert [line["step"] for line in lines_of(folder / "run")] == [0, 1]


def test_a_line_that_is_cut_short_stays_the_last(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    metrics.add(step=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            metrics.add(step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.add(step=3)
    assert not path.read_text().endswith("\n")
    assert metrics.read() == [{"step": 1}]


def test_a_terminal_that_is_gone_hinders_no_signal(monkeypatch):
    def write(*given):
        raise OSError(errno.EIO, "Input/output error")

    with Signals(0) as signals:
        monkeypatch.setattr(os, "write", write)
        signals._handle(signal.SIGHUP, None)
    assert signals.seen == {signal.SIGHUP}
