"""A run that is killed while it saves resumes from the newest checkpoint that was whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/kills"


def test_nothing_is_lost_and_nothing_wrong_after_kills(tmp_path):
    """The few of what `scripts/kills` does a hundred times."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", "2", "--seed", "8", "--folder", tmp_path / "kills"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    errors = tmp_path / "kills/errors.txt"
    told = errors.read_text() if errors.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + told
    table = re.sub(r"[^\w\n]+", " ", done.stdout)
    assert "checkpoints lost 0" in table
    assert "wrong resumes 0" in table
    saved = re.search(r"2 kills (\d+) checkpoints saved", table)
    assert saved is not None
    assert int(saved[1]) >= 2
    assert list((tmp_path / "kills/checkpoints").glob("*/checkpoint.json"))
