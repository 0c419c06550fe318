"""Ctrl-C ends the command at any time, also where Python drops what its handler raises."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
when = sys.argv[1]
sys.argv = ["bin/zerojax"]
from zerojax import __main__

sent = []

def interrupt(*_):
    if not sent:
        sent.append(True)
        os.kill(os.getpid(), signal.SIGINT)

def collect():
    gc.callbacks.append(interrupt)  # as jax's; nothing comes of what is raised within it
    gc.collect()

def run(*_, **__):
    if when == "ending":
        from zerojax.cli.train._signals import Signals
        Signals(0).__enter__()
        os.kill(os.getpid(), signal.SIGINT)
    collect()
    time.sleep(5)
    print("lost", file=sys.stderr)

class Finder:
    def find_spec(self, name, *_):
        if name == "zerojax.cli":
            collect()

if when == "imports":
    sys.meta_path.insert(0, Finder())
else:
    from zerojax.cli import _app
    _app.app = run
sys.exit(__main__.main())
"""


@pytest.mark.parametrize(
    ("when", "status"), [("imports", -signal.SIGINT), ("afterwards", 130), ("ending", 130)]
)
def test_ctrl_c_is_not_lost_before_a_run_has_begun_and_while_it_ends(when, status):
    command = [sys.executable, "-c", PROGRAM, when]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = "zerojax: interrupted\n" if status == 130 else ""  # as shells call the other one too
    first = "\nzerojax: ending after this step; Ctrl-C again ends at once\n" * (when == "ending")
    assert (done.returncode, done.stderr) == (status, first + said)


@pytest.mark.parametrize("arguments", ["['train.py', 'zerojax']", "[]"])
def test_a_program_that_imports_zerojax_keeps_its_own_ctrl_c(tmp_path, arguments):
    """One with the command's name among its arguments, and one without any, as embedded Python."""
    program = tmp_path / "train.py"
    program.write_text(
        f"import signal, sys\nsys.argv = {arguments}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nimport zerojax\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    )
    command = [sys.executable, str(program), "zerojax"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
