"""How processes start together, and how all of them end when one does.

A process that is killed or stopped leaves the others in a collective, which waits for ever. So each
writes a sign of life to the coordinator every few seconds, and reads there whether another one has
failed. Whoever learns so says it in one line and ends, whatever its main thread waits for.
"""

import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
from typing import Any, NoReturn

import jax

from zerojax._arguments import as_amount, as_count
from zerojax.processes._meeting import meet
from zerojax.processes._relay import relay
from zerojax.processes._texts import ProcessError, ProcessesDifferError, connection, gather_texts

#: Seconds without a sign of life after which a process counts as lost, and seconds to start in.
PATIENCE, WAIT = 50.0, 60.0
_ALIVE, _FAILED = "zerojax/alive/", "zerojax/failed/"
_LOOPBACK = ("127.0.0.1:", "localhost:")
#: The variable by which `zerojax launch` says where process 0 is, how many there are, and which.
LAUNCHED = "ZEROJAX_LAUNCHED"
#: What calls of the coordinator raise where it, or the connection, is gone.
_LOST = (jax.errors.JaxRuntimeError, ProcessError)


def has_started() -> bool:
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    patience: float = PATIENCE,
    wait: float = WAIT,
) -> int:
    """Connect this process with the others of its run; returns how many there are.

    It is `jax.distributed.initialize`, called before anything else uses jax, after which all end
    when one does: killed, stopped or out of the network it is missed after `patience` seconds, and
    an error is told at once. SIGTERM ends a process that has no handler: jax's preemption
    service, which takes it, is off. Without arguments the others are those of `zerojax launch`, or
    jax finds them by itself: under Slurm and Open MPI, in Kubernetes (GKE) and on TPU pods. Where
    it finds none, and with `num_processes=1`, this process is alone.

    Args:
        coordinator: `HOST:PORT` of process 0, where it listens; a loopback address keeps to it.
        num_processes: how many there are.
        process_id: which of them this one is, from 0.
        patience: seconds.
        wait: seconds that all have to start, from the first one on.

    Raises:
        ValueError: some of the three are missing, and can't be found, or are no such numbers.
        ProcessError: the processes did not find each other; those that did not start are named.
    """
    given = coordinator, num_processes, process_id
    if given == (None, None, None) and (told := os.environ.pop(LAUNCHED, "").split()):
        given = coordinator, num_processes, _ = told[0], int(told[1]), int(told[2])
    numbers = {"process_id": process_id or 0, "patience": patience, "wait": wait}
    _ = [as_amount(*x) for x in numbers.items()]
    if num_processes is not None and as_count("num_processes", num_processes) == 1:
        return 1
    host, _, port = ("found:0" if coordinator is None else str(coordinator)).rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"the coordinator is {coordinator!r}; give HOST:PORT")
    listens = coordinator if coordinator and coordinator.startswith(_LOOPBACK) else None
    # Where our own signs of life fail as well, jax's end the process, with a stack of C++.
    names = ("heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    seconds: dict[str, Any] = dict.fromkeys(names, int(2 * patience))
    seconds["initialization_timeout"] = int(wait)
    found = _meet(given, listens, wait)
    try:
        jax.distributed.initialize(*found, coordinator_bind_address=listens, **seconds)
    except ValueError as error:
        if given == (None, None, None):
            return 1  # no cluster that jax knows
        raise ValueError(
            f"{error} Give the coordinator, HOST:PORT of process 0, the number of processes and "
            "this one's, or none of them on a cluster where jax finds them"
        ) from error
    except RuntimeError as error:
        raise ProcessError(
            f"the processes did not find each other: {str(error).splitlines()[0]}; call initialize "
            "before anything else uses jax; to run this one alone, give num_processes=1"
        ) from error
    if (count := connection().num_processes) > 1:
        _watches.append(_Watch(patience))
        atexit.register(leave)  # before jax's own end, which waits longer and says less
        sys.excepthook = _end_on_exception
    return count


def _part_fork() -> None:
    """Part a forked process from the run: jax's own end would tell the others, crash or hang."""
    _watches.clear()
    flush = sys.stdout.flush, sys.stderr.flush
    # No handler learns the status of `sys.exit`: it is 0, and 1 after an exception.
    atexit.register(lambda: [*(f() for f in flush), os._exit(int(hasattr(sys, "last_value")))])


InitializeArgs = tuple[str | None, int | None, int | None]


def _meet(given: InitializeArgs, listens: str | None, wait: float) -> InitializeArgs:
    from jax._src.clusters import ClusterEnv

    if has_started():
        return given  # which jax refuses
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM
    find = ClusterEnv.auto_detect_unset_distributed_params
    address, count, index, _ = find(*given, None, None, int(wait))
    if address is None or count is None or index is None:
        return given
    meet(address, count, index, listens, wait)
    # Mutual TLS checks the name of the host that is connected to.
    if index == 0 or getattr(jax.config, "jax_mtls_cert_file", None):
        return given
    return relay(address, lambda: [x.lose_coordinator("is gone") for x in _watches]), count, index


class _Watch:
    """Looks after the other processes, in two threads: a call of the coordinator may hang."""

    def __init__(self, patience: float) -> None:
        self.patience, self.interval = patience, patience / 25
        self.index, self.count = connection().process_id, connection().num_processes
        self.is_over, self.remedy = threading.Event(), ""
        self._answered = time.monotonic()
        self._signs: dict[int, tuple[str, float]] = {}  # the last of each process, and since when
        getattr(os, "register_at_fork", dict)(after_in_child=_part_fork)  # Windows has none
        for run in (self._exchange, self._miss_coordinator):
            threading.Thread(target=run, name="zerojax watch", daemon=True).start()

    def tell(self, status: int, message: str) -> bool:
        """Tell all processes that, and with which status, they have to end; whether it worked."""
        told = f"{_FAILED}{self.index}", f"{status} {message}"

        def call() -> None:
            with contextlib.suppress(*_LOST):
                connection().client.key_value_set(*told)

        thread = threading.Thread(target=call, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts none while it ends
            call()
            return True
        thread.join(self.patience)  # a coordinator that hangs does not answer
        return not thread.is_alive()

    def exit(self, status: int) -> NoReturn:
        """End this process when the others have learned why, and not by a collective that broke.

        Process 0 is the coordinator: it goes when the others that live have taken their signs of
        life back, and so have read why.
        """
        time.sleep(2 * self.interval)
        until = time.monotonic() + self.patience
        with contextlib.suppress(*_LOST):
            connection().client.key_value_delete(f"{_ALIVE}{self.index}")
            while self.index == 0 and time.monotonic() < until:
                left = connection().client.key_value_dir_get(_ALIVE)
                time.sleep(self.interval)
                if not left:
                    break
        os._exit(status)

    def _exchange(self) -> None:
        for number in itertools.count():
            with contextlib.suppress(*_LOST):  # the other thread sees for how long
                told = self._ask(str(number))
                self._answered = time.monotonic()
                status, _, message = told.partition(" ")
                if told and self._says(message):
                    self.exit(int(status))
            if self.is_over.wait(self.interval):
                return

    def _ask(self, sign: str) -> str:
        """Give a sign of life, and return what another process has told, if anything."""
        client = connection().client
        client.key_value_set(f"{_ALIVE}{self.index}", sign, allow_overwrite=True)
        if failed := client.key_value_dir_get(_FAILED):
            return failed[0][1]
        if self.index == 0 and (lost := self._lost(dict(client.key_value_dir_get(_ALIVE)))):
            self.tell(1, lost)
            return f"1 {lost}"
        return ""

    def _lost(self, signs: dict[str, str]) -> str:
        now, lost = time.monotonic(), ""
        for index in range(self.count):
            sign = signs.get(f"{_ALIVE}{index}", "")
            before, since = self._signs.get(index, (None, now))
            if sign != before:
                self._signs[index] = sign, now
            elif now - since > self.patience:
                lost = f"process {index} gave no sign of life for {self.patience:.0f} s" + _CAUSES
                connection().client.key_value_delete(f"{_ALIVE}{index}")
        return lost

    def _miss_coordinator(self) -> None:
        while not self.is_over.wait(self.interval):
            if time.monotonic() - self._answered > self.patience:
                self.lose_coordinator(f"did not answer for {self.patience:.0f} s")

    def lose_coordinator(self, how: str) -> None:
        if self._says(f"process 0, the coordinator, {how}{_CAUSES}"):
            os._exit(1)

    def _says(self, message: str) -> bool:
        if self.is_over.is_set():
            return False
        self.is_over.set()
        os.write(2, f"zerojax: {message}{self.remedy}\n".encode())
        return True


_CAUSES = ": it was killed or stopped, or has lost its network"
#: The watch of this process, if there is one.
_watches: list[_Watch] = []


def set_remedy(text: str) -> None:
    """Say how to go on, for the last line of this process, should it end because of another."""
    for watch in _watches:
        watch.remedy = f"; {text}"


def fail(message: str, status: int = 1) -> None:
    """End this process and, with the message and the status, all others; not one that is alone.

    It returns only where there are no others.
    """
    for watch in _watches:
        watch.is_over.set()
        has_told = watch.tell(status, f"process {watch.index} failed: {message}")
        sys.stdout.flush()
        sys.stderr.flush()
        if has_told:
            watch.exit(status)
        os._exit(status)


def _end_on_exception(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if issubclass(kind, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        for watch in _watches:  # a collective that broke: the watch finds whose end was the cause
            line = str(error).partition("\n")[0]
            os.write(2, f"zerojax: {line}; waiting to learn whose end it was\n".encode())
            if watch.is_over.wait(watch.patience + 2 * watch.interval):
                time.sleep(2 * watch.patience)  # meanwhile its thread ends this process
    sys.__excepthook__(kind, error, trace)
    fail(f"{kind.__name__}: {error}")


def leave() -> None:
    """Wait for the other processes at the end of the run, and part from them."""
    for watch in _watches:
        try:
            gather_texts("the end", "", watch.patience)
        except (*_LOST, ProcessesDifferError) as error:
            fail(str(error))
        watch.is_over.set()
        jax.distributed.shutdown()
    _watches.clear()
