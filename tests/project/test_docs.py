"""What docs/ says: its programs run and print what is shown, its tables are those of the tests."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.machinery
import importlib.util
import inspect
import itertools
import operator
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from zerojax import charts

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/optimizers.md").read_text()


def load(name):
    """Return a script as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


DOCUMENT = load("document")
WITH_PROGRAMS = [page for page in DOCUMENT.PAGES if "```python" in page.read_text()]


@pytest.fixture(scope="module")
def script():
    return load("document_optimizers")


@pytest.mark.parametrize("page", WITH_PROGRAMS, ids=lambda page: f"{page.parent.stem}-{page.stem}")
def test_the_programs_of_a_page_run_and_print_what_it_shows(page):
    """scripts/document writes what they print now."""
    pictures = re.findall(r"^!\[.*\]\(.*/(\S+\.png)\)$", page.read_text(), re.MULTILINE)
    for block, printed in DOCUMENT.run(page.read_text(), page.name):
        assert DOCUMENT.agrees(block[2], printed, loosely=page.stem in ("deploy", "plan")), printed
        pictures = [name for name in pictures if f'"{name}"' not in block[1]]
    assert pictures == [], "a program of the page draws each of them"


def test_what_a_program_prints_otherwise_is_seen():
    text = "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n"
    ((block, printed),) = DOCUMENT.run(text, "a page")
    assert not DOCUMENT.agrees(block[2], printed)
    assert DOCUMENT.rewrite(text, "a page") == text.replace("3", "2")
    assert DOCUMENT.agrees("loss ...\n", "loss 1.5\n")
    assert DOCUMENT.agrees("5.5 GB ██▎\n", "5.7 GB █\n", loosely=True)
    assert not DOCUMENT.agrees("5.5 GB\n", "5.7 MB\n", loosely=True)
    assert not DOCUMENT.agrees("13%\n", "5%\n", loosely=True)


def test_a_formatter_took_no_inclusion_of_a_file_for_a_program():
    """`--8<-- "file"` is Python to a formatter, which writes `--8 < --"file"`: printed as it is."""
    pages = [page.name for page in DOCUMENT.PAGES if "--8 <" in page.read_text()]
    assert pages == []


def test_the_lines_of_frameworks_are_those_of_the_examples():
    page = (ROOT / "docs/guides/frameworks.md").read_text()
    blocks = re.findall(r"\((?:\.\./)*(examples/\w+\.py)\):\n\n```py\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```py") == 4
    for path, block in blocks:
        lines = {line.strip() for line in (ROOT / path).read_text().splitlines()}
        assert {line.strip() for line in block.splitlines()} <= lines, path


def test_troubleshooting_begins_from_the_words_of_an_error():
    """The words of a heading are in what its program prints, but for N, M and "..."."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    sections = re.findall(r"^## ([^\n]*)\n\n```python\n.*?^```text\n(.*?)^```", page, re.M | re.S)
    assert len(sections) > 10
    for heading, printed in sections:
        words = " ".join(printed.split())
        for part in re.split(r"\b[NM]\b|\.\.\.", heading):
            assert part.strip() in words, heading


COMMAND = r"`[^`]*(scripts/|zerojax |tests/|benchmarks/|notebooks/|step\.|_bytes\(|pip )[^`]*`"


def test_every_figure_of_the_benchmarks_names_its_command_commit_and_date():
    """As the page's own rule has it: a section with a table, or its rows."""
    page = (ROOT / "docs/benchmarks.md").read_text()
    parts = re.split(r"^(#{2,3} .*)$", page, flags=re.MULTILINE)[1:]
    tables = [
        heading + text
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
        if "\n|" in text
    ]
    assert len(tables) > 20
    for wanted in (COMMAND, r"\b[0-9a-f]{7}\b", r"\b\d{4}-\d\d-\d\d\b"):
        lacking = [text.partition("\n")[0] for text in tables if not re.search(wanted, text)]
        assert lacking == [], wanted


def test_what_is_said_of_the_peers_is_what_was_measured():
    """docs/coming_from.md and README.md say again what `benchmarks/peers` wrote."""
    page = (ROOT / "docs/benchmarks.md").read_text().replace("Psi", "Ψ")
    written = page.partition("<!-- written by")[2].partition("<!-- end")[0]
    measured = _rows(written.partition("\n**2 processes, fp32**")[2].partition("\n**")[0])
    ways = {row[0]: row for row in measured if len(row) == 10}
    ratios = {row[0]: [re.sub(r" \(.*\)", "", cell) for cell in row] for row in measured}
    told = _rows((ROOT / "docs/coming_from.md").read_text().partition("## What was measured")[2])
    told, of_maxtext = told[1:5], told[5:]
    assert len(of_maxtext) == 5
    assert all(row in _rows(page) for row in of_maxtext)
    for stage, time, peak, *cells in told:
        assert [time, peak] == [ratios[stage][2], ratios[stage][4]]
        for column, cell in zip((-2, -1), cells, strict=True):
            for way, figure in re.findall(r"(\S+) ([\d.]+)", f"zerojax{stage} {cell}"):
                assert ways[way][column] == figure
    found = {}  # of the fastest peer by precision, and of plain jit
    for processes, precision in itertools.product("24", ("fp32", "bf16")):
        table = written.partition(f"\n**{processes} processes, {precision}**")[2]
        for row in _rows(table.partition("\n**")[0])[-4:]:
            for name, column in ((precision, 2), ("jit", 1)):
                found.setdefault(name, []).append(float(row[column].split(" ")[0]))
    readme = " ".join((ROOT / "README.md").read_text().split())
    ranges = {name: f"{min(x):.1f} to {max(x):.1f}" for name, x in found.items()}
    assert f"takes {ranges['fp32']} times the step time of the fastest of torch's" in readme
    assert f"in fp32, {ranges['bf16']} in bf16, and {ranges['jit']} of plain jit" in readme


