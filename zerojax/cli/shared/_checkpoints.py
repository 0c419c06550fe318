"""Which checkpoint a folder means."""

from __future__ import annotations

from pathlib import Path

from zerojax.checkpoint import find_checkpoints, read_manifest

#: The folder of the checkpoints within that of a run.
CHECKPOINTS = "checkpoints"


def list_checkpoints(directory: Path) -> dict[Path, str | None]:
    """List the checkpoints that a folder is or holds, with what can be told to be wrong unread."""
    root = directory / CHECKPOINTS if (directory / CHECKPOINTS).is_dir() else directory
    wrong: dict[Path, str] = {}
    whole = find_checkpoints(root, wrong.__setitem__)
    found = {**wrong, **dict.fromkeys(whole.values())}
    if found:
        return dict(sorted(found.items(), key=lambda item: int(item[0].name)))
    if not directory.exists():
        raise FileNotFoundError(f"there is no folder {directory}")
    read_manifest(directory)
    return {directory: None}


def find_checkpoint(directory: Path) -> Path:
    """Find the checkpoint that a folder is, or the newest whole one that it holds."""
    found = list_checkpoints(directory)
    whole = [path for path, wrong in found.items() if wrong is None]
    if not whole:
        raise ValueError(
            f"no whole checkpoint in {directory}: {'; '.join(filter(None, found.values()))}"
        )
    return whole[-1]
