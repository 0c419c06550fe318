"""Texts that processes exchange through the coordinator, from any thread and with a deadline.

Collectives of devices can do neither: they wait for ever, and must run in one order everywhere.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import jax

#: Seconds to wait for the others, who may still read data, trace a program or write to a disk.
WORK = 20 * 60.0
_rounds: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)


class ProcessError(RuntimeError):
    """Another process has failed, or did not come."""


def connection() -> Any:
    """Return what `jax.distributed` holds and has no public name for: the key-value `client`."""
    from jax._src import distributed

    if distributed.global_state.client is None:
        raise ProcessError(
            "the processes have no coordinator; write zerojax.processes.initialize(), or "
            "jax.distributed.initialize(), before anything else uses jax"
        )
    return distributed.global_state


def gather_texts(name: str, text: str, seconds: float = WORK) -> list[str]:
    """Return what every process says, in their order; all call it with the same names in turn.

    Raises:
        ProcessError: a process did not come within `seconds`.
    """
    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return [text]
    client, number = connection().client, next(_rounds[name])
    root = f"zerojax/{name}/{number}"
    client.key_value_set(f"{root}/{index}", text)
    try:
        client.wait_at_barrier(root, int(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        came = dict(client.key_value_dir_get(f"{root}/"))
        missing = [str(i) for i in range(count) if f"{root}/{i}" not in came]
        raise ProcessError(
            f"of {count} processes, {', '.join(missing) or 'one'} did not come to {name!r} within "
            f"{seconds:.0f} s; do all run the same program?"
        ) from error
    said = dict(client.key_value_dir_get(f"{root}/"))
    if number:  # all have come here, so nobody reads the round before any more
        client.key_value_delete(f"zerojax/{name}/{number - 1}/{index}")
    return [said[f"{root}/{i}"] for i in range(count)]


def agree_on_errors(name: str, error: BaseException | None, seconds: float = WORK) -> None:
    """Raise on all processes where one has failed: its error there, a ProcessError elsewhere."""
    told = "" if error is None else f"{type(error).__name__}: {error}"
    all_told = gather_texts(name, told, seconds)
    if error is not None:
        raise error
    failed = [f"process {index}: {text}" for index, text in enumerate(all_told) if text]
    if failed:
        raise ProcessError("; ".join(failed))
