"""`zerojax doctor`: look, try, show."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable, Mapping, Sequence

import typer
from rich.table import Table
from rich.text import Text

from zerojax.cli.doctor import _machine as m
from zerojax.cli.doctor import _packages as p
from zerojax.cli.doctor import _proof as proof
from zerojax.cli.doctor._findings import Bench, Finding
from zerojax.cli.shared._command import CommandOptions, command, option
from zerojax.cli.shared._errors import Failure
from zerojax.cli.shared._screen import Screen, table

#: Columns where there is no terminal to say how many.
WIDTH = 100
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "not tried": "dim"}


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to look at: not tried where one that it needs has failed."""

    name: str
    run: Callable[[Bench], Finding]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("packages", p.check_packages),
    Check("devices", m.check_devices),
    Check("step at stage 2", proof.check_step, needs=("devices",)),
    Check("its audit", proof.check_audit, needs=("step at stage 2",)),
    Check("its checkpoint", proof.check_checkpoint, needs=("step at stage 2",)),
    Check("host memory", m.check_host_memory, needs=("devices",)),
    Check("compilation cache", m.check_cache),
    Check("compiler for TPUs", p.check_tpu_compiler),
    Check("compiler for GPUs", p.check_gpu_compiler),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorOptions(CommandOptions):
    """How `zerojax doctor` tells what it found."""

    json: bool = option(False)
    """Print plain data, with tracebacks, and no table."""


@command
def doctor(options: DoctorOptions) -> None:
    """Check whether this machine can do what zerojax does.

    Looks at the packages and the devices; takes a step of a small model at stage 2 in
    bf16 over all devices, audits the compiled program, and saves and restores the state; looks for
    what is optional: the host's memory for offload, a compilation cache, the compilers for hardware
    that is not here. Takes a few seconds, and leaves no files.

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
    screen = Screen(width=WIDTH, quiet=options.json)
    with screen.console.status("looking ..."):
        findings = examine(CHECKS)
    failed = [name for name, one in findings.items() if one.status == "failed"]
    if options.json:
        rows = [{"check": name, **dataclasses.asdict(one)} for name, one in findings.items()]
        typer.echo(json.dumps({"passed": not failed, "checks": rows}, indent=1))
    screen.show(findings_table(findings))
    screen.show(verdict(findings))
    if failed:
        many = "s" if len(failed) > 1 else ""
        raise Failure(f"{len(failed)} check{many} failed: {', '.join(failed)}", 1)


def examine(checks: Sequence[Check]) -> dict[str, Finding]:
    """Run the checks in order; an error of one is what it found."""
    bench, findings = Bench(), {}
    for check in checks:
        states = {name: findings[name].status for name in check.needs}
        lacking = [name for name, state in states.items() if state in ("failed", "not tried")]
        if lacking:
            findings[check.name] = Finding("not tried", f"needs {lacking[0]}")
            continue
        try:
            findings[check.name] = check.run(bench)
        except Exception as error:  # noqa: BLE001 - it is what the check found
            findings[check.name] = Finding(
                "failed",
                f"{type(error).__name__}: {m.first_line(error)}".rstrip(": "),
                "if this tells too little: zerojax doctor --json gives the traceback",
                "".join(traceback.format_exception(error)),
            )
    return findings


def findings_table(findings: Mapping[str, Finding]) -> Table:
    """Make the table of findings, a row to each, with the remedy below what was found."""
    made = table("check", "", "found")
    for name, one in findings.items():
        found = Text(one.found)
        if one.remedy:
            found.append(f"\nremedy: {one.remedy}", style="bold")
        made.add_row(
            Text(name, overflow="ignore"), Text(one.status, style=STYLES[one.status]), found
        )
    return made


def verdict(findings: Mapping[str, Finding]) -> Text:
    """Return a line on whether zerojax works here."""
    found = [one.status for one in findings.values()]
    if "failed" in found:
        return Text("zerojax does not work here as it should", style=STYLES["failed"])
    warnings = found.count("warning")
    many = f"; {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    return Text(f"zerojax works here{many}", style=STYLES["ok"])
