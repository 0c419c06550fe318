"""Texts that processes exchange through the coordinator, from any thread and with a deadline.

Collectives of devices can do neither: they wait for ever, and must run in one order everywhere.
"""

import contextlib
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

#: Seconds to wait for the others, who may still read data, trace a program or write to a disk.
WORK = 20 * 60.0
#: Seconds after which one of those that wait says for whom.
NOTED = 60.0
_rounds: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


class ProcessError(RuntimeError):
    """Another process has failed, or did not come."""


class ProcessesDifferError(ValueError):
    """The processes of a run do not do the same, or do not hold the same."""


def connection() -> Any:
    """Return what `jax.distributed` holds and has no public name for: the key-value `client`."""
    from jax._src import distributed

    if distributed.global_state.client is None:
        told = "the processes have no coordinator; write zerojax.processes.initialize(), or"
        raise ProcessError(f"{told} jax.distributed.initialize(), before anything else uses jax")
    return distributed.global_state


def gather_texts(name: str, text: str, seconds: float = WORK) -> list[str]:
    """Return what every process says, in their order; all call it.

    Calls from main threads are matched in order, and have one name; those of others by name.

    Raises:
        ProcessError: a process did not come within `seconds`.
        ProcessesDifferError: the processes came for different things.
    """
    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return [text]
    channel = "main" if threading.current_thread() is threading.main_thread() else name
    client, root = connection().client, f"zerojax/{channel}/{next(_rounds[channel])}"
    client.key_value_set(f"{root}/{index}", f"{name}\n{text}")
    note = threading.Timer(NOTED, _note, (client, root, name))
    with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread while it ends
        note.start()
    try:
        client.wait_at_barrier(root, int(seconds * 1000))
        said = _said(client, root)
        client.wait_at_barrier(f"{root}/read", int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        missing = set(range(count)) - set(_said(client, root))
        raise ProcessError(
            f"of {count} processes, {', '.join(map(str, missing)) or 'one'} did not come to "
            f"{name!r} within {seconds:.0f} s; do all run the same program?"
        ) from error
    finally:
        note.cancel()
    client.key_value_delete(f"{root}/{index}")
    names, texts = zip(*(said[i].split("\n", 1) for i in range(count)), strict=True)
    if len(set(names)) > 1:
        come = ", ".join(f"process {i} came to {name!r}" for i, name in enumerate(names))
        raise ProcessesDifferError(f"the processes do not run the same program: {come}")
    return list(texts)


def _note(client: Any, root: str, name: str) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # meanwhile the run may have ended
        come = _said(client, root)
        if jax.process_index() == min(come) and len(come) < jax.process_count():
            missing = ", ".join(str(i) for i in range(jax.process_count()) if i not in come)
            told = f"{name!r} waits since {NOTED:.0f} s for process {missing}; all have to call it,"
            sys.stderr.write(f"zerojax: {told} as all compile where a batch's shapes change\n")


def _said(client: Any, root: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(f"{root}/")}


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """Run a block on all processes; where it fails on some, the others raise with their errors."""
    try:
        yield
    except Exception as error:
        gather_texts(name, f"{type(error).__name__}: {error}")
        raise  # when the others know
    told = gather_texts(name, "")
    failed = [f"process {index} failed: {text}" for index, text in enumerate(told) if text]
    if failed:
        raise ProcessError("; ".join(failed))
