"""`zerojax launch`: processes of one run learn what one process learns, and end together."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import zerojax
from tests.cli.running import QUICK, enter
from tests.processes.starting import free_port
from zerojax.checkpoint import Checkpoints, verify
from zerojax.cli import _launch, main
from zerojax.cli.shared._command import Failure
from zerojax.cli.train._run import sole_run
from zerojax.processes import LAUNCHED

LAUNCH = [sys.executable, "-m", "zerojax", "launch", "-n", "2", "train"]
MODEL = ["--data", "../text.txt", "--context", "32", "--batch-size", "8", *QUICK]
#: Seconds after which a launch is ended.
PATIENCE = 250
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds child processes in /proc")


@pytest.fixture
def environment():
    """Two devices a process, in a folder of its own."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": root}


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_two_processes_learn_what_one_learns_and_one_goes_on(tmp_path, monkeypatch, environment):
    work = enter(tmp_path, monkeypatch)
    command = [*LAUNCH, *MODEL, "--stage", "2", "--steps", "4", "--save-every", "2", "--out", "two"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0] mesh  4 x virtual CPU (data=4)" in done.stdout
    assert re.findall(r"^\[1\].*", done.stdout, re.MULTILINE) == [], "process 0 alone prints"
    train = ["train", *MODEL, "--devices", "4", "--stage", "2", "--steps", "4"]
    assert main([*train, "--out", "one"]) == 0
    assert np.allclose(losses(work / "one"), losses(work / "two"), rtol=1e-6)
    assert verify(work / "two/checkpoints/4").step == 4
    resume = ["train", *MODEL, "--resume", "--devices", "2", "--stage", "3", "--steps", "5"]
    assert main([*resume, "--out", "two"]) == 0
    assert len(losses(work / "two")) == 5


