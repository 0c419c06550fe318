"""Starting several processes of a program, ended after a time whatever they wait for."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNT = 2


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(program, folder, *arguments, cluster=None, count=COUNT, **environment):
    """Start processes that share four devices, and print to FOLDER/log.INDEX.txt.

    The program gets port, index, count, the arguments and the folder. With `cluster(index)`, what
    it puts in the environment, processes find each other, and the port is the word "found".
    """
    port = free_port() if cluster is None else "found"
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={4 // count}")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    shared = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path, **environment}
    started = []
    for index in range(count):
        command = [sys.executable, program, port, index, count, *arguments, folder]
        with (folder / f"log.{index}.txt").open("w") as output:
            process = subprocess.Popen(
                list(map(str, command)),
                env={**shared, **(cluster(index) if cluster else {})},
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
    return [path.read_text() for path in sorted(folder.glob("log.*.txt"))]


def once(factory, name, make):
    """Have one of pytest's workers fill a folder; give it, and what was made."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / "made.json").write_text(json.dumps(make(folder)))
    return folder, json.loads((folder / "made.json").read_text())


def run(program, folder, *arguments, seconds=300, count=COUNT, **environment):
    """Run processes that write what they found to FOLDER/result.INDEX.json; give that."""
    statuses = end(start(program, folder, *arguments, count=count, **environment), seconds)
    assert statuses == [0] * count, "\n".join(log[-3000:] for log in logs(folder))
    return [json.loads((folder / f"result.{index}.json").read_text()) for index in range(count)]
