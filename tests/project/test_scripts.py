"""The scripts' environment: made once, reused, mended after an interruption."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [ROOT / "benchmarks/peers", ROOT / "benchmarks/collectives.py"]
SCRIPTS += [
    path
    for path in (ROOT / "scripts").iterdir()
    if path.is_file() and (os.access(path, os.X_OK) or path.suffix == ".py")
]


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give make_environment with a project of its own, in which installing takes no time."""
    path = ROOT / "scripts/make_environment.py"
    spec = importlib.util.spec_from_file_location("make_environment", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = ModuleType("make_environment")
    module.__file__ = str(path)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    installed: list[str] = []

    def succeeds(command: list[str]) -> bool:
        """Stand in for `python -m venv FOLDER` and for asking whether its interpreter works."""
        if command[1:3] == ["-m", "venv"]:
            (Path(command[3]) / "bin").mkdir()
            (Path(command[3]) / "bin/python").touch()
        return True

    def install(folder: Path, extra: str, lock: Any) -> bool:
        installed.append(extra)
        return True

    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "succeeds", succeeds)
    monkeypatch.setattr(module, "install", install)
    module.installed = installed
    module.folder = tmp_path / ".venv"
    return module


def test_an_environment_is_made_once(maker):
    assert maker.main(maker.folder, "dev") == 0
    assert maker.main(maker.folder, "dev") == 0
    assert maker.main(maker.folder, "cli") == 0, "what the tests need holds what training needs"
    assert maker.installed == ["dev"]


def test_tests_need_more_than_training(maker):
    maker.main(maker.folder, "cli")
    maker.main(maker.folder, "dev")
    assert maker.installed == ["cli", "dev"]


def test_a_change_of_pyproject_brings_it_up_to_date_in_place(maker):
    maker.main(maker.folder, "cli")
    (maker.folder / "kept").touch()
    (maker.ROOT / "pyproject.toml").write_text("[project]\nversion = '2'\n")
    maker.main(maker.folder, "cli")
    assert maker.installed == ["cli", "cli"]
    assert (maker.folder / "kept").exists()


def test_an_interrupted_installation_starts_over(maker, monkeypatch):
    def interrupted(*_: Any) -> bool:
        (maker.folder / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(maker, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            maker.main(maker.folder, "cli")
    assert maker.main(maker.folder, "cli") == 0
    assert maker.installed == ["cli"]
    assert not (maker.folder / "half").exists()


def test_an_environment_that_was_moved_is_made_anew(maker):
    maker.main(maker.folder, "cli")
    moved = maker.folder.rename(maker.folder.with_name(".venv-moved"))
    (moved / "bin/pip").write_text("names the old place in its first line")
    maker.main(moved, "cli")
    assert maker.installed == ["cli", "cli"]
    assert not (moved / "bin/pip").exists()


def test_a_folder_of_somebody_elses_is_left_alone(maker, capsys):
    maker.folder.mkdir()
    (maker.folder / "thesis.txt").touch()
    assert maker.main(maker.folder, "cli") == 1
    assert (maker.folder / "thesis.txt").exists()
    assert "remove or rename" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["scripts/train", "scripts/test", "scripts/check"])
def test_an_interpreter_that_is_not_there_is_one_clear_line(script):
    done = subprocess.run(
        [ROOT / script, "--python", "python2.7"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("zerojax: --python python2.7")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", sorted(SCRIPTS), ids=lambda path: path.name)
def test_every_script_says_what_it_does_and_does_nothing_else(script, tmp_path, monkeypatch, capfd):
    """A script in Python runs in this process, which has loaded jax."""
    monkeypatch.chdir(tmp_path)
    if script.read_text().startswith("#!/usr/bin/env bash"):
        environment = {**os.environ, "PATH": "/usr/bin:/bin"}  # no Python is looked for
        subprocess.run([script, "--help"], env=environment, check=True, timeout=10)
    else:
        monkeypatch.setattr(sys, "argv", [str(script), "--help"])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        monkeypatch.setattr(os, "environ", os.environ.copy())
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert not ended.value.code
    said, complaints = capfd.readouterr()
    assert script.name in said
    assert complaints == ""


def test_an_old_python_is_passed_over(tmp_path):
    for tool in ("bash", "dirname"):  # nothing else can be found, no other python either
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    for name, program in (("python3", "exit 1"), ("python3.12", 'test "$1" = -c || exit 42')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run([ROOT / "scripts/train"], env={"PATH": str(tmp_path)}, check=False)
    assert done.returncode == 42, "the newer one is asked to make the environment"


@pytest.mark.parametrize(("check", "aot"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_the_gate_runs_every_part_and_names_those_that_failed(tmp_path, check, aot):
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "scripts").mkdir()
    for name, status in (("check", check), ("test", aot)):
        script = tmp_path / "scripts" / name
        script.write_text(f"#!/bin/sh\necho {name} $*\nexit {status}\n")
        script.chmod(0o755)
    done = subprocess.run(
        [tmp_path / ".ci/run"], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == (1 if check or aot else 0)
    assert done.stdout.startswith("check")
    assert "test --aot\n" in done.stdout
    ran = re.findall(r"^== (.*): \d+ s$", done.stdout, re.MULTILINE)
    newest = 2 * (shutil.which("python3.12") is not None)
    assert ran[:2] == ["scripts/check", "scripts/test --aot"]
    assert ["--python python3.12" in part for part in ran[2:]] == [True] * newest
    failed = ["scripts/check"] * check + ran[1:] * aot
    assert done.stderr.splitlines() == [f"failed: {part}" for part in failed]
