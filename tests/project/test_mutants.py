"""The mutants of scripts/mutants fit today's sources, and its verdicts are right."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATH = str(ROOT / "scripts/mutants")
LOADER = importlib.machinery.SourceFileLoader("mutants_script", PATH)
SPEC = importlib.util.spec_from_loader("mutants_script", LOADER)
assert SPEC is not None
script: Any = importlib.util.module_from_spec(SPEC)
sys.modules["mutants_script"] = script  # its dataclasses look themselves up
LOADER.exec_module(script)
MUTANTS = script.read_mutants()


def test_every_mutant_finds_its_text_once_and_is_another_program():
    for mutant in MUTANTS:
        tree, planted = (
            ast.dump(ast.parse(text))
            for text in ((ROOT / mutant.file).read_text(), mutant.plant(ROOT))
        )
        assert planted != tree, mutant.promise


def test_every_mutant_names_tests_that_are_there():
    """As pytest names them, parameters included: one unknown name ends the whole run."""
    tests = sorted({test for mutant in MUTANTS for test in mutant.tests})
    options = ["--collect-only", "-q", "-n0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_no_promise_is_named_twice():
    promises = [mutant.promise for mutant in MUTANTS]
    assert len(promises) == len(set(promises)) >= 30


def test_a_text_that_is_gone_is_an_error_that_names_the_mutant():
    gone = script.Mutant(
        promise="sums are right", file="zerojax/__init__.py", find="1 + 1", replace="2", tests=()
    )
    with pytest.raises(ValueError, match=r"'sums are right': its text occurs 0 times in zerojax/"):
        gone.plant(ROOT)


TABLE = """
[[mutant]]
promise = "a sum is a sum"
file = "zerojax/sums.py"
find = "a + b"
replace = "a - b"
tests = ["tests/test_sums.py::test_sum"]

[[mutant]]
promise = "a product is a product"
file = "zerojax/sums.py"
find = "a * b"
replace = "a / b"
tests = ["tests/test_sums.py::test_product_with_one"]
"""


def test_killed_and_survived_are_told_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "zerojax").mkdir()
    (tmp_path / "tests").mkdir()
    for file in ("pyproject.toml", "zerojax/__init__.py"):
        (tmp_path / file).touch()
    (tmp_path / "mutants.toml").write_text(TABLE)
    sums = "def add(a, b):\n    return a + b\n\n\ndef multiply(a, b):\n    return a * b\n"
    (tmp_path / "zerojax/sums.py").write_text(sums)
    (tmp_path / "tests/test_sums.py").write_text(
        "from zerojax.sums import add, multiply\n\n\n"
        "def test_sum():\n    assert add(2, 1) == 3\n\n\n"
        "def test_product_with_one():\n    assert multiply(2, 1) == 2\n"
    )
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "TABLE", tmp_path / "mutants.toml")
    assert script.main([]) == 1
    out = capsys.readouterr().out
    assert "1 of 2 killed" in out
    assert [line for line in out.splitlines() if "SURVIVED" in line and "product" in line]
    assert script.main(["--only", "sum"]) == 0
