"""`zerojax plan` draws, searches and has winners compiled."""

from __future__ import annotations

import jax
import optax
import pytest

import zerojax
from tests.cli.plan_requests import TINY, strict
from zerojax.aot import MissingCompiler
from zerojax.cli import main
from zerojax.cli.plan import _question as question
from zerojax.cli.plan._options import PlanOptions as options
from zerojax.cli.plan._question import PlanQuestion

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


@pytest.mark.parametrize(
    "changes",
    [
        {"params": "7.5e9", "devices": 64},
        {
            "params": "1e9",
            "context": 2048,
            "batch_size": 24,
            "offload": ("optimizer", "activations"),
        },
        {"model": "tiny", "shards": 4, "model_axis": 2, "devices": 16, "accumulate": 2},
        {"model": "tiny", "remat": "none", "precision": "fp32", "hardware": "v6e"},
    ],
)
def test_what_is_drawn_over_device_counts_is_what_plan_says(changes):
    asked = PlanQuestion(options(**changes))
    found = asked.sweep()
    at = asked.options.device_counts.index(asked.options.devices)
    for stage in range(4):
        assert found[stage][at] == asked.plan(stage)
        assert [one.num_devices for one in found[stage]] == asked.options.device_counts


def test_device_counts_are_powers_of_two_times_what_has_to_divide_them():
    assert options(params="1e9").device_counts == [2**n for n in range(11)]
    asked = options(params="1e9", shards=6, model_axis=2, devices=1200)
    assert asked.device_counts == [12 * 2**n for n in range(10)]
    assert asked.device_counts[-1] >= 4 * 1200


# ------------------------------------------------------------------ other questions


def test_a_search_shows_choices_that_fit(folder, capsys):
    asked = [*TINY, "--devices", "8", "--batch-size", "32", "--search", "--memory-limit", "6MB"]
    assert main([*asked, "--json", "a.json"]) == 0
    out = capsys.readouterr().out
    assert "step     32 examples of 64 tokens" in out
    assert "fastest of" in out
    assert "rejected: " in out
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


def test_winners_are_compiled_where_that_is_asked_for(monkeypatch, capsys):
    calls = []

    def watched(*arguments, **given):
        calls.append(given["space"])
        return found

    def compiled(choices):
        calls.append("compiled")
        return choices

    found = zerojax.search_plans(1e6, optax.sgd(1.0), num_devices=1, hardware="h100")
    monkeypatch.setattr(question.planner, "search_plans", watched)
    monkeypatch.setattr(question, "verify_plans", compiled)
    assert main([*TINY, "--search"]) == 0
    assert main([*TINY, "--search", "--verify", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    wide, narrow, last = calls
    assert last == "compiled"
    assert (wide.model_axes, wide.offloads) == (None, None)
    assert (narrow.model_axes, narrow.offloads) == ((1,), (None,))
    assert "compiling the winners for h100" in err
    assert "compiling" not in out


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MissingCompiler("pip install libtpu"), 2, "pip install libtpu"),
        (jax.errors.JaxRuntimeError("INTERNAL: ptxas\nis broken"), 1, "the compiler failed"),
        (ValueError("no topology"), 2, "no topology"),
    ],
)
def test_a_compiler_that_fails_is_one_line(monkeypatch, capsys, error, status, said):
    def fail(choices):
        raise error

    monkeypatch.setattr(question, "verify_plans", fail)
    assert main([*TINY, "--search", "--verify"]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("zerojax: ")
    assert said in last
