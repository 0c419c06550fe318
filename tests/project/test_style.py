"""What keeps the code small: few parameters, short files and functions, a table of stages."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path

import pytest

import zerojax

ROOT = Path(__file__).resolve().parents[2]


def is_python(path: Path) -> bool:
    return path.suffix == ".py" or b"python" in path.read_bytes()[:40]


PACKAGE = sorted((ROOT / "zerojax").rglob("*.py"))
SOURCES = [
    *PACKAGE,
    *sorted((ROOT / "tests").rglob("*.py")),
    *sorted(p for p in (ROOT / "scripts").iterdir() if p.is_file() and is_python(p)),
]
MAX_FILE_LINES, MAX_TEST_LINES = 350, 400
MAX_FUNCTION_LINES = 70
MAX_UNFORMATTED = 10
MAX_PARAMETERS = 8
ROOMS = [name for _, name, _ in pkgutil.iter_modules(zerojax.__path__) if name[0] != "_"]


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_files_and_functions_stay_short():
    long = []
    for path in SOURCES:
        text = path.read_text()
        if len(text.splitlines()) > (MAX_FILE_LINES if path in PACKAGE else MAX_TEST_LINES):
            long.append(where(path, len(text.splitlines())))
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES:
                long.append(where(path, node.lineno))
    assert not long, "split them by their nouns"


def test_the_formatter_lays_out_almost_everything():
    assert sum(path.read_text().count("# fmt: skip") for path in PACKAGE) <= MAX_UNFORMATTED


@pytest.mark.parametrize("room", [*ROOMS, ""])
def test_an_entry_point_takes_few_parameters(room):
    """Classes are counted where they are called by users: those that are not made of data."""
    menu = importlib.import_module(f"zerojax.{room}".rstrip("."))
    for name in getattr(menu, "__all__", vars(menu)):
        entry = getattr(menu, name)
        if inspect.isfunction(entry):
            found = list(inspect.signature(entry).parameters)
            assert len(found) <= MAX_PARAMETERS, f"{name} takes {', '.join(found)}"


def stages_by_number(path: Path) -> list[str]:
    """List the comparisons of a stage with a number: `layout.stage == 3`, `stage in (1, 2)`."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = {getattr(side, "attr", getattr(side, "id", None)) for side in sides}
            numbers = [
                leaf
                for side in sides
                for leaf in ast.walk(side)
                if isinstance(leaf, ast.Constant) and type(leaf.value) is int
            ]
            if "stage" in names and numbers:
                found.append(where(path, node.lineno))
    return found


def test_no_code_asks_for_a_stage_by_number():
    """What a stage partitions is a table, zerojax/layout/_stages.py; all else asks for kinds."""
    assert [line for path in PACKAGE for line in stages_by_number(path)] == []
