"""`zerojax doctor`: look, try, show."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import platform
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

import zerojax
from zerojax._display import make_table
from zerojax.aot import MissingCompiler, has_accelerators, require_cuda, require_libtpu
from zerojax.cli.shared._command import CommandOptions, Failure, command, option
from zerojax.cli.shared._machine import find_devices, memory_per_device
from zerojax.cli.shared._screen import Screen
from zerojax.memory import has_host_memory, memory_kinds
from zerojax.models import gpt
from zerojax.recipe import HOST_MEMORY

#: Columns where there is no terminal to say how many, and characters of an error that a row shows.
WIDTH, LONGEST = 100, 300
STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "not tried": "dim"}
PACKAGES = ("jax", "jaxlib", "optax", "numpy", "orbax-checkpoint", "safetensors", "grain")
CUDA = ("jax-cuda13-plugin", "jax-cuda12-plugin")
#: The proof: a stage that partitions, and a model of which every device has one example.
STAGE = 2
MODEL = gpt.Config(num_layers=2, width=128, num_heads=4, vocab_size=256, context=32)


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found: failed is what zerojax can't work without, a warning what it can."""

    status: Literal["ok", "warning", "failed", "not tried"]
    found: str
    remedy: str = ""  # nothing where all is well
    traceback: str = ""  # of an error that no check foresaw


@dataclasses.dataclass
class Bench:
    """What checks leave for those after them: devices, the proof's step and its state."""

    devices: list[Any] = dataclasses.field(default_factory=list)
    step: Any = None
    state: Any = None
    compiled: Any = None


class Check(NamedTuple):
    """Something to look at: not tried where one that it needs has failed."""

    name: str
    run: Callable[[Bench], Finding]
    needs: str = ""


def check_packages(bench: Bench) -> Finding:
    """Name Python and the packages that decide what is computed."""
    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    versions = ", ".join(f"{name} {version_of(name) or 'is missing'}" for name in PACKAGES)
    return Finding("ok", f"zerojax {zerojax.__version__}; {python}; {versions}")


