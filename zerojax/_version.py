"""The version of the installed package."""

from __future__ import annotations

from importlib import metadata


def _installed() -> str:
    try:
        return metadata.version("zerojax")
    except metadata.PackageNotFoundError:  # imported from a folder that nobody installed
        return "unknown"


__version__ = _installed()
