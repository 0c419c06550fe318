"""The scripts of docs/deploy.md run, with stand-ins for the programs of a cluster.

Those for GKE and TPU pods are read by shells, YAML and the command; jax reads what they name.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests.cli.running import NUM_BYTES
from tests.processes.starting import free_port
from tests.texts import prose
from zerojax.checkpoint import find_checkpoints, verify
from zerojax.cli import main

yaml = pytest.importorskip("yaml", reason="mkdocs brings it, of the extra `docs`")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(MANIFEST,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands():
    """Return the words of each `zerojax train` on the page, without what a shell fills in."""
    found = []
    for script in SCRIPTS:
        line = script.replace("\\\n", " ")
        for words in re.findall(r"zerojax (train [^\n&]*)", line):
            plain = words.replace('"${#hosts[@]}"', "4").replace('"$index"', "2")
            plain = plain.replace("$RESUME", "--resume").replace("${hosts[0]}", "host0")
            # What stands within quotes ends with them.
            found.append(shlex.split(re.sub(r"""["']$""", "", plain.strip())))
    service, job = yaml.safe_load_all(MANIFEST)
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    return [*found, spec["template"]["spec"]["containers"][0]["command"][1:]]


def test_every_command_on_the_page_is_one_that_zerojax_takes(capsys):
    assert len(commands()) == 5
    for words in commands():
        assert main([*words, "--help"]) == 0, words  # options are parsed before help is shown
    capsys.readouterr()
    assert main(["train", "--no-such-option", "--help"]) != 0


@pytest.mark.parametrize("script", SCRIPTS, ids=range(len(SCRIPTS)))
def test_a_shell_reads_the_scripts(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_names_in_the_environment_are_those_that_jax_reads():
    clusters = Path(jax.__file__).parent / "_src/clusters"
    read = "".join(path.read_text() for path in clusters.glob("*.py"))
    named = set(re.findall(r"`((?:SLURM|JOB)_\w+)`", PAGE))
    assert len(named) == 6
    assert [name for name in named if name not in read] == []


#: A job of two tasks, which is preempted when it has done a step.
SRUN = """
lines() { cat runs/books/metrics.jsonl 2>/dev/null | wc -l; }
before=$(lines)
for index in 0 1; do
  SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_PROCID=$index SLURM_LOCALID=$index "$@" &
  tasks+=($!)
done
while [ "$(lines)" -le $((before + 1)) ] && kill -0 "${tasks[0]}"; do sleep 0.1; done
kill -TERM "${tasks[@]}"
for task in "${tasks[@]}"; do wait "$task"; status=$?; done
exit $status
"""
SSH = 'shift; exec bash -c "$*"'


def run(script, folder, options, **programs):
    """Run a script with stand-ins, and options that make the run small; give what it printed."""
    (folder / "bin").mkdir(exist_ok=True)
    programs["zerojax"] = f'exec {sys.executable} -m zerojax "$@" --context 16 {options}'
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    port = free_port()
    more = {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2"),
        "JAX_COORDINATOR_PORT": str(port),
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "SLURM_JOB_ID": "4711",
    }
    done = subprocess.run(
        ["bash", "-c", script.replace("8476", str(port))],
        cwd=folder,
        env=os.environ | more,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.stdout + done.stderr


def test_a_slurm_job_that_is_preempted_is_queued_again_and_goes_on(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books/one.txt").write_bytes(prose(NUM_BYTES))
    (script,) = [script for script in SCRIPTS if "srun" in script]
    programs = {"srun": SRUN, "scontrol": 'echo "$@" >> queued'}
    options = "--eval-windows 20 --steps 100000"
    first = run(script, tmp_path, options, **programs)
    (stopped,) = find_checkpoints(tmp_path / "runs/books/checkpoints")
    assert f"preempted after step {stopped} of" in first
    second = run(script, tmp_path, options, **programs)
    assert f"going on from step {stopped}" in second
    assert (tmp_path / "queued").read_text() == "requeue 4711\n" * 2


def test_a_list_of_hosts_trains_one_run(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books/one.txt").write_bytes(prose(NUM_BYTES))
    (script,) = [script for script in SCRIPTS if "ssh " in script and "hosts=" in script]
    here = script.replace("host0 host1 host2 host3", "127.0.0.1 127.0.0.1")
    here = here.replace("/data/", f"{tmp_path}/")
    assert here != script
    told = run(here, tmp_path, "--eval-windows 20 --steps 2 --save-every 1", ssh=SSH)
    assert verify(tmp_path / "runs/books/checkpoints/2").step == 2, told
    assert "4 x virtual CPU (data=4)" in told
