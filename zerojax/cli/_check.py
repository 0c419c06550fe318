"""`zerojax check` and `zerojax diff`: a step against its lock, and one lock against another."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.text import Text

from zerojax._display import binary
from zerojax.aot import DoesNotFit, compile_step, parse_topology
from zerojax.aot import topology_mesh as make_topology_mesh
from zerojax.audit import Problem, Program, audit
from zerojax.cli.shared._command import CommandOptions, Failure, argument, command, option, refusing
from zerojax.cli.shared._machine import find_devices
from zerojax.cli.shared._screen import Screen
from zerojax.lock import (
    CheckedStep,
    Difference,
    StepRecord,
    compare,
    find_steps,
    read_lock,
    write_lock,
)

LOCK = "zerojax.lock"
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(CommandOptions):
    """What `zerojax check` was asked for."""

    steps: Path = argument("FILE")
    """A Python file with marked steps; zerojax.lock lies beside it."""
    accept: bool = option(False)
    """Write what the steps are now into the lock file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What was found of one step: its record, what differs from the lock, and its audit."""

    step: CheckedStep
    record: StepRecord
    differences: tuple[Difference, ...]
    is_new: bool
    problems: tuple[Problem, ...]


@command
def check(options: CheckOptions) -> None:
    r"""Compile training steps for hardware that you don't have, and hold them against a lock file.

    For the CI of any JAX project: a function that takes devices and returns a lowered step is all
    that is asked for, `jax.jit(step).lower(state, batch)` of plain JAX, flax, equinox or a trainer
    that does the like; it is marked `@zerojax.checked("h100:1x8", "cpu:8")`. The lock file says for
    each step and target what every argument takes on a device, what is moved along which axis of
    the mesh and how often, what of it blocks, and the peak. A change of any is an error, with the
    leaf, the line, what was expected and what was seen, until it is accepted with --accept.

    Exit status: 0 as the lock file says; 1 something differs; 2 asked for what can't be done.

    Examples: the first time; in CI.

    ```
    zerojax check ci/steps.py --accept
    zerojax check ci/steps.py
    ```
    """
    screen = Screen(width=100)
    path, lock_path = options.steps, options.steps.parent / LOCK
    with refusing():
        _keep_to_cpu(path)
        steps = _told(lambda: find_steps(path), path)
        held = read_lock(lock_path) if lock_path.exists() else {}
        devices = _devices(steps)
    found = [_check(step, devices[step.target], held, screen, path) for step in steps]
    for one in found:
        _show(one, screen)
    if options.accept:
        write_lock(lock_path, {**held, **{one.step.name: one.record for one in found}})
        screen.wrote(lock_path)
    wrong = [complaint for one in found if (complaint := _complaint(one, options.accept))]
    if wrong:
        accept = f"zerojax check {options.steps} --accept"
        remedy = "" if options.accept else f"; if it is meant: {accept}"
        raise Failure("; ".join(wrong) + remedy, 1)


def _keep_to_cpu(path: Path) -> None:
    """Keep jax to the CPU, divided as the marks of a file ask: importing the file may start jax."""
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    counts = re.findall(r"cpu:(\d+)", path.read_text()) if path.is_file() else []
    with contextlib.suppress(RuntimeError):  # jax has started
        jax.config.update("jax_num_cpu_devices", max([1, *map(int, counts)]))


def _devices(steps: Sequence[CheckedStep]) -> dict[str, list[Any]]:
    """Return the devices of each target; the CPU is divided once, for the largest."""
    targets = list(dict.fromkeys(step.target for step in steps))
    counts = {one: _cpu_count(one) for one in targets if one.partition(":")[0] == "cpu"}
    here = find_devices(max(counts.values())) if counts else []
    found = {one: here[:count] for one, count in counts.items()}
    for one in targets:
        if one not in found:
            mesh = make_topology_mesh(one, {"device": parse_topology(one).num_devices})
            found[one] = list(mesh.devices.flat)
    return found


def _cpu_count(target: str) -> int:
    count = target.partition(":")[2]
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"{target}: name the number of virtual devices, as in cpu:8")
    return int(count)


def _check(
    step: CheckedStep,
    devices: Sequence[Any],
    held: Mapping[str, StepRecord],
    screen: Screen,
    path: Path,
) -> Checked:
    """Lower, compile and read one step, and compare it with what was accepted."""
    with screen.task(f"{step.name}: lowering"):
        given, layout, recipe = _told(lambda: step.lower(devices), path)
    with screen.task(f"{step.name}: compiling"):
        program = _compile(given, step)
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    record = StepRecord.of(program, devices, versions)
    old = held.get(step.name)
    return Checked(
        step=step,
        record=record,
        differences=() if old is None else compare(old, record),
        is_new=old is None,
        problems=() if layout is None else audit(program, layout, recipe).problems,
    )


def _compile(given: Any, step: CheckedStep) -> Program:
    if isinstance(given, jax.stages.Compiled):
        return Program.of(given)
    try:
        return compile_step(given)
    except DoesNotFit as refusal:
        raise Failure(f"{step.name}: {refusal}", 1) from refusal


def _told(work: Callable[[], Result], path: Path) -> Result:
    """Run code of the user's; what it raises ends the command, with the line of the user's file."""
    try:
        return work()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [one.lineno for one in frames if Path(one.filename).resolve() == path.resolve()]
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise Failure(f"{path}:{lines[-1]}: {told}" if lines else str(error)) from error


def _show(one: Checked, screen: Screen) -> None:
    totals = one.record.totals
    words = [f"peak {binary(totals['peak bytes'])}"] if "peak bytes" in totals else []
    words += [
        f"{binary(count)} {name.removeprefix('bytes ')}"
        for name, count in totals.items()
        if name.startswith("bytes over")
    ]
    if "exposed share" in totals:
        words.append(f"waits for {totals['exposed share']:.1%} of the scheduled step")
    screen.show(Text.assemble((one.step.name, "bold"), ": " + ", ".join(words)))
    screen.say(f"  {one.record.theory}")
    if anew := [path for path, leaf in one.record.leaves.items() if not leaf.settled]:
        more = f" and {len(anew) - 3} more" if len(anew) > 3 else ""
        screen.say(
            f"  the second step compiles anew: {', '.join(anew[:3])}{more} come back with another "
            "placement or dtype"
        )
    if not (one.is_new or one.differences):
        screen.say("  as the lock file says")
    _show_differences(one.differences, screen)
    for problem in one.problems:
        screen.show(Text(f"  {problem}", style="red"))


def _show_differences(differences: Sequence[Difference], screen: Screen) -> None:
    for one in differences:
        screen.show(Text(f"  {one}", style="green" if one.grows is False else "red"))


def _complaint(one: Checked, is_accepted: bool) -> str:
    """Say in a few words what is wrong with a step; empty for nothing."""
    words = []
    if one.is_new and not is_accepted:
        words.append("is not in the lock file")
    if one.differences and not is_accepted:
        words.append("differs from the lock file")
    if one.problems:
        words.append("has problems by its audit")
    return f"{one.step.name} {' and '.join(words)}" if words else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffOptions(CommandOptions):
    """What `zerojax diff` was asked for."""

    old: Path = argument("OLD")
    """A lock file."""
    new: Path = argument("NEW")
    """Another one."""


@command
def diff(options: DiffOptions) -> None:
    """Compare two lock files: what moved, what grew, what began to block.

    Exit status: 0 no difference; 1 something differs; 2 asked for what can't be done.

    ```
    git show main:zerojax.lock > before.lock
    zerojax diff before.lock zerojax.lock
    ```
    """
    screen = Screen(width=100)
    with refusing():
        old, new = read_lock(options.old), read_lock(options.new)
    for name in sorted(old.keys() ^ new.keys()):
        screen.show(Text(f"{name}: only in {options.old if name in old else options.new}"))
    differs = old.keys() != new.keys()
    for name in sorted(old.keys() & new.keys()):
        found = compare(old[name], new[name])
        differs = differs or bool(found)
        screen.show(Text.assemble((name, "bold"), f": {len(found) or 'no'} differences"))
        if old[name].versions != new[name].versions:
            screen.say(f"  compiled with {old[name].versions}, {new[name].versions}")
        _show_differences(found, screen)
    if differs:
        raise Failure("", 1)