def version_of(package: str) -> str | None:
    """Return the version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_devices(bench: Bench) -> Finding:
    """Find the devices that a run would take."""
    asked = os.environ.get("JAX_PLATFORMS") or getattr(jax.config, "jax_platforms", None)
    if not asked and not has_accelerators() and version_of("libtpu"):
        # The compiler for TPUs is here and no TPU: jax would look for one, for minutes.
        jax.config.update("jax_platforms", "cpu")
    unset = f"unset JAX_PLATFORMS, which asks for {asked}"
    try:
        bench.devices = find_devices(None)
    except ValueError as error:
        remedy = "set JAX_PLATFORMS=cpu for virtual devices, or install jax for this accelerator"
        remedy = f"{unset}; or set it to cpu" if asked else remedy
        return Finding("failed", str(error).splitlines()[0], remedy)
    one, count, size = bench.devices[0], len(bench.devices), memory_per_device(bench.devices)
    each = f", {decimal(size)} of memory each" if size is not None else ""
    held = f"{count} x {one.device_kind} ({one.platform}){each}"
    if one.platform == "cpu":
        many = "s" if count > 1 else ""
        held = f"{count} virtual device{many} on the CPU{each}; --devices N makes N of them"
    if one.platform == "cpu" and has_accelerators():
        remedy = unset if asked else 'pip install "jax[cuda12]" or "jax[tpu]", whichever is here'
        return Finding(
            "warning", f"{held}; jax does not use the accelerator that /dev shows", remedy
        )
    if count == 1:
        remedy = "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 gives eight virtual devices to try with"
        return Finding("warning", f"{held}; nothing is partitioned over a single one", remedy)
    return Finding("ok", held)


def check_step(bench: Bench) -> Finding:
    """Take a step of a small model at stage 2 in bf16."""
    mesh = zerojax.make_mesh({"data": len(bench.devices)}, devices=bench.devices)
    init, key = functools.partial(gpt.init, MODEL), jax.random.key(0)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=STAGE)
    recipe = zerojax.Recipe(precision="bf16")
    loss = functools.partial(gpt.loss, MODEL)
    step = zerojax.make_train_step(loss, optax.adamw(1e-3), layout, recipe)
    tokens = np.arange(len(bench.devices) * (MODEL.context + 1)) % MODEL.vocab_size
    batch = jax.device_put(tokens.reshape(len(bench.devices), -1), layout.batch)
    state = step.init(init, key)
    compiled = step.lower(state, batch).compile()
    state, metrics = compiled(state, batch)
    loss = float(metrics["loss"])
    if not math.isfinite(loss):
        remedy = "try JAX_PLATFORMS=cpu; if it passes there, the accelerator or its driver is ill"
        return Finding("failed", f"the loss is {loss}", remedy)
    bench.step, bench.state, bench.compiled = step, state, compiled
    held = f"{step.layout.num_params:,} parameters over {len(bench.devices)} devices"
    return Finding("ok", f"{held}, loss {loss:.3f}")


def check_audit(bench: Bench) -> Finding:
    """Audit the compiled step."""
    report = zerojax.audit(bench.compiled, bench.step.layout, bench.step.recipe)
    if report.problems:
        first, *others = report.problems
        found = f"{first.kind}: {first.where}: {first.seen}; expected {first.expected}"
        found += f"; and {len(others)} more" if others else ""
        return Finding("failed", found, first.remedy)
    moved = f"{report.judged_volume:.3f} elements a parameter, theory {report.theory_volume:.3f}"
    return Finding("ok", f"states are partitioned; moves {moved}")


def check_checkpoint(bench: Bench) -> Finding:
    """Save the state, restore it and compare every bit."""
    layout = bench.step.layout
    with tempfile.TemporaryDirectory(prefix="zerojax-doctor-") as folder:
        path = Path(folder) / "checkpoint"
        zerojax.save(path, bench.state, layout)
        back = zerojax.restore(path, layout, bench.step.abstract_state())
    want, got = jax.tree.leaves_with_path(bench.state), jax.tree.leaves(back)
    for (name, a), b in zip(want, got, strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            found = f"{jax.tree_util.keystr(name)} came back otherwise than it was saved"
            return Finding("failed", found, "check the disk that TMPDIR is on")
    return Finding("ok", f"{len(got)} arrays saved and restored to the bit")


def check_host_memory(bench: Bench) -> Finding:
    """Check for the memory that offloading moves states to."""
    one = bench.devices[0]
    if has_host_memory(one):
        return Finding("ok", f"devices reach {HOST_MEMORY} memory: offload works")
    kinds = ", ".join(memory_kinds(one)) or "none"
    found = f"devices reach no {HOST_MEMORY} memory (only {kinds}): no offload"
    remedy = "train without --offload, or with OffloadPolicy(missing='device')"
    return Finding("warning", found, remedy)


def check_compiler(require: Callable[[], object], packages: Sequence[str], _: Bench) -> Finding:
    """Look for the compiler for hardware that is not here, without loading it."""
    try:
        require()
    except MissingCompiler as error:
        # "Compiling for TPUs needs libtpu ==0.0.30 (no TPU): pip install ..."
        found, command, rest = str(error).partition("pip install")
        return Finding("warning", found.rstrip(" .:"), f"{command}{rest}")
    found = [f"{name} {version}" for name in packages if (version := version_of(name))]
    return Finding("ok", ", ".join(found) or "is here")


CHECKS = (
    Check("packages", check_packages),
    Check("devices", check_devices),
    Check("step at stage 2", check_step, needs="devices"),
    Check("its audit", check_audit, needs="step at stage 2"),
    Check("its checkpoint", check_checkpoint, needs="step at stage 2"),
    Check("host memory", check_host_memory, needs="devices"),
    Check("compiler for TPUs", functools.partial(check_compiler, require_libtpu, ("libtpu",))),
    Check("compiler for GPUs", functools.partial(check_compiler, require_cuda, CUDA)),
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
    what is optional: the host's memory for offload, the compilers for hardware that is not here.
    Takes a few seconds, and leaves no files.

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
        if check.needs and findings[check.needs].status in ("failed", "not tried"):
            findings[check.name] = Finding("not tried", f"needs {check.needs}")
            continue
        try:
            findings[check.name] = check.run(bench)
        except Exception as error:  # noqa: BLE001 - it is what the check found
            first = (str(error).strip().splitlines() or [""])[0][:LONGEST]
            findings[check.name] = Finding(
                "failed",
                f"{type(error).__name__}: {first}".rstrip(": "),
                "if this tells too little: zerojax doctor --json gives the traceback",
                "".join(traceback.format_exception(error)),
            )
    return findings


def findings_table(findings: Mapping[str, Finding]) -> Table:
    """Make the table of findings, a row to each, with the remedy below what was found."""
    made = make_table("check", "", "found")
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
