"""What it takes for a file to be there after the power was cut."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(directory: Path) -> None:
    """Have a folder's names on disk, where the file system can."""
    try:
        opened = os.open(directory, os.O_RDONLY)
    except OSError:  # some file systems don't open folders, and keep names in their own way
        return
    try:
        os.fsync(opened)
    except OSError:
        return
    finally:
        os.close(opened)
