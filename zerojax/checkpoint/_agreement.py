"""Agreement: processes restore the same checkpoint, or all raise what one of them found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
import numpy as np

from zerojax.checkpoint._digests import DamagedCheckpointError, digest_text
from zerojax.checkpoint._manifest import Manifest, read_manifest

#: Characters of its damages that a process tells the others.
MOST_TOLD = 1 << 16


def gather_texts(text: str) -> list[str]:
    """Return what every process says, in their order; called by all of them."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    said = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(said.size)))
    if not sizes.any():
        return [""] * sizes.size
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: said.size] = said
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def agree_whole(root: Path, wrong: Iterable[str], error: Exception | None = None) -> None:
    """Raise on every process what any has found `wrong`; `error` where no damage explains it."""
    told = gather_texts("\n".join(wrong)[:MOST_TOLD])
    damages = [line for text in told for line in text.splitlines()]
    failures = gather_texts("" if error is None else f"a process can't read it ({error})")
    if damages:
        raise DamagedCheckpointError(root, damages) from error
    if error is not None:
        raise error
    if any(failures):
        raise DamagedCheckpointError(root, filter(None, failures))


def read_agreed(root: Path) -> Manifest:
    """Read the manifest; raises on every process where one can't read it, or reads another."""
    manifest, error = None, None
    try:
        manifest = read_manifest(root)
    except (ValueError, OSError) as caught:
        error = caught
    agree_whole(root, [], error)
    digests = gather_texts(digest_text(str(manifest)))
    if len(set(digests)) > 1:
        raise DamagedCheckpointError(root, ["the processes read different manifests"])
    assert manifest is not None
    return manifest
