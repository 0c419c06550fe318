"""The scripts of docs/deploy.md: shells and the command read them, jax reads what they name."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import jax
import pytest

from zerojax.cli import main

yaml = pytest.importorskip("yaml", reason="mkdocs brings it, of the extra `docs`")

PAGE = (Path(__file__).resolve().parents[2] / "docs/deploy.md").read_text()
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
