"""A run's checkpoints: one folder per step, the newest that is whole, and which to keep."""

import dataclasses
import functools
import glob
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from zerojax._arguments import is_whole_number
from zerojax._types import PyTree
from zerojax.checkpoint import _files
from zerojax.checkpoint._local import Arrays, LocalCopies, cuts
from zerojax.checkpoint._manifest import MANIFEST, Manifest, read_manifest, to_text, write_manifest
from zerojax.checkpoint._orbax import require_orbax
from zerojax.checkpoint._restore import as_stored, read_agreed, read_state, rebuilt
from zerojax.checkpoint._save import Facts, PendingSave, check_step, describe, prepare, start_save
from zerojax.layout import Layout, check_layout
from zerojax.processes import gather_texts, set_remedy, together

#: Within a run's folder: what the copies on the hosts hold, with a manifest for each.
LOCAL = "local"
#: Errors that tell of one checkpoint and not of what is wanted.
DAMAGE = (_files.DamagedCheckpointError, OSError)


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

    >>> with zerojax.Checkpoints("runs/one", keep=3) as checkpoints:
    ...     checkpoints.save(int(state.step), state, layout, data={"next_batch": 7})
    ...     restored = checkpoints.restore_latest(layout, step.abstract_state())

    Args:
        directory: the folder, which all processes see; made where it is missing. It is on a local
            or mounted file system: URLs such as "gs://bucket" are refused, here and everywhere.
        keep: how many of the newest to keep; None keeps all. Others are removed when one is whole,
            but never what was saved last. What can't be removed is left with a warning.
        tx: the optimizer, as `save` and `restore` take it.
        local: a folder on each host's own disk or in its memory, for `save_local`.
        replicator: whether a service of the cluster brings hosts what others have saved in `local`,
            as GKE's multi-tier checkpointing does. Without one, several hosts have to hold copies
            of the whole state: `make_layout(axis="data", batch_axes=("host", "data"))`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = None,
        tx: optax.GradientTransformation | None = None,
        local: str | os.PathLike[str] | None = None,
        replicator: bool = False,
    ) -> None:
        require_orbax()
        if replicator and local is None:
            raise ValueError("replicator=True copies hosts' folders; give local=, where they are")
        if keep is not None and not is_whole_number(keep, 1):
            raise ValueError(f"keep is {keep!r}; give at least 1, or None to keep all")
        self.directory = _files.local_path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"{self.directory} is no folder; give the one with a folder per step")
        if _is_saved(self.directory):
            told = f"{self.directory} is a checkpoint itself; give the folder above it"
            raise ValueError(f"{told}, or use zerojax.restore")
        self._keep, self._tx, self._replicator = keep, tx, replicator
        self._local = None if local is None else _files.local_path(local)
        if self._local is not None and glob.has_magic(str(self._local)):
            told = f"local={str(self._local)!r} has a [, * or ?, which orbax takes for a pattern"
            raise ValueError(f"{told}; give another path")
        self._copies: LocalCopies | None = None
        self._pending: PendingSave | None = None
        self._damaged: set[Path] = set()

    def __repr__(self) -> str:
        return f"<Checkpoints: steps {list(self.steps())} in {self.directory}>"

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"zerojax: a save failed too: {failed}")
        finally:
            if self._copies is not None:
                self._copies.manager.close()

    def save(
        self, step: int, state: PyTree, layout: Layout, *, data: Any = None, metadata: Facts = None
    ) -> PendingSave:
        """Start to save a step, which names the checkpoint; see `zerojax.save`.

        Returns when devices are free to go on. A damaged one of the step becomes `STEP.damaged`.

        Raises:
            ValueError: the step, or a later one, is saved, or it is negative. Also what went wrong
                with the save before.
        """
        self.wait()
        step = check_step(step)
        path = self.directory / str(step)
        with together("save"):
            if jax.process_index() == 0:
                self._check_newest(step, path)
                aside = path.with_name(f"{path.name}.damaged")
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}+")
                if _is_saved(path):
                    path.rename(aside)
        self._damaged.discard(path)
        then = functools.partial(self._end_save, path)
        self._pending = start_save(
            path, state, layout, tx=self._tx, step=step, data=data, metadata=metadata, then=then
        )
        return self._pending

    def _check_newest(self, step: int, path: Path) -> None:
        """Refuse a step that `restore_latest` would not take: it goes by their numbers."""
        whole = {at: x for at, x in self.steps().items() if x not in self._damaged}
        told = "go on from it (restore_latest), or give another folder"
        if step in whole:
            raise ValueError(f"{path} holds a checkpoint already; {told}")
        if whole and (last := max(whole)) > step:
            raise ValueError(f"{whole[last]} is of a later step than {step}: move it away, {told}")

    def save_local(
        self, step: int, state: PyTree, layout: Layout, *, data: Any = None, metadata: Facts = None
    ) -> None:
        """Start to save a copy of a step in the folders `local` of the hosts, for the one before.

        It takes what writing to the host takes, so it can be done every few steps. A run that
        starts again on the same mesh goes on from it (`restore_latest`) where `save` has nothing
        newer that is whole. Orbax writes and reads it, without digests.

        Raises:
            ValueError: there is no `local`, no other host holds a copy of some leaf, or the folders
                have a copy of this step or a newer one.
        """
        if self._local is None:
            raise ValueError("save_local needs Checkpoints(..., local=), a folder on each host")
        given = {"tx": self._tx, "step": check_step(step), "data": data, "metadata": metadata}
        manifest, arrays = prepare("save_local", state, layout, folder=str(self.directory), **given)
        copies = self._open_copies(layout, arrays)
        copies.save(step, arrays)
        with together("save_local"):
            if jax.process_index() == 0:
                described = self.directory / LOCAL / str(step)
                described.mkdir(parents=True, exist_ok=True)
                more = {"fits": _fits(manifest, arrays), "metadata": manifest.metadata}
                write_manifest(described, dataclasses.replace(manifest, metadata=more))
                kept = {str(number) for number in copies.steps[-2:]}
                for path in described.parent.iterdir():
                    if path.name.isdecimal() and path.name not in kept:
                        _files.remove(path)

    def _open_copies(self, layout: Layout, arrays: Arrays) -> LocalCopies:
        assert self._local is not None
        assert isinstance(layout.mesh, Mesh)  # where arrays are, there are devices
        if self._copies is None:
            shared, more = self.directory / LOCAL / "orbax", {"replicator": self._replicator}
            self._copies = LocalCopies(self._local, shared, layout.mesh, arrays, **more)
        return self._copies

    def wait(self) -> None:
        """Wait for the saves that are under way; raises what went wrong with them, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
        if self._copies is not None:
            self._copies.manager.wait_until_finished()

    def restore_latest(self, layout: Layout, like: PyTree) -> Restored | None:
        """Restore the newest checkpoint that is whole, as `zerojax.restore` does; None without any.

        With `local` that may be a copy on the hosts, for the same layout alone. Where None comes of
        saves that were cut short, a warning names them.

        Raises:
            DamagedCheckpointError: there are checkpoints, and all are damaged.
            IncompatibleCheckpointError: the newest whole one does not fit.
        """
        check_layout(layout, "checkpoints.restore_latest(layout, like)")
        self.wait()
        passed_over: dict[Path, str] = {}
        names = " ".join(path.name for path in _folders(self.directory).values())
        named = gather_texts("restore", names)[0].split()  # as the first process sees them
        for name in reversed(["-1", *named]):  # a copy on the hosts goes before older saves
            if restored := self._restore_local(layout, like, int(name), passed_over):
                return restored
            if name == "-1":
                break
            path = self.directory / name
            try:
                manifest, state = read_state(path, layout, like, self._tx)
                _check_step(path, manifest)
            except DAMAGE as error:
                passed_over[path] = str(error) if _is_saved(path) else _cut_short(path)
                self._damaged |= {path} if _is_saved(path) else set()
                continue
            set_remedy(f"start again to go on from {path}")
            return Restored(state=state, manifest=manifest, path=path, passed_over=passed_over)
        is_gone = any(not (self.directory / name).exists() for name in named)
        if self._damaged & passed_over.keys() or is_gone:  # removed while it was read
            raise _files.DamagedCheckpointError(self.directory, passed_over.values())
        if passed_over:
            told = f"nothing is restored: {'; '.join(passed_over.values())}; the next save of the"
            warnings.warn(f"{told} step replaces it: move away what you need of it", stacklevel=2)
        runs = sorted(x.parents[1] for x in self.directory.glob(f"*/*/{MANIFEST}"))
        if runs and runs[0].name != LOCAL and not passed_over:
            warnings.warn(f"nothing is restored: checkpoints are in {runs[0]}", stacklevel=2)
        return None

    def _restore_local(
        self, layout: Layout, like: PyTree, saved: int, passed_over: dict[Path, str]
    ) -> Restored | None:
        if self._local is None:
            return None
        wanted = {path: x for path, x in as_stored(like, layout).items() if x.size}
        copies = self._open_copies(layout, wanted)
        passed_over.update(copies.passed_over)
        if not copies.steps or copies.steps[-1] <= saved:
            return None
        step = copies.steps[-1]
        path = self._local / str(step)
        try:
            manifest = read_agreed(self.directory / LOCAL / str(step))
        except (ValueError, OSError) as error:
            passed_over[path] = str(error)
            return None
        if manifest.metadata["fits"] != _fits(describe(like, layout, self._tx), wanted):
            passed_over[path] = f"{path} was saved under another layout, and fits that alone"
            return None
        manifest = dataclasses.replace(manifest, metadata=manifest.metadata["metadata"])
        state = rebuilt(copies.restore(step, wanted), like)
        return Restored(state=state, manifest=manifest, path=path, passed_over=passed_over)

    def steps(self) -> dict[int, Path]:
        """Find the checkpoints that seem whole, without reading their arrays, by step in order."""
        return find_checkpoints(self.directory)

    def _end_save(self, saved: Path) -> None:
        """Remove old checkpoints, and what an earlier removal has left.

        What goes wrong here is no failure of the save.
        """
        set_remedy(f"start again to go on from {saved}")
        if self._keep is None or jax.process_index():
            return
        try:
            for left_over in self.directory.glob(f"*{_files.REMOVED}"):
                if left_over.name.removesuffix(_files.REMOVED).isdecimal():
                    _files.remove(left_over)
            found = [path for path in self.steps().values() if path not in self._damaged]
            for path in found[: -self._keep]:
                _files.remove(path)
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
    for step, path in _folders(_files.local_path(directory)).items():
        try:
            _check_step(path, manifest := read_manifest(path))
            if wrong := _files.wrong_sizes(path, manifest.files):
                raise _files.DamagedCheckpointError(path, wrong.values())
            found[step] = path
        except (ValueError, OSError) as error:
            passed_over(path, str(error) if _is_saved(path) else _cut_short(path))
    return found


def _fits(manifest: Manifest, arrays: Arrays) -> str:
    """Return a digest of what has to be as it was for a copy on the hosts to fit."""
    plain = dataclasses.replace(manifest, step=None, data=None, metadata={}, written="")
    placed = {path: (x.shape, str(x.dtype), cuts(x)) for path, x in arrays.items()}
    return _files.digest_text(to_text(plain) + str(placed))


def _check_step(path: Path, manifest: Manifest) -> None:
    """Refuse a folder that was renamed: later saves would be taken for older ones."""
    if manifest.step not in (None, int(path.name)):
        told = f"it holds step {manifest.step}; rename the folder"
        raise _files.DamagedCheckpointError(path, [told])


def _cut_short(path: Path) -> str:
    return f"{path} is a save that was cut short: it has no {MANIFEST}"


def _folders(root: Path) -> dict[int, Path]:
    listed = root.iterdir() if root.is_dir() else ()
    named = [path for path in listed if path.name.isdecimal() and path.is_dir()]
    found = {int(path.name): path for path in named if str(int(path.name)) == path.name}
    return dict(sorted(found.items()))


def _is_saved(path: Path) -> bool:
    return (path / MANIFEST).exists()