def _rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of tables."""
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines if not line.startswith("---")]


def test_no_page_and_no_layout_counts_one_as_many():
    mesh = zerojax.make_mesh({"data": 8})
    one = zerojax.make_layout({"w": jnp.ones((64, 64))}, mesh, stage=1)
    assert " in 1 leaf, " in repr(one)
    scalar = zerojax.make_layout({"scale": jnp.ones(())}, mesh, stage=1)
    assert scalar.leaves[0].reason == "whole: 1 element, min_size 1024"
    nouns = "devices|leaves|files|examples|layers|problems|plans|shards|microbatches|processes"
    many = re.compile(rf"(?<![\d,.x] )(?<![\d,.])1 ({nouns})\b")
    pages = [ROOT / "README.md", *DOCUMENT.PAGES]
    assert [
        (page.name, found[0]) for page in pages for found in many.finditer(page.read_text())
    ] == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in DOCUMENT.PAGES]
    assert sorted(listed) == pages


NAMES = [*zerojax.__all__, *(f"charts.{name}" for name in charts.__all__)]
PUBLIC = {name: operator.attrgetter(name)(zerojax) for name in NAMES}
#: What holds arrays, by the names that arguments and fields have, and the words for their shapes:
#: the forms of a leaf (docs/architecture.md), or dims.
HOLDS_ARRAYS = re.compile(r"^(params|updates|grads|state|masters|opt_state|batch|tree|like|value)$")
SHAPES = re.compile(
    r"\b(shapes?|logical|stored|scalars?|shards?|dims?|rows|structure|dtype)\b|\[|^as for `"
)
#: What is measured (bytes have their unit in their name), and the words for its unit.
IS_MEASURED = re.compile(r"memory|bandwidth|time|volume|flops|traffic|clock|launch|_share")
UNITS = re.compile(r"\b(bytes|seconds|elements|FLOP/s|cycles/s|shares|products)\b", re.IGNORECASE)
REFUSES = re.compile(r"\bRaises\b|\braises\b|\w+Error\b")


def entries(doc: str) -> dict[str, str]:
    """Return what sections of a docstring say, by name: that of `rules, min_size:` for both."""
    found = {}
    pattern = r"^    (\*?\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)"
    for names, text in re.findall(pattern, doc, re.MULTILINE):
        found |= dict.fromkeys(names.lstrip("*").split(", "), " ".join(text.split()))
    return found


def methods(found: Any) -> dict[str, Any]:
    """Return the functions of a public name: itself, or a class's methods and properties."""
    if inspect.isfunction(found):
        return {"": found}
    if not inspect.isclass(found):
        return {}
    own = inspect.getmembers_static(found, lambda x: not inspect.isclass(x))
    made = {
        f".{name}": getattr(x, "fget", None) or getattr(x, "func", None) or x
        for name, x in own
        if not name.startswith("_")
    }
    return {name: x for name, x in made.items() if _is_own(x)}


def _is_own(x: Any) -> bool:
    return inspect.isfunction(x) and (x.__module__ or "").startswith("zerojax")


def refuses(function: Any) -> bool:
    """Whether a function raises, or one of the package's that it calls by name and that checks."""
    called = re.findall(r"\b(_?check\w*|as_\w+)\(", inspect.getsource(function))
    others = [x for name in called if _is_own(x := function.__globals__.get(name))]
    return any(" raise " in inspect.getsource(one) for one in (function, *others))


FUNCTIONS = {f"{name}{of}": x for name, found in PUBLIC.items() for of, x in methods(found).items()}


def test_every_public_docstring_says_what_is_taken():
    """Each parameter of a function and each field of data."""
    unsaid = []
    for name, found in PUBLIC.items():
        if inspect.isfunction(found):
            wanted = inspect.signature(found).parameters
        elif dataclasses.is_dataclass(found):
            wanted = [field.name for field in dataclasses.fields(found)]
        else:
            wanted = ()
        words = set(re.findall(r"\w+", inspect.getdoc(found) or ""))
        unsaid += [f"{name}: {one}" for one in wanted if one not in words]
    assert unsaid == []