def test_what_collectives_greet_with_is_not_passed_on(capfdbinary):
    """Also where threads have mixed their words and ends of lines."""
    greeting = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks"
    mixed = "[Gloo] Rank [Gloo] Rank 13 is connected to  is connected to 3 peer ranks. "
    told = [
        f"{greeting} is : 3",
        mixed,
        "3 peer ranks. Expected number of connected peer ranks is : 3",
        *(f"{greeting} is : 3{greeting} is : 3", "", f"{greeting} is : {greeting} is : 3", "3"),
    ]
    told += ["", "42", "step 2: 5 peers", "Traceback: a peer is connected to nothing"]
    program = [sys.executable, "-c", f"print(*{told!r}, sep='\\n')"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        _launch._print(1, process)
    assert capfdbinary.readouterr().out.splitlines() == [b"[1] %s" % x.encode() for x in told[-4:]]


def test_a_launch_that_nobody_reads_ends_its_processes(monkeypatch):
    def write(*given):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", SimpleNamespace(buffer=SimpleNamespace(write=write)))
    program = [sys.executable, "-c", "while True: print('a line', flush=True)"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(program, **pipes) as process:
        with pytest.raises(BrokenPipeError):
            _launch._print(1, process)
        assert process.wait(timeout=PATIENCE)


@LINUX
@pytest.mark.parametrize("status", [0, 3])
def test_a_launch_that_can_not_write_says_so(tmp_path, status):
    (tmp_path / "own.py").write_text(f"print('a line')\nraise SystemExit({status})\n")
    command = [*LAUNCH[:-1], str(tmp_path / "own.py")]
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        pipes = {"stdout": full, "stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, **pipes, timeout=PATIENCE, check=False)
    assert done.returncode == (status or 1)
    assert "zerojax: can't write to stdout: [Errno 28] No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def interrupted(environment, arguments, until, number, victim=1):
    """Launch a long run and send a signal to one of its processes; give status and output."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
    command = [*LAUNCH, *MODEL, "--steps", "100000", *arguments]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launch:
        try:
            told = ""
            while until not in told:
                line = launch.stdout.readline()
                assert line, told
                told += line
            children = Path(f"/proc/{launch.pid}/task/{launch.pid}/children").read_text().split()
            os.kill(int(children[victim]), number)
            told += launch.communicate(timeout=PATIENCE)[0]
        finally:
            launch.terminate()
    assert not any(Path("/proc", child).exists() for child in children)
    return launch.returncode, told


@LINUX
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, monkeypatch, environment):
    work = enter(tmp_path, monkeypatch)
    arguments = ["--stage", "3", "--out", "run"]
    status, told = interrupted(environment, arguments, "step 1/", signal.SIGHUP)
    assert status == 75, told
    stopped = re.findall(r"preempted after step (\d+)", told)
    assert len(stopped) == 2
    assert len(set(stopped)) == 1
    assert verify(work / f"run/checkpoints/{stopped[0]}")


@LINUX
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_all_and_one_goes_on(
    tmp_path, monkeypatch, environment, victim
):
    work = enter(tmp_path, monkeypatch)
    arguments = ["--stage", "2", "--save-every", "2", "--out", "run"]
    status, told = interrupted(environment, arguments, "saved run/", signal.SIGKILL, victim)
    assert status == 128 + signal.SIGKILL, told
    assert f"process {victim} ended by SIGKILL" in told
    # Between "whole" and "saved" the others know the folder, and not yet that it has been told.
    go_on = "(start again to go on from|step \\d+ is saved; go on with: zerojax train --resume)"
    told_of = re.search(f"process 0, the coordinator, is gone: .*; {go_on}", told)
    assert bool(told_of) == (victim == 0)
    step = max(Checkpoints(work / "run/checkpoints").steps())
    resume = ["train", *MODEL, "--resume", "--devices", "2", "--steps", str(step + 1)]
    assert main([*resume, "--out", "run"]) == 0


def test_processes_that_were_asked_for_different_things_are_refused(
    tmp_path, monkeypatch, environment
):
    enter(tmp_path, monkeypatch)
    run = [sys.executable, "-m", "zerojax", "train", *MODEL, "--num-processes", "2"]
    coordinator = f"127.0.0.1:{free_port()}"
    started = [
        subprocess.Popen(
            [*run, "--coordinator", coordinator, "--process-id", index, "--steps", steps],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, steps in (("0", "30"), ("1", "40"))
    ]
    try:
        for process in started:
            told = process.communicate(timeout=PATIENCE)[1]
            assert process.returncode == 2
            assert "options: process 0 has 'steps: 30'; process 1 has 'steps: 40'" in told
    finally:
        for process in started:
            process.kill()


def test_a_folder_takes_one_run_at_a_time(tmp_path):
    found = rf"in use by another run, process {os.getpid()} on"
    with sole_run(tmp_path / "run"), pytest.raises(Failure, match=found):
        sole_run(tmp_path / "run").__enter__()
    with sole_run(tmp_path / "run"):
        pass


def test_a_folder_that_can_not_be_locked_is_told_of(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="run can't be locked"), sole_run(tmp_path / "run"):
        pass


def test_launch_starts_what_it_knows(capsys):
    assert main(["launch", "-n", "2", "plan"]) == 2
    assert "'plan' is neither: write zerojax launch -n 2 train" in capsys.readouterr().err


def test_launch_starts_programs_of_ones_own(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(
        "import sys, jax, zerojax\n"
        "count = zerojax.processes.initialize()\n"
        "print('process', jax.process_index(), 'of', count, sys.argv[1:])\n"
    )
    command = [sys.executable, "-m", "zerojax", "launch", "-n", "2", str(program), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = sorted(line for line in done.stdout.splitlines() if "process" in line)
    assert found == [f"[{i}] process {i} of 2 ['--steps', '3']" for i in (0, 1)]


def test_a_program_that_was_launched_and_is_alone_is_told_so(monkeypatch):
    monkeypatch.setenv(LAUNCHED, "127.0.0.1:1 2 1")
    with pytest.warns(UserWarning, match=r"started this, and it works alone: call .*initialize"):
        zerojax.make_mesh({"data": 2})


@LINUX
def test_a_signal_while_processes_are_started_leaves_none(tmp_path):
    (tmp_path / "own.py").write_text("import time\ntime.sleep(600)\n")
    (tmp_path / "start.py").write_text(
        "import os, signal, subprocess, sys\n"
        "from zerojax.cli import main\n"
        "class Started(subprocess.Popen):\n"
        "    def __init__(self, *given, **more):\n"
        "        super().__init__(*given, **more)\n"
        "        sys.stderr.write(f'{self.pid} ')\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "subprocess.Popen = Started\n"
        "sys.exit(main(['launch', '-n', '2', 'own.py']))\n"
    )
    command = [sys.executable, "start.py"]
    pipes = {"stderr": subprocess.PIPE, "text": True}
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, **pipes, cwd=tmp_path, env=env, timeout=PATIENCE, check=False)
    started = re.findall(r"\d{2,} ", done.stderr)
    assert not [pid for pid in started if Path("/proc", pid.strip()).exists()]
    assert (done.returncode, len(started)) == (128 + signal.SIGTERM, 2), done.stderr


def test_what_a_signal_does_not_end_is_killed(tmp_path):
    """With what it has started, which would hold its pipe open."""
    program = tmp_path / "own.py"
    program.write_text(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('ready')\n"
        "time.sleep(600)\n"
    )
    start = (
        "import sys; from zerojax.cli import _launch, main; "
        f"_launch.LAST = 1.0; sys.exit(main(['launch', '-n', '1', {str(program)!r}]))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", start], **pipes) as launch:
        try:
            assert launch.stdout.readline() == "[0] ready\n"
            launch.terminate()
            told = launch.communicate(timeout=30)[1]
        finally:
            launch.kill()
    assert launch.returncode == 128 + signal.SIGKILL
    assert "killed 1 s after a signal" in told
