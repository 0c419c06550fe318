"""`zerojax doctor` finds what is there, and each thing that can be wrong has a row and a remedy."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from unittest.mock import Mock

import jax
import pytest
from rich.console import Console

from tests.cli.running import COMMAND
from zerojax.cli import _doctor as command
from zerojax.cli import main
from zerojax.cli._doctor import CHECKS, Check, Finding, examine, findings_table, verdict

NEEDED = ["packages", "devices", "step at stage 2", "its audit", "its checkpoint"]
OPTIONAL = ["host memory", "compiler for TPUs", "compiler for GPUs"]


@pytest.fixture(scope="module")
def found():
    return examine(CHECKS)


def planted(*findings):
    """Give checks that find what is said."""
    return [Check(f"check {i}", lambda bench, one=one: one) for i, one in enumerate(findings)]


def test_all_that_is_needed_is_proved_on_the_devices_of_the_tests(found):
    assert list(found) == NEEDED + OPTIONAL
    for name in NEEDED:
        assert found[name].status == "ok", found[name]
        assert not found[name].remedy
    for name in OPTIONAL:
        assert found[name].status in ("ok", "warning"), found[name]
        assert bool(found[name].remedy) == (found[name].status == "warning")
    assert "8 virtual devices on the CPU" in found["devices"].found
    assert f"jax {jax.__version__}" in found["packages"].found
    assert "moves 1.750 elements a parameter, theory 1.750" in found["its audit"].found
    assert "to the bit" in found["its checkpoint"].found
    for one in found.values():  # for any terminal and any pipe
        assert (one.found + one.remedy).isascii()


def test_the_storys_line_in_a_process_of_its_own(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    names = ("XLA_FLAGS", "COLUMNS", "JAX_COMPILATION_CACHE_DIR")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    done = subprocess.run(
        [*COMMAND, "doctor"],
        cwd=tmp_path / "here",
        env={**environment, "TMPDIR": str(tmp_path / "tmp"), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= command.WIDTH
    for name in NEEDED:
        assert re.search(rf"^[ |]{name} +[ |]?ok ", done.stdout, re.M), done.stdout
    assert re.search(r"^zerojax works here(; \d warnings?)?$", done.stdout, re.M), done.stdout
    assert not [*(tmp_path / "here").iterdir(), *(tmp_path / "tmp").iterdir()]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_loses_no_word(found, width):
    rows = {**found, "long": Finding("failed", "x" * 300, "pip install y")}
    text = io.StringIO()
    Console(file=text, width=width).print(findings_table(rows))
    lines = text.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    start = next(line.index("found") for line in lines if "found" in line)
    words = re.sub(r"\s", "", "".join(line[start:] for line in lines))
    for one in rows.values():
        assert re.sub(r"\s", "", one.found) in words


def test_warnings_pass_and_failures_do_not(monkeypatch, capsys):
    fine, poor = Finding("ok", "a"), Finding("warning", "b", "c")
    wrong = Finding("failed", "d", "e")
    for findings, status, said in [
        ([fine], 0, "zerojax works here\n"),
        ([fine, poor], 0, "zerojax works here; 1 warning\n"),
        ([poor, wrong, fine, wrong], 1, "zerojax does not work here as it should\n"),
    ]:
        monkeypatch.setattr(command, "CHECKS", planted(*findings))
        assert main(["doctor"]) == status
        out, err = capsys.readouterr()
        assert out.endswith(said)
        assert err == ("zerojax: 2 checks failed: check 1, check 3\n" if status else "")
        assert verdict({}).plain == "zerojax works here"


def test_json_is_plain_data(monkeypatch, capsys):
    def lose(bench):
        raise RuntimeError("lost")

    broken = Check("broken", lose)
    fine = Finding("ok", "a [bold] word", "")
    monkeypatch.setattr(command, "CHECKS", [*planted(fine), broken])
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal has it, with what moves while it looks
    assert main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == "zerojax: 1 check failed: broken\n"
    given = json.loads(out)
    assert given["passed"] is False
    assert [one["check"] for one in given["checks"]] == ["check 0", "broken"]
    assert given["checks"][0] == {
        "check": "check 0", "status": "ok", "found": "a [bold] word", "remedy": "", "traceback": "",
    }  # fmt: skip
    assert "in lose" in given["checks"][1]["traceback"]
    monkeypatch.setattr(command, "CHECKS", planted(fine))
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_an_error_is_a_row_and_what_needs_it_is_not_tried():
    fine = Check("fine", lambda bench: Finding("ok", ""))
    found = examine(
        [
            Check("first", Mock(side_effect=RuntimeError("one line\nand more"))),
            Check("second", lambda bench: pytest.fail("was tried"), needs="first"),
            Check("third", lambda bench: pytest.fail("was tried"), needs="second"),
            Check("silent", Mock(side_effect=AssertionError())),
            fine,
        ]
    )
    assert found["first"].status == found["silent"].status == "failed"
    assert found["first"].found == "RuntimeError: one line"
    assert "doctor --json" in found["first"].remedy
    assert found["silent"].found == "AssertionError"
    assert found["second"] == Finding("not tried", "needs first")
    assert found["third"] == Finding("not tried", "needs second")
    assert found["fine"].status == "ok"
    with pytest.raises(KeyboardInterrupt):
        examine([Check("stopped", Mock(side_effect=KeyboardInterrupt()))])


def test_the_help_teaches(capsys):
    assert main(["doctor", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("JAX_PLATFORMS=cpu zerojax doctor", "doctor --json > ", "Exit status", "in bf16"):
        assert word in out
