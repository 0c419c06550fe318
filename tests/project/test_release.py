"""A release says one version everywhere; `scripts/release` builds, installs and uses it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import zerojax

yaml = pytest.importorskip("yaml", reason="mkdocs brings it, of the extra `docs`")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_the_citation_is_of_this_version_and_names_the_paper():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys(), "what CFF 1.2 wants"
    assert CITATION["version"] == zerojax.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert "1910.02054" in CITATION["references"][0]["url"]


def test_the_changelog_begins_with_what_is_unreleased_and_has_no_later_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *released = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert first == "Unreleased"
    assert all(version <= zerojax.__version__ for version in released)
