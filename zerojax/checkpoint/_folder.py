"""A run's checkpoints: one folder per step, the newest that is whole, and which to keep."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

from zerojax._types import PyTree
from zerojax.checkpoint._files import (
    REMOVED,
    DamagedCheckpointError,
    local_path,
    remove,
    wrong_sizes,
)
from zerojax.checkpoint._manifest import MANIFEST, Manifest, read_manifest
from zerojax.checkpoint._orbax import require_orbax
from zerojax.checkpoint._restore import read_state
from zerojax.checkpoint._save import PendingSave, check_step, start_save
from zerojax.layout import Layout
from zerojax.processes import gather_texts, set_remedy, together

#: Errors that tell of one checkpoint and not of what is wanted.
DAMAGE = (DamagedCheckpointError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored."""

    state: PyTree  # in the structure and placement that were asked for
    manifest: Manifest  # of the checkpoint; it has the step and the position in the data
    path: Path  # the checkpoint's folder
    #: what is wrong with newer folders, damaged or cut short; they were left alone
    passed_over: Mapping[Path, str]


class Checkpoints:
    """The checkpoints of a run: `directory/STEP` each.

    Saving goes on in the background, one at a time; leaving the `with` block waits for the last,
    and a program that ends without one, or `wait`, may lose it.

    Args:
        directory: the folder, which all processes see; made where it is missing. It is on a local
            or mounted file system: URLs such as "gs://bucket" are refused, here and everywhere.
        keep: how many of the newest to keep; None keeps all. Others are removed when one is whole,
            but never what was saved last. What can't be removed is left with a warning.
        tx: the optimizer, as `save` and `restore` take it.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        tx: optax.GradientTransformation | None = None,
    ) -> None:
        require_orbax()
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ValueError(f"keep is {keep!r}; give at least 1, or None to keep all")
        self.directory = local_path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is no folder; give the one with a folder per step")
        if _is_saved(self.directory):
            raise ValueError(
                f"{self.directory} is a checkpoint itself; give the folder above it, or use "
                "zerojax.restore"
            )
        self._keep = keep
        self._tx = tx
        self._pending: PendingSave | None = None
        self._damaged: set[Path] = set()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self.wait()

    def save(
        self,
        step: int,
        state: PyTree,
        layout: Layout,
        *,
        data: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> PendingSave:
        """Start to save a step, which names the checkpoint; see `zerojax.save`.

        Returns when the devices are free to go on. A damaged checkpoint of the same step is moved
        aside, to `STEP.damaged`.

        Raises:
            ValueError: the step is saved already, or negative. Also what went wrong with the save
                before.
        """
        self.wait()
        step = check_step(step)
        path = self.directory / str(step)
        with together("save"):
            if jax.process_index() == 0:
                self._make_room(path)
        self._damaged.discard(path)
        then = functools.partial(self._end_save, path)
        self._pending = start_save(
            path, state, layout, tx=self._tx, step=step, data=data, metadata=metadata, then=then
        )
        return self._pending

    def wait(self) -> None:
        """Wait for the save that is under way; raises what went wrong with it, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def restore_latest(self, layout: Layout, like: PyTree) -> Restored | None:
        """Restore the newest checkpoint that is whole, as `zerojax.restore` does; None without any.

        Raises:
            DamagedCheckpointError: there are checkpoints, and all are damaged.
            IncompatibleCheckpointError: the newest whole one does not fit.
        """
        self.wait()
        passed_over: dict[Path, str] = {}
        names = " ".join(path.name for path in _folders(self.directory).values())
        for name in reversed(
            gather_texts("restore", names)[0].split()
        ):  # as the first process sees them
            path = self.directory / name
            try:
                manifest, state = read_state(path, layout, like, tx=self._tx)
            except DAMAGE as error:
                passed_over[path] = str(error) if _is_saved(path) else _cut_short(path)
                self._damaged |= {path} if _is_saved(path) else set()
                continue
            set_remedy(f"start again to go on from {path}")
            return Restored(state=state, manifest=manifest, path=path, passed_over=passed_over)
        if self._damaged & passed_over.keys():
            raise DamagedCheckpointError(self.directory, passed_over.values())
        return None

    def steps(self) -> dict[int, Path]:
        """Find the checkpoints that seem whole, without reading their arrays, by step in order."""
        return find_checkpoints(self.directory)

    def _make_room(self, path: Path) -> None:
        """Move a damaged checkpoint aside, so that a new one can take its place."""
        if not _is_saved(path):
            return
        if path not in self._damaged and path in self.steps().values():
            raise ValueError(f"{path} holds a checkpoint already; save another step")
        aside = path.with_name(f"{path.name}.damaged")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}+")
        path.rename(aside)

    def _end_save(self, saved: Path) -> None:
        """Remove old checkpoints, and what an earlier removal has left.

        What was just saved stays: who went back to an older step saves below newer ones. What goes
        wrong here is no failure of the save.
        """
        set_remedy(f"start again to go on from {saved}")
        if self._keep is None or jax.process_index():
            return
        try:
            for left_over in self.directory.glob(f"*{REMOVED}"):
                if left_over.name.removesuffix(REMOVED).isdecimal():
                    remove(left_over)
            found = [path for path in self.steps().values() if path not in self._damaged]
            for path in found[: -self._keep]:
                if path != saved:
                    remove(path)
        except OSError as error:
            warnings.warn(f"old checkpoints can't be removed ({error})", stacklevel=2)


def find_checkpoints(
    directory: str | os.PathLike[str],
    passed_over: Callable[[Path, str], object] = lambda path, reason: None,
) -> dict[int, Path]:
    """Find the checkpoints in folders that are named by a step, in the order of steps.

    A folder without a manifest is a save that was cut short. It is passed over, and so is one that
    lacks files, or has files of another size; what is in the files is not read here. Each is told
    to `passed_over(folder, reason)`.
    """
    found = {}
    for step, path in _folders(local_path(directory)).items():
        try:
            wrong = wrong_sizes(path, read_manifest(path).files)
            if wrong:
                raise DamagedCheckpointError(path, wrong.values())
            found[step] = path
        except (ValueError, OSError) as error:
            passed_over(path, str(error) if _is_saved(path) else _cut_short(path))
    return found


def _cut_short(path: Path) -> str:
    return f"{path} is a save that was cut short: it has no {MANIFEST}"


def _folders(root: Path) -> dict[int, Path]:
    listed = root.iterdir() if root.is_dir() else ()
    found = {int(path.name): path for path in listed if path.name.isdecimal() and path.is_dir()}
    return dict(sorted(found.items()))


def _is_saved(path: Path) -> bool:
    return (path / MANIFEST).exists()
