"""`zerojax launch`: several processes of one program on this machine, for development."""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from zerojax.cli.shared._command import CommandOptions, Failure, argument, command, option
from zerojax.processes import LAUNCHED

#: Seconds that processes have to end by themselves when one has failed; and after a signal, which
#: may have them save.
GRACE, LAST = 10.0, 60.0
HERE = "127.0.0.1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions(CommandOptions):
    processes: int = option(2, "-n", "--processes", min=1)
    """Processes to start."""
    words: tuple[str, ...] = argument("train|PROGRAM.py", several=True)
    """What to start, with its own options."""

    def __post_init__(self) -> None:
        name = self.words[0] if self.words else ""
        if name != "train" and not (name.endswith(".py") and Path(name).is_file()):
            told = f"launch starts `train` or a Python file, and {name!r} is neither"
            raise ValueError(f"{told}: write zerojax launch -n 2 train, or own.py in its place")


@command
def launch(options: LaunchOptions) -> None:
    """Start several processes of a program on this machine, for development.

    It is `zerojax train`, or a program of your own that calls `zerojax.processes.initialize()`.
    They find each other on the loopback interface, and each line that they print begins with the
    number of the process. When one fails, all end. On a cluster its own launcher starts the
    processes (srun, mpirun, a Kubernetes job), and they find the others by themselves.

    Virtual devices of `train` are shared out; JAX_NUM_CPU_DEVICES says how many each process has.

    ```
    zerojax launch -n 2 train --stage 3 --steps 20
    JAX_NUM_CPU_DEVICES=2 zerojax launch -n 4 own.py --steps 100
    ```
    """
    with socket.socket() as free:
        free.bind((HERE, 0))
        run = f"{HERE}:{free.getsockname()[1]} {options.processes}"
    command = [sys.executable, *["-m", "zerojax"] * (options.words[0] == "train"), *options.words]
    started, printed = list[subprocess.Popen[bytes]](), list[Future[None]]()
    signals, threads = list[int](), ThreadPoolExecutor(options.processes)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        for index in range(options.processes):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", LAUNCHED: f"{run} {index}"},
                start_new_session=True,  # a terminal's Ctrl-C comes once, through this process
            )
            started.append(process)
            printed.append(threads.submit(_print, index, process))
        status = _wait(started, signals)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):  # what it has started holds its pipe
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if unwritten := next(filter(None, (one.exception() for one in printed)), None):
        raise Failure(f"can't write to stdout: {unwritten}; send it elsewhere", status or 1)
    if status:
        raise Failure("", status)


def _wait(started: Sequence[subprocess.Popen[bytes]], signals: list[int]) -> int:
    """Wait for all processes, so long after the first failure or signal; return its status."""
    failed, until = None, float("inf")
    while None in (codes := [process.poll() for process in started]) and time.monotonic() < until:
        if failed is None and any(codes):
            failed, until = next(filter(None, codes)), time.monotonic() + GRACE
        if signals:
            number, until = signals.pop(0), min(until, time.monotonic() + LAST)
            for process in started:
                process.send_signal(number)
        time.sleep(0.05)
    if failed is None and None in codes:
        raise Failure(f"killed {LAST:.0f} s after a signal", 128 + signal.SIGKILL)
    status = failed or next(filter(None, codes), 0)
    if status < 0:
        name = signal.Signals(-status).name
        sys.stderr.write(f"zerojax: process {codes.index(status)} ended by {name}\n")
    return status if status >= 0 else 128 - status


def _print(index: int, process: subprocess.Popen[bytes]) -> None:
    """Pass on what a process prints, a line at a time, but not what its collectives greet with."""
    assert process.stdout is not None
    # "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of ... is : 3" and a newline:
    # threads mix the pieces, and a line of two greetings leaves one of digits or of nothing.
    begun = 0
    with process.stdout:  # where stdout is closed, that is closed for the process as well
        for line in process.stdout:
            begun += line.count(b"[Gloo] Rank")
            left = begun and not line.strip(b"0123456789 \n")
            if left or b"[Gloo] Rank" in line or b"peer ranks" in line:
                begun = max(0, begun - 1)
            else:
                sys.stdout.buffer.write(b"[%d] %s\n" % (index, line.rstrip(b"\n")))
                sys.stdout.buffer.flush()
