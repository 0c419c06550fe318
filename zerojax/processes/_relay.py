"""A connection to the coordinator that outlives it, so that a process can say why it ends.

jax's client aborts its process as soon as its connection closes, with a stack of C++. jaxlib's
`missed_heartbeat_callback` runs no Python: its argument has no Python type (jaxlib 0.10 and 0.12:
`std::bad_cast`). So the client connects to a socket of its own process, and what it says is passed
on from there. When the coordinator closes its end, the client's end stays open.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable


def relay(coordinator: str, closed: Callable[[], object]) -> str:
    """Pass on what comes for `HOST:PORT`; return where to connect. At the end `closed` runs."""
    server = socket.create_server(("127.0.0.1", 0))
    host, _, port = coordinator.rpartition(":")

    async def connect(near: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        with contextlib.closing(answer):
            try:
                far, question = await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                return  # it does not listen yet: jax tries again
            with contextlib.closing(question):
                ways = [_pass(near, question), _pass(far, answer)]
                tasks = [asyncio.create_task(way) for way in ways]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not near.at_eof():
                    closed()
                    # A task that waits when the process ends is destroyed, and Python prints that.
                    tasks[0].cancel()
                    await asyncio.wait(tasks[:1])
                    with contextlib.suppress(OSError):
                        while await near.read(1 << 16):
                            pass  # the client's end stays open until the client closes it

    async def serve() -> None:
        async with await asyncio.start_server(connect, sock=server) as listening:
            await listening.serve_forever()

    threading.Thread(target=asyncio.run, args=(serve(),), name="relay", daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


async def _pass(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
