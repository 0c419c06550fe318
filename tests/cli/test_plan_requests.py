"""`zerojax plan` draws and searches."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.cli.plan_requests import TINY
from zerojax import charts
from zerojax.cli import main
from zerojax.cli._plan import PlanOptions, PlanQuestion

pytestmark = pytest.mark.usefixtures("folder")


# ------------------------------------------------------------------ drawings


@pytest.mark.parametrize(
    "asked",
    [
        "--model tiny --devices 16 --shards 4 --model-axis 2 --hardware v7 --accumulate 2",
        "--params 70e9 --devices 48 --offload optimizer --hardware v5p --stage 3",
        "--model tiny --devices 8 --stage 3 --keep-gathered",
        "--model tiny --devices 8 --stage 2 --accumulate 2 --reduce once",
        "--model tiny --devices 8 --search --batch-size 16",
    ],
)
def test_a_drawing_is_written(folder, capsys, asked):
    assert main(["plan", *asked.split(), "--plot", "a.png"]) == 0
    assert "wrote a.png" in capsys.readouterr().out
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_drawing_of_a_search_tells_the_shards_of_each_plan(monkeypatch):
    figures = []
    monkeypatch.setattr(charts, "write", lambda figure, path: figures.append(figure))
    assert main(["plan", *"--model tiny --devices 8 --search --plot a.png".split()]) == 0
    labels = [label.get_text() for label in figures[0].axes[0].get_xticklabels()]
    assert len(labels) == 4
    assert all(re.fullmatch(rf"{n}: stage \d\nN = \d", x) for n, x in enumerate(labels, 1)), labels


# ------------------------------------------------------------------ other questions


def test_a_search_shows_choices_that_fit(capsys):
    asked = [*TINY, "--devices", "8", "--batch-size", "32", "--search", "--memory-limit", "0.006"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "step     32 examples of 64 tokens" in out
    assert "fastest of" in out
    assert "that fit 0.006 GB" in " ".join(out.split())


def test_options_that_are_given_hold_in_a_search():
    given = {"stage": 3, "shards": 4, "remat": "none", "offload": ("optimizer",), "accumulate": 2}
    options = PlanOptions(model="tiny", devices=16, search=True, given=frozenset(given), **given)
    for choice in PlanQuestion(options).search():
        assert (choice.stage, choice.num_shards, choice.model_axis) == (3, 4, 1)
        assert (choice.remat, choice.offload, choice.recipe.accumulate) == (
            "none",
            ("optimizer",),
            2,
        )
    axis = {"model_axis": 4, "batch_size": 2, "accumulate": 1, "stage": 1}  # what holds may be 1
    asked = PlanOptions(model="tiny", devices=8, search=True, given=frozenset(axis), **axis)
    assert {(x.model_axis, x.count) for x in PlanQuestion(asked).search().tried} == {(4, 1)}
    asked = dataclasses.replace(asked, batch_size=8, given=asked.given - {"accumulate"})
    assert {x.recipe.accumulate for x in PlanQuestion(asked).search().tried} > {1}
    asked = dataclasses.replace(asked, given=frozenset(axis))
    assert {x.recipe.accumulate for x in PlanQuestion(asked).search().tried} == {1}
