"""Verifying: every file against its digest, every array read, without devices."""

from __future__ import annotations

import os
from collections.abc import Callable

from zerojax.checkpoint._arrays import SavedArrays
from zerojax.checkpoint._digests import DamagedCheckpointError, wrong_contents
from zerojax.checkpoint._manifest import Manifest, read_manifest
from zerojax.checkpoint._paths import local_path


def verify(
    directory: str | os.PathLike[str], on_leaf: Callable[[str], None] | None = None
) -> Manifest:
    """Read all of a checkpoint and hold it against its manifest.

    Every file must be what was written, and every leaf readable, of its shape and dtype. Needs no
    accelerator and no code of the model.

    Args:
        directory: the checkpoint's folder.
        on_leaf: called with the path of each leaf that was read.

    Raises:
        FileNotFoundError: there is no whole checkpoint in the directory.
        DamagedCheckpointError: with every file and leaf that is damaged.
    """
    root = local_path(directory).absolute()
    manifest = read_manifest(root)
    wrong = wrong_contents(root, manifest.files)
    arrays = SavedArrays(root, manifest)
    for path, leaf in manifest.leaves.items():
        try:
            num_bytes = sum(block.nbytes for block in arrays.blocks(path))
            if num_bytes != leaf.num_bytes:
                wrong.append(f"leaf {path!r} has {num_bytes} bytes of {leaf.num_bytes}")
        except (ValueError, OSError) as error:
            wrong.append(f"leaf {path!r} can't be read ({str(error).splitlines()[0]})")
        if on_leaf is not None:
            on_leaf(path)
    if wrong:
        raise DamagedCheckpointError(root, wrong)
    return manifest
