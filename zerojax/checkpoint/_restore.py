"""Restoring: each device reads what it will hold; processes agree on what they found."""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax._tree import is_key, leaves_by_path
from zerojax._types import PyTree
from zerojax.checkpoint import _files
from zerojax.checkpoint._leaves import Optimizer, dtype_of, places
from zerojax.checkpoint._manifest import ARRAYS, Manifest, read_manifest, to_text
from zerojax.checkpoint._orbax import read_arrays, require_orbax
from zerojax.checkpoint._verdict import find_sources
from zerojax.layout import Layout, check_layout
from zerojax.processes import check_present, gather_texts, together

#: Characters of its damages that a process tells the others.
MOST_TOLD = 1 << 16
#: How errors of tensorstore and orbax begin where an array, or a part of it, is not there or none.
UNREADABLE = ("NOT_FOUND", "DATA_LOSS", "Encountered error while reading array")


def restore(
    directory: str | os.PathLike[str],
    layout: Layout,
    like: PyTree,
    *,
    tx: optax.GradientTransformation | None = None,
    partial: bool = False,
) -> PyTree:
    """Restore a checkpoint into the structure and the placement of `like`.

    The stage, the mesh, the padding and the precision may be others than those of the save. Logical
    values are equal to the bit: masters come from parameters of their dtype, parameters from the
    masters that they are a cast of, and wider dtypes hold what narrower ones did. A loss scale that
    was not saved is taken from `like`, where it has its values. Each device reads what it will
    hold, while one of the processes compares every file with its digest. Optimizers are told apart
    by their states: those of adam restore into adamax, yogi and radam, which have the same.

    >>> zerojax.save("runs/best", state, layout)
    >>> state = zerojax.restore("runs/best", layout, step.abstract_state())

    Args:
        directory: what `save` was given.
        layout: the placement of the result: leaves of `like` that name none go where it has the
            parameter of their path or the parameter's state, and others whole to its mesh.
        like: a tree of shapes with shardings, as `step.abstract_state()` returns, or of arrays and
            numbers; what comes back are arrays.
        tx: as for `save`.
        partial: leave what `like` does not ask for in the checkpoint, as for the parameters alone.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: a file is not what was written.
        IncompatibleCheckpointError: leaves are missing, left over, or of another shape or dtype, or
            the optimizer is another; nothing has been read then.
    """
    require_orbax()
    with together("restore"):
        check_layout(layout, "restore(directory, layout, like)")
        check_present(layout.mesh)
    return read_state(_files.local_path(directory), layout, like, tx, partial=partial)[1]


def read_agreed(root: Path) -> Manifest:
    """Read the manifest; raises on every process where one can't read it, or reads another."""
    try:
        manifest = read_manifest(root)
    except (ValueError, OSError) as error:
        _agree(root, [], error)
        raise
    _agree(root, [])
    if len(set(gather_texts("restore", _files.digest_text(to_text(manifest))))) > 1:
        raise _files.DamagedCheckpointError(root, ["the processes read different manifests"])
    return manifest


def read_state(
    root: Path, layout: Layout, like: PyTree, tx: Optimizer, *, partial: bool = False
) -> tuple[Manifest, PyTree]:
    for path, x in leaves_by_path(like).items():
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            told = f"leaf {path!r} of like is a {type(x).__name__}; give a tree of arrays or shapes"
            raise TypeError(f"{told}, as step.abstract_state() returns")
    manifest = read_agreed(root)
    sources = find_sources(manifest, layout, like, root, tx, partial=partial)
    _agree(root, _files.wrong_sizes(root, manifest.files).values())
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].num_bytes)
    own = largest_first[jax.process_index() :: jax.process_count()]
    found, failure = {}, None
    with ThreadPoolExecutor(1) as thread:
        files = {name: manifest.files[name] for name in own}
        wrong = thread.submit(_files.wrong_contents, root, files)
        try:
            found = _read(root, sources, layout, like)
        except Exception as error:  # noqa: BLE001  # raised when the processes have agreed
            failure = error
    damages = wrong.result()
    if not damages and str(failure).startswith(UNREADABLE):
        damages = [f"its arrays are not those of its manifest ({failure})"]
    _agree(root, damages, failure)
    return manifest, rebuilt(found, like)


def rebuilt(found: Mapping[str, jax.Array], like: PyTree) -> PyTree:
    pairs = [(x, found.get(path, x)) for path, x in leaves_by_path(like).items()]
    wrap = jax.random.wrap_key_data
    leaves = [wrap(y, impl=x.dtype) if is_key(x) and y is not x else y for x, y in pairs]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _agree(root: Path, wrong: Iterable[str], error: Exception | None = None) -> None:
    """Raise on every process what any has found `wrong`; `error` where no damage explains it."""
    told = gather_texts("restore", "\n".join(wrong)[:MOST_TOLD])
    failure = "" if error is None else f"a process can't read it ({error})"
    failures = gather_texts("restore", failure)
    if any(told):
        lines = "\n".join(filter(None, told)).splitlines()
        raise _files.DamagedCheckpointError(root, lines) from error
    if error is not None:
        raise error
    if any(failures):
        raise _files.DamagedCheckpointError(root, filter(None, failures))


def _read(root: Path, sources: Mapping[str, str], layout: Layout, like: PyTree) -> dict[str, Any]:
    wanted = {path: x for path, x in as_stored(like, layout).items() if path in sources}
    empty = ((path, x) for path, x in wanted.items() if not x.size)
    found = {path: jnp.zeros(x.shape, x.dtype, device=x.sharding) for path, x in empty}
    while left := {sources[path]: path for path in wanted if path not in found}:
        # Of leaves with one source orbax reads one a call.
        read = read_arrays(root / ARRAYS, {name: wanted[path] for name, path in left.items()})
        found |= {path: read[name] for name, path in left.items()}
    return found


def as_stored(like: PyTree, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, dtype and place that leaves are read in; of keys, those of their data."""
    placed, found = places(like, layout), {}
    for path, x in leaves_by_path(like).items():
        wanted = jax.ShapeDtypeStruct(jnp.shape(x), dtype_of(x))
        if is_key(x):
            wanted = jax.eval_shape(jax.random.key_data, wanted)
        found[path] = jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=placed[path])
    return found
