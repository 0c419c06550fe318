"""The verdict: whether a checkpoint fits what is wanted, told before anything of it is read.

Stage, mesh and padding never matter. A precision matters only where values would be lost: a leaf
may be read from the masters that it is a cast of, and masters from parameters of their own dtype.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from zerojax._tree import leaves_by_path
from zerojax._types import PyTree
from zerojax.checkpoint import _leaves
from zerojax.checkpoint._leaves import COPIES, LOSS_SCALE_LEAVES, Optimizer, SavedLeaf
from zerojax.checkpoint._manifest import Manifest
from zerojax.layout import Layout

#: Differences that an error names; the others are counted.
MOST_NAMED = 8
UNWANTED = "is in it and not wanted"
Leaves = Mapping[str, SavedLeaf]


class IncompatibleCheckpointError(ValueError):
    """The checkpoint in `path` is not what is wanted; `differences` are lines, each with a leaf."""

    def __init__(self, path: Path, differences: Iterable[str], remedy: str) -> None:
        self.path = path
        self.differences = tuple(differences)
        named = list(self.differences[:MOST_NAMED])
        if len(self.differences) > MOST_NAMED:
            named.append(f"and {len(self.differences) - MOST_NAMED} more")
        super().__init__(f"{path} {remedy}: {'; '.join(named)}")


def find_sources(
    manifest: Manifest, layout: Layout, like: PyTree, root: Path, tx: Optimizer, *, partial: bool
) -> dict[str, str]:
    """Return the saved leaf that each wanted one is read from; a fresh loss scale has none."""
    wanted = _leaves.saved_leaves(like, layout, tx)
    given = {path for path, x in leaves_by_path(like).items() if isinstance(x, jax.Array)}
    fresh = given & set(LOSS_SCALE_LEAVES)  # the save may have had no loss scale
    sources, lines = compare_leaves(manifest.leaves, wanted, fresh, partial)
    lines = _chain_difference(manifest, like, partial=partial) + lines
    if lines:
        remedy = (
            f"(a checkpoint of stage {manifest.stage}, mesh {dict(manifest.mesh)}) does not fit "
            f"this run (stage {layout.stage}, mesh {dict(layout.mesh.shape)}); use the model, "
            "optimizer and precision that it was saved with"
        )
        lost = wanted.keys() - sources.keys() - fresh
        is_bare = lost and all(f"{_leaves.PARAMS}{path}" in manifest.leaves for path in lost)
        if is_bare or any(line.endswith(UNWANTED) for line in lines):
            asked = "{'params': like}" if is_bare else "like"
            call = f"zerojax.restore({str(root)!r}, layout, {asked}, partial=True)"
            remedy += f", or leave leaves in it: {call}"
        raise IncompatibleCheckpointError(root, lines, remedy)
    return sources


def compare_leaves(
    saved: Leaves, wanted: Leaves, fresh: Collection[str] = (), partial: bool = False
) -> tuple[dict[str, str], list[str]]:
    """Return the saved leaf that each wanted one is read from, and lines of what does not fit."""
    sources, missing, differences = {}, [], []
    for path, leaf in wanted.items():
        source = _source(path, leaf, saved, wanted)
        if source in saved:
            sources[path], found = source, saved[source]
            is_kept = _other(path, *COPIES) in wanted
            if found.shape != leaf.shape or not _may_cast(found.dtype, leaf.dtype, lossy=is_kept):
                where = f"{path!r}" if source == path else f"{path!r} (from {source!r})"
                ours, theirs = (f"{x.dtype}{list(x.shape)}" for x in (leaf, found))
                differences.append(f"{where} is {theirs} in it, wanted {ours}")
        elif path not in fresh:
            missing.append(path)
    known = {*wanted, *sources.values(), *LOSS_SCALE_LEAVES}
    extra = [] if partial else [path for path in saved if path not in known]
    lines = [_missing_line(path, saved, extra) for path in missing[:MOST_NAMED]]
    lines += [f"{path!r} is not in it" for path in missing[MOST_NAMED:]]  # near names take time
    return sources, [*lines, *(f"{path!r} {UNWANTED}" for path in extra), *differences]


def _source(path: str, leaf: SavedLeaf, saved: Leaves, wanted: Leaves) -> str:
    """Name the saved leaf to read a wanted one from; the checkpoint may lack it."""
    param, master = _other(path, *reversed(COPIES)), _other(path, *COPIES)
    if param and path not in saved:
        return param
    differs = path in saved and saved[path].dtype != leaf.dtype
    if differs and master in saved and (master in wanted or saved[master].dtype == leaf.dtype):
        return master
    return path


def _other(path: str, part: str, other: str) -> str:
    """Return "masters/w" of "params/w", and "masters" of an array "params"; "" of another part."""
    first, slash, rest = path.partition("/")
    return f"{other}{slash}{rest}" if first == part else ""


def _may_cast(found: str, wanted: str, *, lossy: bool) -> bool:
    if found == wanted:
        return True
    if found.startswith("key<") or wanted.startswith("key<"):
        return False
    if not all(jnp.issubdtype(jnp.dtype(x), jnp.floating) for x in (found, wanted)):
        return False
    own, other = jnp.finfo(found), jnp.finfo(wanted)  # float8 and less JAX promotes to nothing
    holds = own.bits < other.bits and own.nmant <= other.nmant and own.max <= other.max
    return lossy or bool(holds and own.smallest_subnormal >= other.smallest_subnormal)


def _missing_line(path: str, saved: Leaves, extra: list[str]) -> str:
    if path in LOSS_SCALE_LEAVES:
        return f"{path!r} is not in it (for a fresh one give as `like` what `step.init` returns)"
    near = difflib.get_close_matches(path, extra or list(saved), n=1, cutoff=0.5)
    return f"{path!r} is not in it" + (f" (near: {near[0]!r})" if near else "")


def _chain_difference(manifest: Manifest, like: PyTree, *, partial: bool) -> list[str]:
    wanted = _leaves.optimizer_nodes(like)
    saved = {p: x for p, x in manifest.optimizer.items() if not partial or p in wanted}
    ours, theirs = " > ".join(wanted.values()), " > ".join(saved.values())
    if saved == wanted or ours == theirs or not (wanted and saved):
        return []  # where only paths differ, the leaves tell which
    return [f"its optimizer is {theirs}, wanted {ours}"]
