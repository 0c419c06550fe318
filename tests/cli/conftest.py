"""A folder to run the command in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import enter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder, with the text that `TEXT` names beside it."""
    return enter(tmp_path, monkeypatch)
