"""Make a virtual environment that holds the project, or find it made.

    python scripts/make_environment.py FOLDER EXTRAS    # as pip has them: cli, or dev,aot

Runs on a bare Python 3.11 or newer with pip. May be called by several processes at once, and again
after it was interrupted. A change of pyproject.toml brings the environment up to date.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
HOLD = {"cli": ("cli", "dev")}  # the extras that hold what others need, where not only themselves


def stamp(folder: Path, holds: str = "") -> str:
    """Say where the environment was made, since it can't be moved, and what it holds."""
    return f"{folder}\n{holds}"


def content(extra: str) -> str:
    """Hash what decides the environment's content."""
    return hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + extra.encode()).hexdigest()


def found(folder: Path) -> str | None:
    """Read the environment's stamp; None where it has none: somebody else made it, or nobody."""
    file = folder / ".zerojax"
    return file.read_text() if file.exists() else None


def ready(folder: Path, extra: str) -> bool:
    """Tell whether nothing is left to do."""
    enough = [stamp(folder, content(one)) for one in HOLD.get(extra, (extra,))]
    return found(folder) in enough and runs(folder)


def runs(folder: Path) -> bool:
    """Tell whether the environment's interpreter works and is new enough."""
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    return (folder / "bin/python").exists() and succeeds([str(folder / "bin/python"), "-c", check])


def succeeds(command: list[str]) -> bool:
    """Run a command without its output and tell whether it succeeded."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def say(text: str) -> None:
    """Tell the user on stderr, so that a script's own output stays clean."""
    print(f"zerojax: {text}", file=sys.stderr, flush=True)


def make(folder: Path, extra: str, lock: IO[str]) -> bool:
    """Create the environment or bring it up to date; tell whether that succeeded."""
    before = found(folder)
    if runs(folder) and (before is None or before.startswith(stamp(folder))):
        say(f"bringing {folder.name} up to date with pyproject.toml (one to three minutes)")
        (folder / ".zerojax").write_text(stamp(folder))
    elif before is None and folder.exists() and any(folder.iterdir()):
        say(f"{folder} is not this project's and has no Python 3.11 or newer: remove or rename it")
        return False
    else:
        say(f"first run: making {folder.name} (a download of some 300 MB, one to five minutes)")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / ".zerojax").write_text("unfinished")
        create = [sys.executable, "-m", "venv", str(folder)]
        # Some systems ship venv without the pip that it would put inside; the outer pip serves.
        if not succeeds(create) and not succeeds([*create, "--without-pip"]):
            say(f"`{' '.join(create)}` failed: is Python's venv module installed?")
            return False
    if not install(folder, extra, lock):
        say(
            "installing what the project needs failed: pip says why above; the next run tries again"
        )
        return False
    (folder / ".zerojax").write_text(stamp(folder, content(extra)))
    return True


def install(folder: Path, extra: str, lock: IO[str]) -> bool:
    """Install the project, editable; tell whether that succeeded."""
    python = str(folder / "bin/python")
    pip = [python, "-m", "pip"]
    if not succeeds([*pip, "--version"]):
        pip = [sys.executable, "-m", "pip", "--python", python]
    options = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-compile"]
    command = [*pip, "install", *options, "--editable", f"{ROOT}[{extra}]"]
    # pip holds the lock too: it may outlive this process.
    return subprocess.run(command, pass_fds=(lock.fileno(),), check=False).returncode == 0


def main(folder: Path, extra: str) -> int:
    """Make the environment unless it is there; give the exit status."""
    if ready(folder, extra):
        return 0
    (ROOT / ".cache").mkdir(exist_ok=True)
    with (ROOT / ".cache" / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that is making {folder.name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        return 0 if ready(folder, extra) or make(folder, extra, lock) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("extra", metavar="EXTRAS")
    given = parser.parse_args()
    try:
        sys.exit(main(given.folder, given.extra))
    except KeyboardInterrupt:
        say("stopped; the next run goes on")
        sys.exit(130)
