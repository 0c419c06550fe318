"""The connection to the coordinator that outlives it."""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
import time

import pytest

from zerojax.processes._relay import relay


def test_the_client_s_end_stays_open_until_the_client_closes_it(caplog):
    """Until then jax would end the process; after it nothing is left to print."""
    closed = threading.Event()
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        address = relay(f"127.0.0.1:{coordinator.getsockname()[1]}", closed.set)
        host, _, port = address.rpartition(":")
        client = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        there = stack.enter_context(coordinator.accept()[0])
        client.sendall(b"ask")
        assert there.recv(3) == b"ask"
        there.sendall(b"answer")
        assert client.recv(6) == b"answer"
        there.close()
        assert closed.wait(30)
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(1)
    time.sleep(1.0)
    gc.collect()  # once: a worker that has run many tests takes seconds for it
    assert "destroyed" not in caplog.text
