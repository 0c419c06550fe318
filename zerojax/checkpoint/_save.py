"""Saving: every array by the devices that hold it, the manifest last."""

import atexit
import contextlib
import dataclasses
import datetime as dt
import json
import operator
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import leaves_by_path
from zerojax._types import PyTree
from zerojax.checkpoint._files import REMOVED, FileDigest, digest_files, local_path, remove, sync
from zerojax.checkpoint._leaves import check_placed, optimizer_nodes, placed_leaves, saved_leaves
from zerojax.checkpoint._manifest import ARRAYS, MANIFEST, Manifest, to_text, write_manifest
from zerojax.checkpoint._orbax import UNFINISHED, Writing, check_dtypes, require_orbax
from zerojax.layout import Layout, check_layout
from zerojax.processes import agree, check_copies, gather_texts, together

#: Texts as keys; what they name has to go into JSON.
Facts: TypeAlias = Mapping[str, Any] | None
#: Seconds after which a process sees a folder that another has made: NFS looks anew each minute.
LAG = 60.0

_unwaited: weakref.WeakSet["PendingSave"] = weakref.WeakSet()


def _end_all() -> None:
    """Wait for what a program that ends has not waited for, and report what was lost.

    Python 3.12 and later start no threads from then on, which orbax needs: it is too late there.
    """
    for pending in list(_unwaited):
        try:
            pending.wait()
        except BaseException as error:  # noqa: BLE001  # nobody is left to catch it
            told = f"zerojax: {pending.path} was not saved, the program ended before ({error})"
            sys.stderr.write(f"{told}; wait for it: use `with Checkpoints(...)`, or call wait()\n")


# Before the threads of the standard library's executors are ended; atexit comes after that.
getattr(threading, "_register_atexit", atexit.register)(_end_all)


