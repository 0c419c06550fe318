"""benchmarks/: the same weights everywhere, and a page that says what was recorded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


work, report = load("work"), load("report")


def way(seconds, *, loss=9.0, peak=6e8):
    """Record a way whose rounds took some seconds a step."""
    rounds = [{"wall": s, "cpu": s / 2, "wire": 8.1e7, "peak": peak} for s in seconds]
    held = {"params": 4.04e7, "opt": 8.08e7}
    return {"losses": [loss, loss + 1], "first": 9.5, "held": held, "rounds": rounds}


@pytest.fixture
def recorded():
    about = {"machine": "a CPU", "load": "0.1", "versions": "jax", "commit": "c", "date": "today"}
    about["starts"] = "1"
    everywhere = {"ddp": way([1.0, 2.0, 4.0]), "zerojax0": way([1.0, 1.0, 4.0], loss=9.000001)}
    stage2 = {"zerojax2": way([1.1, 1.1, 4.4], peak=9e8), "jit2": way([1.0, 1.1, 4.0])}
    peers = {"fsdp2-kept": way([1.0, 2.2, 4.0]), "deepspeed2": way([2.2, 2.2, 8.8])}
    return {"2 processes, fp32": {"about": about, "groups": {"2": everywhere | stage2 | peers}}}


def test_a_row_has_ratios_of_the_same_round(recorded):
    (run,) = recorded.values()
    rows = {row[0]: row[1:] for row in report.rows(run)}
    assert rows["ddp"][0] == "1.00 (1.00 to 1.00)"
    assert rows["zerojax2"][0] == "1.10 (0.55 to 1.10)"
    assert rows["zerojax2"][3:7] == ["40.4", "", "80.8", "900.0"]


def test_zerojax_stands_beside_the_fastest_peer_of_its_stage(recorded):
    (run,) = recorded.values()
    ((stage, hand, peer, zero, peak),) = report.beside(run)
    assert stage == "2"
    assert hand.startswith("1.10 (1.00")
    assert peer == "1.10 (0.50 to 1.10), fsdp2-kept", "DDP partitions nothing"
    assert zero == "1.10 (1.10 to 1.10)"
    assert peak.startswith("1.50")


def test_losses_that_lie_apart_are_told(recorded):
    (run,) = recorded.values()
    assert report.apart(run) == pytest.approx(1e-6)


def test_a_page_gets_the_new_section_and_keeps_the_rest(recorded):
    page = f"before\n{report.BEGIN}old{report.END}\nafter\n"
    new = report.replaced(page, report.text(recorded))
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
    assert "fsdp2-kept" in new
    assert report.replaced(new, report.text(recorded)) == new


def test_the_page_shows_what_was_recorded():
    file = FOLDER / "peers.json"
    if file.exists():
        assert report.text(json.loads(file.read_text())) in report.PAGE.read_text()
    assert report.PAGE.read_text().count(report.BEGIN) == 1


def test_the_first_weights_and_tokens_are_the_recipes():
    """The losses of all ways are compared; these are what the recipe's first numbers draw."""
    size = work.Size(layers=1, width=4, vocab=8, tokens=3)
    names = [name for name, _ in work.weights(size)]
    assert names[:4] == ["wte.weight", "wpe.weight", "blocks.0.ln1.weight", "blocks.0.ln1.bias"]
    first = np.random.default_rng(0).standard_normal((8, 4), dtype=np.float32)
    np.testing.assert_array_equal(next(work.weights(size))[1], first * np.float32(0.02))
    assert work.examples(size, 0, 0).shape == (2, 4)
    assert (work.examples(size, 0, 0) != work.examples(size, 0, 1)).any()


def test_an_unknown_group_is_one_clear_line():
    command = [sys.executable, FOLDER / "compare.py", "--groups", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid choice: '4'" in done.stderr
