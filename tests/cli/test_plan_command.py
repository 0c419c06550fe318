"""`zerojax plan` shows what the planner says, refuses in one line, and computes nothing."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import zerojax
from tests.cli.plan_requests import FIGURE_1, TINY
from tests.planner import paper
from zerojax._display import BINARY, DECIMAL, amount, binary, unit_for
from zerojax.cli import main
from zerojax.cli._plan import PlanOptions, PlanQuestion
from zerojax.cli.shared._options import OPTIMIZERS
from zerojax.models import gpt

ROOT = Path(__file__).resolve().parents[2]
ROW = r"^ +{} +([\d.,]+) +([\d.,]+) +([\d.,]+) +([\d.,]+) +([\d.,]+) +"
QUIET = """
import sys
from zerojax.cli import main
assert main({arguments!r}) == 0
import jax
assert jax.config.jax_platforms == "cpu", jax.config.jax_platforms
assert "matplotlib" not in sys.modules, "matplotlib was imported"
"""


pytestmark = pytest.mark.usefixtures("folder")


def rows(out):
    """Read the kinds, the states and the peak of each stage off the table."""
    found = {stage: re.search(ROW.format(stage), out, re.M) for stage in range(4)}
    return {
        stage: [float(cell.replace(",", "")) for cell in match.groups()]
        for stage, match in found.items()
        if match
    }


# ------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("count", ["7.5e9", "7500000000"])
def test_the_table_shows_the_figures_of_the_paper(capsys, count):
    assert main(["plan", "--params", count, "--devices", "64"]) == 0
    out = capsys.readouterr().out
    for stage, row in rows(out).items():
        *_, states, _ = row
        assert states == paper.FIGURE_1[stage]
    assert len(rows(out)) == 4
    assert "in GB (1e9 bytes)" in out
    assert "64 x h100" in out
    assert "7,498,094,208 parameters, 34 layers of width 4224" in out
    assert "does not fit 84.9 GB: stage 0\n" in out


def test_a_table_is_in_the_unit_that_suits_it(capsys):
    assert main([*TINY, "--devices", "8"]) == 0
    out = capsys.readouterr().out
    assert "in MB" in out
    parameters, gradients, _, states, _ = rows(out)[0]
    count = gpt.num_params(gpt.PRESETS["tiny"])
    assert parameters == gradients == round(2 * count / 1e6, 1)
    assert states == round(16 * count / 1e6, 1)
    assert unit_for(1e10, DECIMAL) == DECIMAL[0]
    assert unit_for(0.99e10, DECIMAL) == DECIMAL[1]
    assert unit_for(0, BINARY) == BINARY[1]
    assert [binary(79.11 * 2**30), BINARY[1].number(None)] == ["79.11 GiB", "-"]
    assert [amount(x) for x in (120.0, 31.40625, 1.875, 0.2344, 0.0)] == [
        "120", "31.4", "1.9", "0.234", "0",
    ]  # fmt: skip


def test_no_figure_is_cut_where_columns_are_few(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for asked in (FIGURE_1, [*FIGURE_1, "--offload", "optimizer"]):
        assert main(asked) == 0
        out = capsys.readouterr().out
        table = out[out.index("one device") : out.index("params, grads")]
        assert "…" not in table
        assert max(map(len, table.splitlines())) <= 80
        assert [row[3] for row in rows(out).values()] == list(paper.FIGURE_1.values())


def test_one_stage_is_shown_in_full(capsys):
    assert main([*FIGURE_1, "--stage", "3"]) == 0
    out = capsys.readouterr().out
    assert "ZeRO stage 3, 7,498,094,208 parameters, 64 x h100, N = 64" in out
    for line in ("activations and buffers", "bound by", "latency is left out"):
        assert line in out
    assert not rows(out)


def question(**options):
    return PlanQuestion(PlanOptions(model="tiny", **options))


def test_a_plan_is_the_planner_s_own():
    config = dataclasses.replace(gpt.PRESETS["tiny"], context=32)
    asked = question(
        devices=16, shards=4, model_axis=2, batch_size=48, accumulate=2, hardware="v5e",
        optimizer="adamw", precision="fp32", context=32,
    )  # fmt: skip
    assert asked.options.stages == (0, 1, 2, 3)
    for stage in asked.options.stages:
        wanted = zerojax.plan(
            jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0)),
            optax.adamw(optax.constant_schedule(1e-3)),
            stage=stage,
            num_devices=16,
            hardware="v5e",
            recipe=zerojax.Recipe(accumulate=2),
            workload=zerojax.Workload(
                loss_fn=functools.partial(gpt.loss, config),
                batch=jax.ShapeDtypeStruct((3 * 2 * 8, 33), jnp.int32),
            ),
            placement=zerojax.Placement(num_shards=4, model_axis=2),
        )
        assert asked.plan(stage) == wanted


@pytest.mark.parametrize("remat", [None, "full", "dots", "none"])
def test_recomputation_is_as_asked_for(remat):
    plain, found = (question(batch_size=512, remat=way).plan(2) for way in (None, remat))
    assert found.remat == remat
    assert (found.bytes.total > plain.bytes.total) == (remat in ("none", "dots"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_of_the_command_line_is_planned(capsys, optimizer):
    assert main([*FIGURE_1, "--optimizer", optimizer]) == 0
    assert len(rows(capsys.readouterr().out)) == 4


def test_what_the_host_keeps_has_a_column(capsys):
    assert main([*FIGURE_1, "--offload", "optimizer", "--offload", "activations"]) == 0
    out = capsys.readouterr().out
    assert "on host" in out
    parameters, _, optimizer, _, _ = rows(out)[2]
    assert (parameters, optimizer) == (15, 0)


def test_all_of_it_is_written_at_once(monkeypatch):
    """`zerojax plan ... | grep -q 31.4` stops listening at the first line that has it."""
    writes = []

    class Pipe(io.StringIO):
        def write(self, text):
            writes.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Pipe())
    assert main(FIGURE_1) == 0
    (text,) = writes
    assert "31.4" in text


def test_no_accelerator_is_started_and_nothing_imported_to_draw():
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("JAX_PLATFORMS", "XLA_FLAGS")
    } | {"PYTHONPATH": str(ROOT)}
    for arguments in (TINY, [*FIGURE_1, "--search"]):
        done = subprocess.run(
            [sys.executable, "-c", QUIET.format(arguments=arguments)],
            env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert not done.stderr


def test_the_help_teaches(capsys):
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    for word in (
        "plan --params 7.5e9 --devices 64",
        "--search",
        "adamw_8bit",
        "v5p",
        "Exit",
        "h100",
    ):
        assert word in out
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out


def test_a_plot_needs_no_backend_of_the_environments(tmp_path):
    asked = "plan --params 1e9 --devices 8 --stage 2 --plot".split()
    done = subprocess.run(
        [sys.executable, "-m", "zerojax", *asked, tmp_path / "a.png"],
        env={**os.environ, "MPLBACKEND": "zz"}, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("", "--model gpt2-xl, or --params 7.5e9"),
        ("--params 1e9 --model tiny", "one of the two"),
        ("--params -3 --devices 64", "--params"),
        ("--params 7.5B", "valid number"),
        ("--params nan", "--params"),
        ("--params 1e400", "--params"),
        ("--params 1e9 --devices 0", "--devices"),
        ("--params 1e9 --devices 6.4", "--devices"),
        ("--params 1e9 --hardware h10", "nearest first: h100, "),
        ("--params 1e9 --devices 64 --shards 12", "give 1, 2, 4, 8"),
        ("--params 1e9 --devices 64 --shards 12 --search", "give 1, 2, 4, 8"),
        ("--params 1e9 --devices 64 --model-axis 5", "give 1, 2, 4, 8"),
        ("--params 1e9 --stage 4", "--stage"),
        ("--params 1e9 --batch-size 0", "--batch-size"),
        ("--params 1e9 --optimizer adamm", "'adamm' is not one of 'adamw'"),
        ("--params 1e9 --precision fp8", "'bf16', 'fp16', 'fp32'"),
        ("--params 1e9 --offload gradients", "optimizer and activations"),
        ("--params 1e9 --batch-size 12", "multiple of 8, such as 16"),
        ("--params 1e9 --batch-size 10 --model-axis 2", "groups along the model axis times"),
        ("--params 1e9 --remat none --offload activations", "give 'full' or 'dots'"),
        ("--params 1e9 --partition-activations", "--model-axis of at least 2"),
        ("--params 1e9 --reduce once", "stage 3"),
        ("--params 1e9 --remat half", "'none', 'dots', 'full'"),
        ("--params 1e9 --memory-limit -5", "--memory-limit"),
        ("--params 1e9 --memory-limit 200", "more than the 84.9 GB"),
        ("--params 7.5e9 --memory-limit 1 --search", "the smallest need is"),
        ("--model gpt2-xxl", "no model named 'gpt2-xxl'; known, nearest first: gpt2-xl"),
        ("--params 1e9 --plot a.pdf", "ends in .png"),
        ("--params 1e9 --plot a-file/below.png", "can't write to --plot"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_one_line(folder, capfd, asked, said):
    (folder / "a-file").write_text("text")
    assert main(["plan", *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("zerojax: ")
    assert not out
    assert [path.name for path in folder.iterdir()] == ["a-file"]


def test_a_limit_that_no_stage_meets_is_told_after_the_table(capfd):
    assert main([*FIGURE_1, "--memory-limit", "2"]) == 2
    out, err = capfd.readouterr()
    assert "2.0 GB each allowed of 84.9" in out
    need = re.search(r"smallest need is ([\d.]+) GB: ZeRO stage 3", err)
    assert need is not None
    assert float(need[1]) == pytest.approx(rows(out)[3][-1], abs=0.05)
    assert "--search" in err
    assert err.count("\n") == 1
    assert main([*FIGURE_1, "--memory-limit", "21.5"]) == 0
    assert "does not fit 21.5 GB: stage 0\n" in capfd.readouterr().out


@pytest.mark.parametrize("search", [[], ["--search"]])
def test_json_takes_the_place_of_tables(capsys, search):
    """Strict JSON: a figure that is no number would not be read by others."""
    assert main([*TINY, "--json", *search]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    asked = PlanQuestion(PlanOptions(model="tiny"))
    plans = asked.search().plans if search else [asked.plan(stage) for stage in range(4)]
    assert found == json.loads(json.dumps([one.to_dict() for one in plans]))
    assert [one["bytes"]["total"] for one in found] == [one.bytes.total for one in plans]
