"""The manifest: what a checkpoint holds, as JSON that is written last and so proves it whole."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from zerojax._extras import extra
from zerojax._plain import made
from zerojax._tree import parameter_ends
from zerojax.checkpoint import _files
from zerojax.checkpoint._leaves import MOST_BYTES, PARAMS, SavedLeaf
from zerojax.checkpoint._orbax import open_array

#: The manifest's name within a checkpoint, beside the folder that orbax writes the arrays to.
MANIFEST = "checkpoint.json"
ARRAYS = "arrays"
FORMAT = 7
#: Stands in the text for the digest while that is taken.
NO_DIGEST = "0" * 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    stage: int  # the ZeRO stage that it was saved under
    axis: tuple[str, ...]  # the mesh axes that ZeRO partitioned over
    mesh: Mapping[str, int]  # axis name to number of devices
    #: path to type of every NamedTuple of the state, as optax makes its chains of
    optimizer: Mapping[str, str] = dataclasses.field(repr=False)
    #: path to what is known of the leaf without reading it
    leaves: Mapping[str, SavedLeaf] = dataclasses.field(repr=False)
    step: int | None  # steps done, where the state or the caller tells
    data: Any  # the position in the data, as the caller gave it
    metadata: Mapping[str, Any]  # what else the caller gave along
    written: str = ""  # when, in UTC (ISO 8601)
    #: path below the checkpoint to size and digest
    files: Mapping[str, _files.FileDigest] = dataclasses.field(default_factory=dict, repr=False)
    format: int = FORMAT  # version of the files' arrangement

    def __post_init__(self) -> None:
        for name, file in self.files.items():
            first, *further = name.split("/")
            if first != ARRAYS or {"..", "."} & {*further} or not name.isprintable():
                raise ValueError(f"the file {name!r} is not below {ARRAYS}/")
            if not 0 <= file.num_bytes <= MOST_BYTES:
                raise ValueError(f"no file has the size of {name!r}")

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


def to_text(manifest: Manifest, **more: Any) -> str:
    def refuse(x: Any) -> None:
        told = f"data= or metadata= holds a {type(x).__name__}, which JSON has not"
        raise TypeError(f"{told}; give numbers, texts, lists and dicts (of an array: x.tolist())")

    try:
        _check_keys([manifest.data, manifest.metadata])
        return json.dumps({**more, **dataclasses.asdict(manifest)}, indent=1, default=refuse)
    except RecursionError as error:
        told = "data= or metadata= holds itself, or more levels than JSON takes; give fewer"
        raise TypeError(told) from error


def _check_keys(x: Any) -> None:
    """Refuse keys that JSON would make texts of, which are other keys when they are read."""
    for key in x if isinstance(x, dict) else ():
        if not isinstance(key, str):
            told = f"data= or metadata= has the key {key!r}, and keys of JSON are texts"
            raise TypeError(f"{told}; give pairs, [[{key!r}, ...], ...], or texts as keys")
    for part in x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ():
        _check_keys(part)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest in one step, after everything that it speaks of."""
    text = to_text(manifest, digest=NO_DIGEST)
    text = text.replace(NO_DIGEST, _files.digest_text(text), 1)
    partial = directory / f"{MANIFEST}.partial"
    partial.write_text(text)
    _files.sync(partial)
    partial.replace(directory / MANIFEST)
    _files.sync(directory)


# {"digest": "0f3c...", "stage": 2, "axis": ["data"], "mesh": {"data": 8},
#  "optimizer": {"opt_state/0": "ScaleByAdamState", "opt_state/1": "EmptyState"},
#  "leaves": {"opt_state/0/mu/w": {"shape": [1009, 7], "stored_shape": [1016, 7],
#    "dtype": "float32", "num_bytes": 28252}},
#  "step": 2, "data": {"next_batch": 3}, "metadata": {}, "written": "2026-11-21T23:45:11+00:00",
#  "files": {"arrays/d/5a1c...": {"num_bytes": 170513, "digest": "9c01..."}}, "format": 7}
def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read what a checkpoint holds; needs neither its arrays nor an accelerator.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: the manifest is not what was written.
        ValueError: another version of zerojax wrote it.
    """
    root = _files.local_path(directory)
    path = root / MANIFEST
    if not path.is_file():
        told = f"no checkpoint in {directory}: it has no {MANIFEST}, which is written last"
        within = sorted(str(found.parent) for found in root.glob(f"*/{MANIFEST}"))
        remedy = f"one of {', '.join(within[:3])}" if within else "one that was saved whole"
        raise FileNotFoundError(f"{told}; give the folder of a checkpoint, {remedy}")
    try:
        text = path.read_bytes().decode()
        found = json.loads(text)
        version, digest = found["format"], found.pop("digest", None)
        is_whole = digest == _files.digest_text(text.replace(str(digest), NO_DIGEST, 1))
        manifest = made(Manifest, found) if is_whole and version == FORMAT else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        wrong = f"{MANIFEST} can't be read ({error!r})"
        raise _files.DamagedCheckpointError(root, [wrong]) from error
    if version != FORMAT and (is_whole or digest is None):
        raise ValueError(f"{path} has format {version!r}; this zerojax reads format {FORMAT}")
    if manifest is None:
        raise _files.DamagedCheckpointError(root, [f"{MANIFEST} is not what was written"])
    return manifest


def parts(manifest: Manifest) -> dict[str, list[SavedLeaf]]:
    """Group the leaves by what lies before a parameter's path: `params`, `opt_state/0/mu`.

    Leaves of no parameter are in groups of their own, by their paths.
    """
    params = {path.removeprefix(PARAMS) for path in manifest.leaves if path.startswith(PARAMS)}
    groups: dict[str, list[SavedLeaf]] = {}
    for path, leaf in manifest.leaves.items():
        ends = [end for end in parameter_ends(path, params, manifest.leaves) if end != path]
        start = path.removesuffix(f"/{(*ends, '')[0]}") if params else path.split("/", 1)[0]
        groups.setdefault(start, []).append(leaf)
    return groups


def read_leaf(root: Path, manifest: Manifest, path: str) -> np.ndarray:
    leaf = manifest.leaves[path]
    if not math.prod(leaf.shape):
        return np.zeros(leaf.shape, jnp.dtype(leaf.dtype))
    with extra("checkpoint", "reading a checkpoint"):
        import tensorstore

    store = open_array(root / ARRAYS, path, tensorstore.Context()).result()
    return np.asarray(store[tuple(map(slice, leaf.shape))].read().result())  # without padding


def verify(directory: str | os.PathLike[str]) -> Manifest:
    """Compare every file of a checkpoint with its digest, which was taken when it was saved.

    Needs no accelerator and no code of the model.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: with every file that is damaged.
    """
    root, manifest = _files.local_path(directory), read_manifest(directory)
    if wrong := _files.wrong_contents(root, manifest.files):
        raise _files.DamagedCheckpointError(root, wrong)
    return manifest
