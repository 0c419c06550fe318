"""What docs/optimizers.md says: its tables are those of the tests, its programs run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/optimizers.md"
TEXT = DOCUMENT.read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def script():
    """Give scripts/document_optimizers as a module."""
    path = str(ROOT / "scripts/document_optimizers")
    loader = importlib.machinery.SourceFileLoader("document_optimizers", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


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


def test_the_files_that_it_names_exist():
    for name in re.findall(r"\]\((?!https?:)([^)]+)\)", TEXT):
        assert (DOCUMENT.parent / name).exists(), name


def test_its_programs_run_and_print_what_it_shows(capsys):
    names: dict[str, object] = {}
    for program in PROGRAMS:
        exec(compile(program, DOCUMENT.name, "exec"), names)
    printed = capsys.readouterr().out
    shown = re.findall(r"^    (\w.*)$", re.sub(r"(?ms)^```.*?^```$", "", TEXT), re.MULTILINE)
    assert len(shown) == 4
    for line in shown:
        assert line.removesuffix(" ...") in printed


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
