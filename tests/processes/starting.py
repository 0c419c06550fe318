"""Starting several processes of child.py, ended after a time whatever they wait for."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

CHILD, ROOT = Path(__file__).parent / "child.py", Path(__file__).resolve().parents[2]
COUNT = 2


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(what, folder, patience=50.0, cluster=None):
    """Start processes of two devices each, which print to FOLDER/log.INDEX.txt.

    They find each other by what `cluster(index)` puts in their environment, or are told.
    """
    port = free_port() if cluster is None else "found"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started = []
    for index in range(COUNT):
        command = [sys.executable, CHILD, port, index, COUNT, what, patience, folder]
        with (folder / f"log.{index}.txt").open("w") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                env={
                    **os.environ,
                    **(cluster(index) if cluster else {}),
                    "XLA_FLAGS": flags,
                    "PYTHONPATH": path,
                },
                stdout=output,
                stderr=output,
            )
        started.append(process)
    return started


def end(started, seconds):
    """Wait for processes, and kill those that take longer; give their statuses."""
    until = time.monotonic() + seconds
    try:
        return [process.wait(max(0.1, until - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        return [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def logs(folder):
    """Give what each process printed."""
    return [(folder / f"log.{index}.txt").read_text() for index in range(COUNT)]


def once(factory, name, make):
    """Have one of pytest's workers make a folder, and the others wait for it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder
