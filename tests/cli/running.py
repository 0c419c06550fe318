"""Where and how the tests run the command, and the text that they train on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.texts import prose

COMMAND = [sys.executable, "-c", "import sys; from zerojax.cli import main; sys.exit(main())"]
#: As seen from the folder that `enter` makes. The default would be this Python's own library.
TEXT = ["--data", "../text.txt"]
NUM_BYTES = 100_000
#: A run of few windows to evaluate on.
QUICK = ["--eval-windows", "20"]


def enter(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder with the text beside it, and go there."""
    (root / "text.txt").write_bytes(prose(NUM_BYTES))
    folder = root / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def lines_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps_of(run):
    """Give the lines about steps, without what depends on the machine's mood."""
    found = [line for line in lines_of(run) if "loss" in line]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in found]
