"""The house: floors, circles, doors, menus, a quiet import. See docs/architecture.md."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import zerojax

ROOT = Path(__file__).resolve().parents[2]
ROOMS = [name for _, name, _ in pkgutil.iter_modules(zerojax.__path__) if name[0] != "_"]
MENUS = ["zerojax", *(f"zerojax.{name}" for name in ROOMS)]
#: Rooms within rooms that have a door.
INNER = [
    *(f"zerojax.collectives.{name}" for name in "forms gathers gradients passes".split()),
    *("zerojax.audit.checks", "zerojax.optim.whole", "zerojax.planner.traced"),
]
#: Packages that users import most of; of the others, what stands there as `X as X`.
USERS = ["zerojax"] + [f"zerojax.{room}" for room in "charts cli data models".split()]
MAX_IMPORT_SECONDS = 2.0

LINT_IMPORTS = (
    "from importlinter.cli import lint_imports_command as main; main(['--no-cache', '--no-logo'])"
)
IMPORT_GRAPH = """
import grimp, json
graph = grimp.build_graph("zerojax", cache_dir=None)
found = {m: sorted(graph.find_modules_directly_imported_by(m)) for m in graph.modules}
print(json.dumps(found))
"""
IMPORT_COST = """
import time, jax, optax
start = time.process_time()
import zerojax
seconds = time.process_time() - start
from jax._src import xla_bridge
print(seconds, xla_bridge.backends_are_initialized())
"""


def python(program: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter that sees the zerojax under `root` and no other."""
    environment = dict(os.environ, PYTHONPATH=str(root))
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def import_graph(root: Path = ROOT) -> dict[str, list[str]]:
    """Map every module of the package to those that it imports, for types as well."""
    done = python(IMPORT_GRAPH, root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def circle(graph: dict[str, list[str]]) -> list[str]:
    """Find modules that import each other in a circle; none is an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy the package and its contracts, so that a test can spoil them."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "zerojax", tmp_path / "zerojax", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, module: str, text: str) -> None:
    """Append to a module, or make it."""
    with (root / "zerojax" / module).open("a") as file:
        file.write(f"\n{text}\n")


def test_imports_go_down_only():
    done = python(LINT_IMPORTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "text", "seen"),
    [
        ("layout/_planted.py", "import zerojax.optim", "zerojax.layout._planted -> zerojax.optim"),
        (
            "models/_planted.py",
            "import zerojax.layout",
            "zerojax.models._planted -> zerojax.layout",
        ),
        ("_types.py", "def f():\n    import zerojax.layout", "zerojax._types -> zerojax.layout"),
        ("planted.py", "", "planted"),
    ],
    ids=["upward", "sideways", "inside a function", "a module on no floor"],
)
def test_an_import_that_does_not_go_down_is_caught(copy, module, text, seen):
    plant(copy, module, text)
    done = python(LINT_IMPORTS, copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert seen in " ".join(done.stdout.split()), done.stdout


def test_no_modules_import_each_other_in_a_circle():
    assert circle(import_graph()) == []


def test_a_circle_is_caught(copy):
    plant(copy, "layout/_planted.py", "import zerojax.layout")
    plant(copy, "layout/__init__.py", "import zerojax.layout._planted")
    assert set(circle(import_graph(copy))) == {"zerojax.layout", "zerojax.layout._planted"}


def behind_doors(graph: dict[str, list[str]]) -> list[str]:
    """List the imports of a room's private modules by modules outside it.

    `zerojax.layout._leaf` is for what stands in `zerojax.layout` or in a room of its own there. A
    folder whose `__init__` imports nothing, as `cli.shared`, has no door.
    """
    return [
        f"{module} imports {name}"
        for module, imported in graph.items()
        for name in imported
        for package in [name.partition("._")[0]]
        if "._" in name and graph[package] and not f"{module}.".startswith(f"{package}.")
    ]


def test_rooms_are_entered_by_their_doors():
    assert behind_doors(import_graph()) == []


def test_an_import_of_what_another_room_keeps_to_itself_is_caught(copy):
    plant(copy, "optim/_planted.py", "def f():\n    from zerojax.layout._layout import Layout")
    plant(copy, "audit/_planted.py", "from zerojax.audit.checks._table import CHECKS")
    found = behind_doors(import_graph(copy))
    assert "zerojax.optim._planted imports zerojax.layout._layout" in found
    assert "zerojax.audit._planted imports zerojax.audit.checks._table" in found


@pytest.mark.parametrize("room", ["zerojax.models", "zerojax.hlo"])
def test_a_users_model_and_hlo_know_nothing_of_zerojax(room):
    graph = import_graph()
    assert room in graph
    for module, imported in graph.items():
        if module.startswith(room):
            strangers = [name for name in imported if not name.startswith(room)]
            assert not strangers, f"{module} imports {strangers}: it should need nothing of zerojax"


def offered_by(menu: ModuleType) -> set[str]:
    """Return a package's public namespace."""
    listed = getattr(menu, "__all__", ())
    return {
        name
        for name, value in vars(menu).items()
        if not name.startswith("_") or name == "__version__"
        # Submodules stand in a package's namespace by being imported; they count where listed.
        if not isinstance(value, ModuleType) or name in listed
    }


@pytest.mark.parametrize("menu", USERS)
def test_all_names_what_users_import(menu):
    module = importlib.import_module(menu)
    assert offered_by(module) == set(module.__all__)
    assert len(module.__all__) == len(offered_by(module)), "a name is listed twice"


@functools.cache
def imports_from_packages() -> set[tuple[str, str, str]]:
    """List what modules, tests and scripts import: from which package, which name, and where."""
    found = set()
    for folder in ("zerojax", "tests", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            place = str(path.relative_to(ROOT).parent).replace("/", ".")
            text = path.read_text() if path.suffix in ("", ".py") and path.is_file() else ""
            is_python = path.suffix == ".py" or "python" in text.partition("\n")[0]
            for node in ast.walk(ast.parse(text if is_python else "")):
                if isinstance(node, ast.ImportFrom):
                    found |= {(node.module or "", one.name, place) for one in node.names}
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    found.add((node.value.id, node.attr, place))  # hlo.parse_module
    return found


@pytest.mark.parametrize("menu", sorted({*MENUS, *INNER} - {*USERS}))
def test_what_a_room_offers_to_others_is_read_there(menu):
    """Its menu is its imports, and no list says them once more."""
    module = importlib.import_module(menu)
    found = imports_from_packages()
    names = menu, menu.rpartition(".")[2]
    read = {name for package, name, place in found if package in names and place != menu}
    text = Path(str(module.__file__)).read_text()
    read |= {x for x in offered_by(module) if f" import {x} as {x}" in text}  # users import these
    assert not hasattr(module, "__all__")
    assert offered_by(module) - read == set(), "nothing outside imports these"


@pytest.mark.parametrize("menu", [*MENUS, *INNER])
def test_a_menu_holds_no_logic(menu):
    path = importlib.import_module(menu).__file__
    assert path is not None
    if Path(path).name != "__init__.py":
        return
    docstring, *statements = ast.parse(Path(path).read_text()).body
    assert isinstance(docstring, ast.Expr), f"{menu} does not say what it is"
    for statement in statements:
        ok = isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.AugAssign)
        assert ok, f"{path}:{statement.lineno} is more than an import or a name"


def test_import_is_quick_and_starts_no_backend():
    seconds = []
    for _ in range(3):
        done = python(IMPORT_COST)
        assert done.returncode == 0, done.stderr
        cost, started = done.stdout.split()
        assert started == "False", "importing zerojax started a backend"
        seconds.append(float(cost))
    assert min(seconds) < MAX_IMPORT_SECONDS, seconds


def test_import_prints_nothing():
    done = python("import zerojax")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
