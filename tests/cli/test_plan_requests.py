"""`zerojax plan` draws, searches, has winners compiled, and finds the largest models."""

from __future__ import annotations

import re

import jax
import optax
import pytest

import zerojax
from tests.cli.plan_requests import TINY, strict
from zerojax.aot import MissingCompiler
from zerojax.cli import main
from zerojax.cli.plan import _request as request
from zerojax.cli.plan._options import PlanOptions as options
from zerojax.cli.plan._request import read_request, slower
from zerojax.planner import CONFIGURATIONS, HARDWARE, max_params, max_transformer

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
    asked = read_request(options(**changes))
    fast = asked.hardware
    slow = slower(fast, 16)
    found, on_slow = asked.sweep([asked.options.devices, 128], [fast, slow])
    for stage in range(4):
        wanted = asked.plan(stage)
        assert found[stage][0] == wanted
        assert found[stage][1].num_devices == 128
        assert on_slow[stage][0].time.fast == pytest.approx(16 * wanted.time.fast)
        assert on_slow[stage][1].time.slow == pytest.approx(16 * found[stage][1].time.slow)
        assert on_slow[stage][0].bytes == wanted.bytes


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
    asked = "--devices 16 --stage 3 --shards 4 --remat none --offload optimizer --search --json -"
    assert main([*TINY, *asked.split()]) == 0
    for choice in strict(capsys.readouterr().out)["choices"]:
        assert choice["stage"] == 3
        assert choice["num_shards"] == 4
        assert choice["model_axis"] == 1
        assert choice["remat"] == "none"
        assert choice["offload"] == ["optimizer"]


def test_winners_are_compiled_where_that_is_asked_for(monkeypatch, capsys):
    calls = []

    def watched(*arguments, **given):
        calls.append(given["space"])
        return zerojax.search_plans(1e6, optax.sgd(1.0), num_devices=1, hardware="h100")

    def compiled(choices):
        calls.append("compiled")
        return choices

    monkeypatch.setattr(request, "search_plans", watched)
    monkeypatch.setattr(request, "verify_plans", compiled)
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

    monkeypatch.setattr(request, "verify_plans", fail)
    assert main([*TINY, "--search", "--verify"]) == status
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("zerojax: ")
    assert said in last


def test_the_largest_models_are_those_of_the_planner(capsys):
    asked = ["plan", "--largest", "--hardware", "v100", "--devices", "48", "--batch-size", "48"]
    assert main([*asked, "--json", "-"]) == 0
    found = strict(capsys.readouterr().out)["largest"]
    by_count = {row["num_devices"]: row for row in found["rows"]}
    assert list(by_count) == sorted({48, *(2**n for n in range(11))})
    for stage in range(4):
        for count in (1, 48, 1024):
            wanted = max_params("v100", stage=stage, num_shards=count)
            assert by_count[count]["params"][str(stage)] == wanted
    for name in CONFIGURATIONS:
        gpt_of = max_transformer("v100", name, num_shards=3, model_axis=16, batch=16)
        assert by_count[48]["gpts"][name]["num_params"] == gpt_of.num_params
        assert by_count[8]["gpts"][name] is None
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "C5 stage 2 + Pa+cpu" in out
    assert len(re.findall(r"^ +1,024 ", out, re.M)) == 2


def test_the_largest_models_take_examples_of_the_groups_of_devices(capsys):
    asked = ["plan", "--largest", "--hardware", "v100", "--devices", "48", "--batch-size"]
    assert main([*asked, "3", "--json", "-"]) == 0
    assert strict(capsys.readouterr().out)["question"]["batch_size"] == 3
    assert main([*asked, "4"]) == 2
    assert "3 groups along the model axis; give a multiple of 3" in capsys.readouterr().err


def test_the_largest_models_follow_optimizer_precision_and_limit(capsys):
    def stage_0(*asked):
        assert main(["plan", "--largest", "--json", "-", *asked]) == 0
        return strict(capsys.readouterr().out)["largest"]["rows"][0]["params"]["0"]

    memory = HARDWARE["h100"].memory
    assert stage_0() == memory // 16
    assert stage_0("--precision", "fp32") == memory // 16
    assert stage_0("--optimizer", "lion") == memory // 12
    assert stage_0("--memory-limit", "16GB") == 10**9
