"""`zerojax compile` says what it found, refuses in one line, and keeps what it compiled.

Compilers for absent hardware are not needed here: virtual CPU devices stand in their place.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import jax
import pytest
from jax.sharding import AxisType

from zerojax import aot
from zerojax.aot import _compile as compile_module
from zerojax.cli import _compile as command
from zerojax.cli import main
from zerojax.cli._compile import CompileOptions, read_requests
from zerojax.hardware import find_hardware
from zerojax.models import gpt

SMALL = gpt.Config(num_layers=2, width=64, num_heads=2, vocab_size=64, context=16)
OTHER = dataclasses.replace(SMALL, width=32)
ASKED = ["compile", "--topology", "h100:1x8", "--model", "tiny"]
REFUSAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(16.53G) exceeds available HBM (15.75G)."
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Stand in an empty folder, with the cache beside it, and CPU devices in the place of chips."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("ZEROJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        command,
        "topology_mesh",
        lambda name, axes: jax.make_mesh(
            tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
        ),
    )
    monkeypatch.setattr(gpt, "PRESETS", {**gpt.PRESETS, "tiny": SMALL, "other": OTHER})
    return here


@pytest.fixture
def compiled(monkeypatch):
    """List the stages whose programs are really compiled."""
    calls = []
    compile_now = compile_module._compile

    def watched(lowered):
        calls.append(lowered)
        return compile_now(lowered)

    monkeypatch.setattr(compile_module, "_compile", watched)
    return calls


def with_memory(size):
    return dataclasses.replace(find_hardware("h100"), memory=size)


def options(**changes):
    return CompileOptions(**{"topology": "h100:1x8", "model": "tiny", "stage": 2, **changes})


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("--topology h10:1x8", "Known, nearest first: h100:"),
        ("--topology h100", "is not a topology"),
        ("--model gpt2-xxl", "no model named 'gpt2-xxl'; known, nearest first: gpt2-xl"),
        ("--stage 4", "--stage"),
        ("--batch-size 0", "--batch-size"),
        ("--batch-size 12", "multiple of 8, such as 16"),
        ("--optimizer adamm", "'adamm' is not one of 'adamw'"),
        ("--precision fp8", "'bf16', 'fp16', 'fp32'"),
        ("--reduce twice", "'once', 'each'"),
        ("--reduce once --all-stages", "stage 3 never holds one"),
        ("--plot stages.pdf", "ends in .png"),
        ("--plot a-file/below.png", "can't write to --plot a-file/below.png"),
        ("--no-such-option", "--no-such-option"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_before_compiling(
    folder, capfd, compiled, asked, said
):
    (folder / "a-file").write_text("text")
    (folder / "a-folder").mkdir()
    assert main([*ASKED, *asked.split()]) == 2
    out, err = capfd.readouterr()
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("zerojax: ")
    assert not out
    assert not compiled
    assert {path.name for path in folder.iterdir()} == {"a-file", "a-folder"}


def test_a_topology_has_to_be_named(capfd):
    assert main(["compile"]) == 2
    assert "--topology" in capfd.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed here"
)
def test_a_missing_compiler_names_the_pip_command(monkeypatch, capfd):
    monkeypatch.setattr(command, "topology_mesh", aot.topology_mesh)
    assert main(["compile", "--topology", "v6e:2x4"]) == 2
    err = capfd.readouterr().err
    assert 'pip install "jax[tpu]==' in err
    assert "Traceback" not in err


def test_the_help_teaches(capsys):
    assert main(["compile", "--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--all-stages", "zero-170b", "v5p:4x4x8", "adamw_8bit", "ZEROJAX_CACHE", "Exit"):
        assert word in out
    assert main(["--help"]) == 0
    assert "compile" in capsys.readouterr().out


# ------------------------------------------------------------------ what is answered


def test_a_step_is_compiled_audited_and_held_against_the_device(folder, capsys):
    assert main([*ASKED, "--plot", "a.png"]) in (0, 1)
    out = capsys.readouterr().out
    text = " ".join(out.split())
    assert f"{gpt.num_params(SMALL):,} parameters, 2 layers scanned, rematerialised" in text
    assert "8 examples of 16 tokens, adamw, bf16 with fp32 masters" in text
    assert "stage 2: compiling for h100:1x8 ..." in text
    assert "ZeRO stage 2 over data (N = 8)" in text  # the audit
    assert re.search(r"fits: [\d.]+ MiB of a device's 79.11 GiB", text)
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_exit_status_is_1_where_there_are_problems_and_0_where_there_are_none(
    monkeypatch, capsys
):
    problem = zerojax_problem()
    for problems, status in (((), 0), ((problem,), 1)):
        audit = command.CompileResult.of

        def judged(asked, program, audit=audit, problems=problems):
            answer = audit(asked, program)
            report = dataclasses.replace(answer.report, problems=problems)
            return dataclasses.replace(answer, report=report)

        with monkeypatch.context() as patch:
            patch.setattr(command.CompileResult, "of", judged)
            assert main(ASKED) == status
        out, err = capsys.readouterr()
        assert ("1 problem (planted)" in err) == bool(problems)
        assert ("plant no problems" in out) == bool(problems)


def zerojax_problem():
    from zerojax.audit import Problem

    return Problem(
        kind="planted", where="here", expected="none", seen="one", remedy="plant no problems"
    )


def test_the_exit_status_is_1_where_the_program_does_not_fit_with_the_figure(monkeypatch, capsys):
    monkeypatch.setattr(command, "find_hardware", lambda chip: with_memory(2**20 // 8))
    assert main(ASKED) == 1
    out, err = capsys.readouterr()
    needs = r"does not fit: it needs [\d.]+ MiB of a device's [\d.]+ MiB, [\d.]+ MiB too much"
    assert re.search(needs, err)
    assert "does not fit" in out


def test_a_program_that_the_compiler_refuses_for_its_memory_does_not_fit(monkeypatch, capsys):
    def refuse(self):
        raise jax.errors.JaxRuntimeError(REFUSAL)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    out = ""
    for _ in range(2):  # afterwards from the cache
        assert main([*ASKED, "--plot", "a.png"]) == 1
        out, err = capsys.readouterr()
        assert "needs 16.53 GiB of a device's 15.75 GiB, 0.78 GiB too much" in err
        assert "Traceback" not in err
        assert "by the stage's formula" in out


def test_another_failure_of_the_compiler_is_one_line(monkeypatch, capsys):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: ptxas\nis broken")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    assert main(ASKED) == 1
    err = capsys.readouterr().err
    assert "stage 2: the compiler failed: INTERNAL: ptxas is broken" in err


def test_all_stages_are_compared_and_drawn(folder, capsys):
    assert main([*ASKED, "--all-stages", "--plot", "all.png"]) in (0, 1)
    out = capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["all.png"]
    row = r"^ +{} +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +- +\d+ *$"
    found = [re.search(row.format(stage), out, re.M) for stage in range(4)]
    states = [float(one[2]) for one in found if one is not None]
    assert states == sorted(states, reverse=True)
    assert states[0] == pytest.approx(8 * states[3], rel=0.15)


def test_problems_are_told_with_their_stages(monkeypatch, capsys):
    audit = command.CompileResult.of

    def judged(asked, program):
        answer = audit(asked, program)
        assert answer.report is not None
        report = dataclasses.replace(answer.report, problems=(zerojax_problem(),))
        return dataclasses.replace(answer, report=report)

    monkeypatch.setattr(command.CompileResult, "of", judged)
    assert main([*ASKED, "--all-stages"]) == 1
    out = capsys.readouterr().out
    assert all(f"stage {stage}: planted: here" in out for stage in range(4))


def test_a_program_that_a_device_does_not_hold_is_short_of_memory(monkeypatch):
    program = aot.compile_step(read_requests(options())[0].lower())
    peak = command.CompileResult.of(read_requests(options())[0], program).peak or 0
    for memory in (2 * peak, peak - 1):
        monkeypatch.setattr(
            command, "find_hardware", lambda chip, memory=memory: with_memory(memory)
        )
        answer = command.CompileResult.of(read_requests(options())[0], program)
        assert (answer.shortage is None) == (memory >= peak)


# ------------------------------------------------------------------ the cache


def test_a_program_is_compiled_once(compiled):
    first = main(ASKED)
    assert main(ASKED) == first
    assert len(compiled) == 1


def test_a_torn_entry_is_compiled_again_and_told(tmp_path, compiled):
    main(ASKED)
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    with pytest.warns(UserWarning, match="can't be read .*compiling anew"):
        main(ASKED)
    assert len(compiled) == 2
    main(ASKED)
    assert len(compiled) == 2
