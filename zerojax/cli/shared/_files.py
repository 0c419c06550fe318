"""The files that commands write, looked at before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from zerojax._extras import extra


def check_outputs(files: Mapping[str, Path | None]) -> None:
    """Check that every file can be made and written, and leave nothing behind.

    Args:
        files: by option; a drawing's is `--plot`.
    """
    named = {option: path for option, path in files.items() if path is not None}
    plot = named.get("--plot")
    if plot is not None and plot.suffix.lower() != ".png":
        raise ValueError(f"--plot {plot}: give a name that ends in .png")
    if plot is not None:  # before what is to be drawn is computed
        with extra("cli", "a plot"):
            import matplotlib.figure  # noqa: F401
    if len(set(named.values())) < len(named):
        raise ValueError(f"two outputs have one name: {', '.join(map(str, named.values()))}")
    for option, path in named.items():
        _check_file(option, path)


def _check_file(option: str, path: Path) -> None:
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise OSError(f"can't write to {option} {path}: {error.strerror}") from error
