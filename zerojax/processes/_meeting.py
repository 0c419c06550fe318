"""Have all processes started? jax ends those that have after 5 minutes, and names nobody.

So they meet at the coordinator's address before jax listens there; process 0 counts who has come.
"""

import contextlib
import os
import socket
import time

from zerojax.processes._texts import ProcessError

_ANSWER = b"did not come to zerojax: "


def meet(coordinator: str, count: int, index: int, listens: str | None, seconds: float) -> None:
    """Wait for all processes; process 0 listens where jax will, at `listens` or everywhere.

    Each that has started raises a `ProcessError`, with who has not.
    """
    if not 0 <= index < count:
        raise ValueError(f"this is process {index} of {count}; ids count from 0 to {count - 1}")
    port = coordinator.rpartition(":")[2]
    anywhere = f"{'[::]' if socket.has_dualstack_ipv6() else '0.0.0.0'}:{port}"
    bind = listens or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", anywhere)
    host, _, port = (coordinator if index else bind).rpartition(":")
    address, until = (host.strip("[]"), int(port)), time.monotonic() + seconds
    try:
        missing = _come(address, index, until) if index else _receive(address, count, until)
    except OSError as error:
        told = f"process 0 can't listen at {bind}: {error}; give another port"
        raise ProcessError(told) from error
    if missing:
        raise ProcessError(f"of {count} processes, {missing} did not start within {seconds:.0f} s")


def _receive(address: tuple[str, int], count: int, until: float) -> str:
    guests: dict[int, socket.socket] = {}
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    dual = address[0] == "::"
    made = socket.create_server(address, family=family, backlog=count, dualstack_ipv6=dual)
    with made as server, contextlib.ExitStack() as doors:
        while len(guests) < count - 1 and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, ValueError):  # too late, or a stranger
                guest = doors.enter_context(server.accept()[0])
                guest.settimeout(1.0)
                guests[range(count).index(int(guest.recv(8)))] = guest
        missing = ", ".join(str(index) for index in range(1, count) if index not in guests)
        for guest in guests.values():
            with contextlib.suppress(OSError):
                guest.sendall(_ANSWER + missing.encode())
    return missing


def _come(address: tuple[str, int], index: int, until: float) -> str:
    seconds = until - time.monotonic()
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection(address, left) as server:
            server.settimeout(seconds + 1)  # process 0 may have started just now
            server.sendall(str(index).encode())
            if (told := server.recv(1 << 16)).startswith(_ANSWER):  # not what else listens there
                return told.removeprefix(_ANSWER).decode()
        time.sleep(0.2)
    return "0"