def test_the_docstring_of_a_plan_names_its_figures():
    words = set(re.findall(r"\w+", zerojax.Plan.__doc__ or ""))
    plan = zerojax.plan({"w": jnp.ones(8)}, optax.sgd(0.1), stage=0, num_devices=1, hardware="h100")
    fields = [x.name for one in (plan.bytes, plan.time) for x in dataclasses.fields(one)]
    assert [name for name in fields if name not in words] == []


def test_every_public_docstring_says_what_is_refused():
    unsaid = [
        name
        for name, function in FUNCTIONS.items()
        if refuses(function) and not REFUSES.search(inspect.getdoc(function) or "")
    ]
    assert unsaid == []


def test_every_public_docstring_says_shapes_and_units():
    """Of arguments and fields that hold arrays and measures, and of functions that return them."""
    unsaid = []
    for name, found in (*PUBLIC.items(), *FUNCTIONS.items()):
        for entry, text in entries(inspect.getdoc(found) or "").items():
            unsaid += [
                f"{name}: {entry} has no {what}"
                for what, is_asked, words in (
                    ("shape", HOLDS_ARRAYS, SHAPES),
                    ("unit", IS_MEASURED, UNITS),
                )
                if is_asked.search(entry) and not words.search(text)
            ]
    for name, function in FUNCTIONS.items():
        returned = function.__annotations__.get("return")
        is_number = returned in (int, float, "int", "float", dict[str, int])
        if is_number and IS_MEASURED.search(name) and not UNITS.search(function.__doc__ or ""):
            unsaid.append(f"{name}: its unit")
    assert unsaid == []


#: Where help() begins: what a program makes, and what it asks.
STARTS = (
    *("Checkpoints", "Layout", "Precision", "Recipe", "TrainState", "Workload"),
    *("audit", "make_layout", "make_mesh", "make_train_step", "plan", "restore", "search_plans"),
    "sharded",
)


@pytest.fixture
def names(mesh8, tmp_path, monkeypatch):
    """Give what the examples of docstrings begin from, and a folder to write to."""
    monkeypatch.chdir(tmp_path)

    def init(key):
        return {"w": jax.random.normal(key, (512, 64))}

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] if isinstance(batch, dict) else batch) @ params["w"])

    key, x = jax.random.key(0), jnp.ones((64, 512))
    params, tx = init(key), optax.adamw(1e-3)
    layout = zerojax.make_layout(params, mesh8, stage=2)
    step = zerojax.make_train_step(loss_fn, tx, layout)
    state = step.init(params)
    given = {"labels": x[:, 0], "class_weights": jnp.ones(10), "batch": x, "mesh": mesh8}
    return {**vars(zerojax), **globals(), **locals(), **given}


EXAMPLES = {
    name: examples
    for name, found in (*PUBLIC.items(), *FUNCTIONS.items())
    if (examples := doctest.DocTestParser().get_examples(inspect.getdoc(found) or ""))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_docstring_runs(name, names):
    for example in EXAMPLES[name]:
        exec(compile(example.source, name, "exec"), names)


def test_help_shows_how_to_begin():
    assert [name for name in STARTS if name not in EXAMPLES] == []


def test_every_public_name_has_its_reference_and_an_example_that_runs():
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").iterdir())
    shown = {}
    for part in pages.split("\n::: zerojax.")[1:]:
        name, _, rest = part.partition("\n")
        shown[name] = "```python\n" in rest
    wanted = [name for name in zerojax.__all__ if name != "__version__"]
    wanted += [f"charts.{name}" for name in charts.__all__]
    shown["audit"] = shown.pop("audit.audit")  # a room has the name too
    assert sorted(shown) == sorted(wanted)
    assert [name for name, has_example in shown.items() if not has_example] == []


def test_the_tables_of_optimizers_are_up_to_date(script):
    assert script.rewrite(TEXT) == TEXT, "run scripts/document_optimizers"


def test_a_row_that_changed_or_a_marker_that_is_gone_is_seen(script):
    assert script.rewrite(TEXT.replace("| `adamw` |", "| `adamW` |")) == TEXT
    with pytest.raises(ValueError, match="end unsupported"):
        script.rewrite(TEXT.replace("<!-- end unsupported -->\n", ""))


def test_every_optimizer_of_the_table_has_its_row(script):
    shown = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    cases = (*script.OPTIMIZERS, *script.CONTRIB, *script.COMPOSITIONS, *script.UNSUPPORTED)
    assert shown == [case.name for case in cases]


def test_monitor_works_behind_the_wrapper(mesh8):
    params = {"w": jnp.ones((64, 32))}
    layout = zerojax.make_layout(params, mesh8, stage=2)
    measure: Any = {"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}
    tx = optax.chain(zerojax.sharded(optax.adam(1e-2), layout), optax.monitor(measure))
    params = jax.device_put(params, layout.params)
    state: Any = tx.update(params, tx.init(params), params)[1]
    wrapped, measured = state
    assert wrapped[0].mu["w"].sharding.spec == layout.grads["w"].spec
    assert any(x.dtype == jnp.float32 and x > 0 for x in jax.tree.leaves(measured))
