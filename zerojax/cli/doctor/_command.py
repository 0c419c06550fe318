"""`zerojax doctor`: look, try, show."""

from __future__ import annotations

import dataclasses
import json as json_
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerojax.cli.doctor import _checks as c
from zerojax.cli.doctor import _proof as p
from zerojax.cli.doctor._checks import Bench, Finding
from zerojax.cli.shared._errors import Failure

#: Columns where there is no terminal to say how many.
WIDTH = 100
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "not tried": "dim"}


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to look at: not tried where one that it needs has failed."""

    name: str
    run: Callable[[Bench], Finding]
    needs: tuple[str, ...] = ()


#: What a check that needs another one can't go on after.
UNMET = ("failed", "not tried")

CHECKS = (
    Check("python", c.check_python),
    Check("packages", c.check_packages),
    Check("jax and jaxlib", c.check_jaxlib),
    Check("devices", c.check_devices),
    Check("bf16", p.check_bf16, needs=("devices",)),
    Check("step at stage 2", p.check_step, needs=("devices",)),
    Check("its audit", p.check_audit, needs=("step at stage 2",)),
    Check("its checkpoint", p.check_checkpoint, needs=("step at stage 2",)),
    Check("disk", c.check_disk),
    Check("host memory", c.check_host_memory, needs=("devices",)),
    Check("compilation cache", c.check_cache),
    Check("compiler for TPUs", c.check_tpu_compiler),
    Check("compiler for GPUs", c.check_gpu_compiler),
    Check("notebooks", c.check_notebooks),
)


def doctor(
    json: Annotated[
        bool, typer.Option("--json", help="Print plain data, with tracebacks, and no table.")
    ] = False,
) -> None:
    """Tell whether this machine can do what zerojax does.

    Looks at the packages, the devices and the folders; takes a step of a small model at stage 2
    over all devices, audits the compiled program, and saves and restores the state; looks for what
    is optional: the host's memory for offload, a compilation cache, the compilers for hardware that
    is not here, the notebooks' packages. Takes a few seconds, and leaves no files.

    A check is ok; or a warning: zerojax works, and something optional is missing; or failed. What
    to do about it stands below what was found.

    Exit status: 0 nothing failed; 1 something did.

    Examples: look at this machine; on eight virtual devices, though it has an accelerator; and for
    a report or a script.

    ```
    zerojax doctor
    JAX_PLATFORMS=cpu zerojax doctor
    zerojax doctor --json > doctor.json
    ```
    """
    given = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if given else WIDTH, quiet=json)
    with console.status("") as status:
        findings = examine(CHECKS, lambda name: status.update(f"looking at {name} ..."))
    failed = [name for name, one in findings.items() if one.status == "failed"]
    if json:
        typer.echo(as_json(findings))
    else:
        console.print(findings_table(findings))
        console.print(verdict(findings), soft_wrap=True)
    if failed:
        many = "s" if len(failed) > 1 else ""
        raise Failure(f"{len(failed)} check{many} failed: {', '.join(failed)}", 1)


def examine(
    checks: Sequence[Check], announce: Callable[[str], None] = lambda name: None
) -> dict[str, Finding]:
    """Run the checks in order; an error of one is what it found."""
    bench, findings = Bench(), {}
    for check in checks:
        announce(check.name)
        lacking = [name for name in check.needs if findings[name].status in UNMET]
        if lacking:
            findings[check.name] = Finding(status="not tried", found=f"needs {lacking[0]}")
            continue
        try:
            findings[check.name] = check.run(bench)
        except Exception as error:  # noqa: BLE001 - it is what the check found
            findings[check.name] = Finding(
                status="failed",
                found=f"{type(error).__name__}: {c.first_line(error)}".rstrip(": "),
                remedy="if this says too little: zerojax doctor --json gives the traceback",
                traceback="".join(traceback.format_exception(error)),
            )
    return findings


def findings_table(findings: Mapping[str, Finding]) -> Table:
    """Lay the findings out, a row to each, with the remedy below what was found."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found", overflow="fold")
    for name, one in findings.items():
        found = Text(one.found)
        if one.remedy:
            found.append(f"\nremedy: {one.remedy}", style="bold")
        table.add_row(name, Text(one.status, style=STYLES[one.status]), found)
    return table


def verdict(findings: Mapping[str, Finding]) -> Text:
    """Say in one line whether zerojax works here."""
    found = [one.status for one in findings.values()]
    warnings = found.count("warning")
    if "failed" in found:
        return Text("zerojax does not work here as it should", style=STYLES["failed"])
    if not warnings:
        return Text("zerojax works here", style=STYLES["ok"])
    many = "s" if warnings > 1 else ""
    return Text(f"zerojax works here; {warnings} warning{many}", style=STYLES["ok"])


def as_json(findings: Mapping[str, Finding]) -> str:
    """Write the findings as data."""
    rows = [{"check": name, **dataclasses.asdict(one)} for name, one in findings.items()]
    passed = all(one.status != "failed" for one in findings.values())
    return json_.dumps({"passed": passed, "checks": rows}, indent=1)