class PendingSave:
    """A save that goes on in the background; the checkpoint is there when `wait` has returned.

    The state may be donated meanwhile: what is to be written has been copied from the devices, or
    is kept from being overwritten.
    """

    def __init__(self, path: Path, finish: Callable[[], None]) -> None:
        self.path = path
        self._finish = finish
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"save {path}")
        _unwaited.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; raises what went wrong."""
        self._thread.join()
        _unwaited.discard(self)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # noqa: BLE001  # raised by wait()
            code = re.search(r"os_error_code='(\d+)'", str(error))  # which tensorstore tells
            told = code and OSError(int(code[1]), os.strerror(int(code[1])), str(self.path))
            self._error = told or error


def _finish(root: Path, manifest: Manifest, writing: Writing) -> None:
    """Wait for the arrays, take digests, each process of what it wrote, and write the manifest."""
    index = jax.process_index()
    with together(f"{root}: writing"):
        writing.wait()
    with together(f"{root}: joining"):
        if index == 0:
            writing.join()
            (root / UNFINISHED).rename(root / ARRAYS)
    with together(f"{root}: digests"):
        _await_shared(root / ARRAYS)
        own = digest_files(root, _files_of(root / ARRAYS, index))
    told = gather_texts(f"{root}: digests told", json.dumps(own, default=dataclasses.asdict))
    with together(f"{root}: manifest"):
        if index == 0:
            each = {name: file for text in told for name, file in json.loads(text).items()}
            files = {name: FileDigest(**file) for name, file in each.items()}
            now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            write_manifest(root, dataclasses.replace(manifest, files=files, written=now))
            sync(root.parent)


def _await_shared(arrays: Path) -> None:
    """Refuse a folder that process 0 has on a disk of its own; one on a network may lag."""
    end = time.monotonic() + LAG
    while not arrays.is_dir():
        if time.monotonic() > end:
            told = f"{arrays.parent} is not the folder that process 0 writes to: all processes have"
            raise FileNotFoundError(f"{told} to see the same, on a disk that they share")
        time.sleep(LAG / 100)


def _files_of(arrays: Path, index: int) -> list[Path]:
    """List the files that a process answers for: its own, and the first one all that is shared."""
    own, others = arrays / f"ocdbt.process_{index}", set(arrays.glob("ocdbt.process_*"))
    found = (path for path in arrays.rglob("*") if path.is_file())
    return [x for x in found if own in x.parents or (not index and not others & {*x.parents})]


def prepare(
    name: str,
    state: PyTree,
    layout: Layout,
    *,
    folder: str,
    tx: optax.GradientTransformation | None = None,
    step: int | None = None,
    **told: Any,
) -> tuple[Manifest, dict[str, jax.Array]]:
    """Describe a state that all processes hold alike, and return its arrays as they are stored."""
    with together(name):
        check_layout(layout, f"{name}(directory, state, layout)")
        given, state = state, placed_leaves(state, layout.sharding(P()))
        leaves = leaves_by_path(state)
        number = None if step is None else check_step(step)
        if step is None and (found := leaves.get("step")) is not None:
            is_number = not found.shape and jnp.issubdtype(found.dtype, jnp.integer)
            number = int(found) if is_number else None
        manifest = describe(state, layout, tx, step=number, **told)
        if not leaves and not manifest.optimizer:
            raise ValueError(f"the state is {given!r}, and has no leaf; give the tree to save")
        text = to_text(manifest)  # refuses what is not JSON
        check_placed(given, layout)
        arrays = {
            path: jax.random.key_data(x) if manifest.leaves[path].is_key else x
            for path, x in leaves.items()
            if x.size
        }
        check_dtypes(arrays)
    agree(name, {"folder": folder, "checkpoint": text})
    return manifest, arrays


def describe(
    state: PyTree,
    layout: Layout,
    tx: optax.GradientTransformation | None,
    *,
    step: int | None = None,
    data: Any = None,
    metadata: Facts = None,
) -> Manifest:
    """Say what a state of arrays or shapes is and lies under."""
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata is a {type(metadata).__name__}; give a dict with texts as keys")
    return Manifest(
        stage=layout.stage,
        axis=layout.axis,
        mesh=dict(layout.mesh.shape),
        optimizer=optimizer_nodes(state),
        leaves=saved_leaves(state, layout, tx),
        step=step,
        data=data,
        metadata=dict(metadata or {}),
    )


def start_save(
    directory: str | os.PathLike[str],
    state: PyTree,
    layout: Layout,
    *,
    then: Callable[[], None] = lambda: None,
    **told: Any,
) -> PendingSave:
    """Save as `save` does, which says what `told` may be, and return when devices are free."""
    require_orbax()
    with together("save"):
        root = local_path(directory)
        _check_free(root)
    manifest, arrays = prepare("save", state, layout, folder=str(root), **told)
    check_copies("save", arrays)
    with contextlib.ExitStack() as stack:
        with together("save"):
            if jax.process_index() == 0:
                root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_sole_save(root))
                _clear(root)
                (root / UNFINISHED).mkdir()
        with together("save"):
            writing = Writing(root / UNFINISHED, arrays)
        held = stack.pop_all()

    def finish() -> None:
        with held:
            _finish(root, manifest, writing)
            then()

    return PendingSave(root, finish)


def _check_free(root: Path) -> None:
    if (root / MANIFEST).exists():
        raise ValueError(f"{root} holds a checkpoint already; save to another directory")


@contextlib.contextmanager
def _sole_save(root: Path) -> Iterator[None]:
    """Keep other saves out of a folder, and leave nothing unfinished in it.

    The lock ends with the process, however that ends. Some mounted file systems have none.
    """
    with (root / ".lock").open("a") as file:
        try:
            import fcntl  # which Windows has not

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_sole = os.fstat(file.fileno()).st_nlink > 0  # else a save has ended since the open
        except (ImportError, OSError) as error:
            is_sole = not isinstance(error, BlockingIOError)
        if not is_sole:
            told = f"{root} is being written by another save; save to another directory"
            raise ValueError(f"{told}, or again where that one fails")
        try:
            _check_free(root)
            yield
        finally:  # a full disk has room again for what comes next
            if (root / UNFINISHED).exists():
                remove(root / UNFINISHED)
            (root / ".lock").unlink(missing_ok=True)


def check_step(step: Any) -> int:
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise TypeError(f"step is a {type(step).__name__}; give a whole number")
    if operator.index(step) < 0:
        raise ValueError(f"step is {step!r}; give 0 or more")
    return operator.index(step)


def _clear(root: Path) -> None:
    arrays = root / ARRAYS
    if arrays.exists() and not (arrays / "_METADATA").exists():
        raise ValueError(f"{arrays} is there and no checkpoint's; save to another directory")
    for name in (ARRAYS, UNFINISHED):
        for left_over in (root / f"{name}{REMOVED}", root / name):  # removed in part, then whole
            if left_over.exists():
                remove(left_over)


def save(
    directory: str | os.PathLike[str],
    state: PyTree,
    layout: Layout,
    *,
    tx: optax.GradientTransformation | None = None,
    step: int | None = None,
    data: Any = None,
    metadata: Facts = None,
) -> None:
    """Save a tree of arrays as one checkpoint; returns when it is on disk.

    Each process writes the shards of its own devices, each shard once: replicas of a leaf share the
    writing. A save that is cut short leaves no manifest, and so no checkpoint.

    Args:
        directory: the checkpoint's own folder, which all processes see; made where it is missing.
        state: any pytree of arrays, a `TrainState` for instance, in its stored form.
        layout: the placement that the state lives under: `step.layout`.
        tx: the optimizer, wrapped by `sharded` or not; needed only where a leaf of a state of your
            own loop may be padded or not, which an error then says.
        step: steps done; where it is left out, the leaf `step` of the state.
        data: the position in the data, fit for JSON.
        metadata: what else to keep, fit for JSON.

    Raises:
        ValueError: the directory holds a checkpoint already or another save writes one there, there
            is no leaf, two have the same path, or a train state was made under another layout.
        OSError: the disk is full, or can't be written to.
        TypeError: `data` or `metadata` is not fit for JSON, or a leaf is no array.
    """
    start_save(directory, state, layout, tx=tx, step=step, data=data, metadata=metadata).wait()
