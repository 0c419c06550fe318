"""Processes that start meet first, and those that never do are named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes.starting import ROOT, free_port
from zerojax.processes import ProcessError, initialize
from zerojax.processes._meeting import meet


def start(indices, count=3, seconds=3.0, late=()):
    """Let some of the processes meet, each in a thread; give the error of each, or None."""
    address = f"127.0.0.1:{free_port()}"

    def run(index):
        time.sleep(0.5 * (index in late))
        try:
            return meet(address, count, index, address, seconds)
        except ProcessError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, indices))


@pytest.mark.parametrize("late", [(), (0,), (2,)])
def test_all_that_start_meet_in_any_order(late):
    assert start([2, 0, 1], late=late, seconds=20.0) == [None] * 3


@pytest.mark.parametrize(("here", "missing"), [([0, 2], "1"), ([1, 2], "0"), ([0], "1, 2")])
def test_those_that_do_not_start_are_named_to_all_others(here, missing):
    told = f"of 3 processes, {missing} did not start within 3 s"
    assert start(here) == [told] * len(here)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_processes": "2"}, "num_processes must be a whole number of at least 1, got '2'"),
        ({"process_id": True}, "process_id must be a finite number of at least 0, got True"),
        ({"num_processes": 2.5}, "num_processes must be a whole number of at least 1, got 2.5"),
        ({"patience": "50"}, "patience must be a finite number of at least 0, got '50'"),
        ({"wait": -1}, "wait must be a finite number of at least 0, got -1"),
    ],
)
def test_what_is_no_number_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        initialize("127.0.0.1:1", **{"num_processes": 2, "process_id": 0, **options})


@pytest.mark.parametrize("coordinator", ["here", "127.0.0.1:", "127.0.0.1:99999", "1234", 1234])
def test_a_coordinator_without_a_port_is_refused(coordinator):
    with pytest.raises(ValueError, match="give HOST:PORT"):
        initialize(coordinator, 2, 0)


def test_an_id_beyond_the_number_of_processes_is_refused_at_once():
    with pytest.raises(ValueError, match="this is process 2 of 2; ids count from 0 to 1"):
        meet("127.0.0.1:1", 2, 2, None, 60.0)


def test_strangers_are_not_counted():
    address = f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        found = [pool.submit(meet, address, 2, index, address, 20.0) for index in (0,)]
        for said in (b"GET / HTTP", b"7", b""):
            for _ in range(100):
                try:
                    with socket.create_connection(("127.0.0.1", int(address[10:]))) as stranger:
                        stranger.sendall(said)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
        assert not found[0].done()
        assert meet(address, 2, 1, None, 20.0) is None
        assert found[0].result() is None


def test_another_program_at_the_port_is_no_process_0():
    def answer():
        with other.accept()[0] as guest:
            guest.sendall(b"\0\0\x18\x04\xff HTTP/2")

    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        pool.submit(answer)
        with pytest.raises(ProcessError, match="of 2 processes, 0 did not start within 2 s"):
            meet(address, 2, 1, None, 2.0)
        with pytest.raises(
            ProcessError, match=f"can't listen at {address}: .*in use.*another port"
        ):
            meet(address, 2, 0, address, 2.0)


def test_the_command_says_so_in_one_line_and_does_not_wait_for_jax():
    run = ["train", "--num-processes", "2", "--process-id", "0", "--wait", "2"]
    coordinator = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", *run, "--coordinator", coordinator],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = "zerojax: of 2 processes, 1 did not start within 2 s\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
