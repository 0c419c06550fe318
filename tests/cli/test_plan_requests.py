"""`zerojax plan` draws and searches."""

from __future__ import annotations

import pytest

from tests.cli.plan_requests import TINY, strict
from zerojax.cli import main

pytestmark = pytest.mark.usefixtures("folder")


# ------------------------------------------------------------------ drawings


@pytest.mark.parametrize(
    "asked",
    [
        "--model tiny --devices 16 --shards 4 --model-axis 2 --hardware v7 --accumulate 2",
        "--params 70e9 --devices 48 --offload optimizer --hardware v5p --stage 3",
    ],
)
def test_a_drawing_is_written(folder, capsys, asked):
    assert main(["plan", *asked.split(), "--plot", "a.png"]) == 0
    assert "wrote a.png" in capsys.readouterr().out
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------ other questions


def test_a_search_shows_choices_that_fit(folder, capsys):
    asked = [*TINY, "--devices", "8", "--batch-size", "32", "--search", "--memory-limit", "0.006"]
    assert main([*asked, "--json", "a.json"]) == 0
    out = capsys.readouterr().out
    assert "step     32 examples of 64 tokens" in out
    assert "fastest of" in out
    found = strict((folder / "a.json").read_text())
    assert found["choices"]
    assert all(choice["bytes"]["total"] <= 6e6 for choice in found["choices"])


def test_options_that_are_given_hold_in_a_search(capsys):
    asked = "--devices 16 --stage 3 --shards 4 --remat none --offload optimizer --accumulate 2"
    assert main([*TINY, *asked.split(), "--search", "--json", "-"]) == 0
    for choice in strict(capsys.readouterr().out)["choices"]:
        assert choice["stage"] == 3
        assert choice["num_shards"] == 4
        assert choice["model_axis"] == 1
        assert choice["remat"] == "none"
        assert choice["offload"] == ["optimizer"]
        assert choice["accumulate"] == 2
