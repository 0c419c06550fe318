"""`zerojax check`: steps of a program against what was accepted of them."""

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.text import Text

from zerojax._display import binary
from zerojax.aot import DoesNotFit, compile_step, parse_topology, topology_mesh
from zerojax.audit import Problem, Program, audit
from zerojax.cli.shared import _command
from zerojax.cli.shared._machine import MOST_VIRTUAL
from zerojax.hardware import find_hardware
from zerojax.lock import CheckedStep, StepRecord, compare, find_steps, read_lock, write_lock

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions(_command.CommandOptions):
    steps: Path = _command.argument("FILE")
    """A Python file with marked steps, the only one of its folder; zerojax.lock lies beside it."""
    accept: bool = _command.option(False)
    """Write what the steps are now into the lock file."""


@_command.command
def check(options: CheckOptions) -> None:
    r"""Compile training steps for hardware that you don't have, and compare them with a lock file.

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
    screen = _command.Screen(width=100)
    path, lock_path = options.steps, options.steps.parent / "zerojax.lock"
    with _command.refusing():
        _keep_to_cpu(path)
        steps = _told(lambda: find_steps(path), path)
        held: dict[str, StepRecord] = {}
        with contextlib.suppress(*[ValueError] * options.accept):  # a damaged one is written anew
            held = read_lock(lock_path) if lock_path.exists() else {}
        devices = {target: _devices(target) for target in {step.target for step in steps}}
    found: dict[str, StepRecord] = {}
    wrong: list[str] = []
    for step in steps:
        record, problems = _read(step, devices[step.target], screen, path)
        words = _show(step.name, held.get(step.name), record, screen)
        words = [] if options.accept else words
        for problem in problems:
            screen.show(Text(f"  {problem}", style="red"))
        words += ["has problems by its audit"] if problems else []
        found[step.name] = record
        wrong += [f"{step.name} {' and '.join(words)}"] if words else []
    gone = [] if options.accept else sorted(held.keys() - found.keys())
    wrong += [f"{name} is in the lock file, and {path} does not mark it" for name in gone]
    if options.accept:
        write_lock(lock_path, found)
        screen.wrote(lock_path)
    if wrong:
        accept = f"zerojax check {options.steps} --accept"
        remedy = "" if options.accept else f"; if it is meant: {accept}"
        raise _command.Failure("; ".join(wrong) + remedy, 1)


def _keep_to_cpu(path: Path) -> None:
    """Keep jax to the CPU, divided as the marks of a file ask: importing the file may start jax."""
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")
    counts = re.findall(r"cpu:(\d+)", path.read_text(errors="replace")) if path.is_file() else []
    with contextlib.suppress(RuntimeError):  # jax has started
        jax.config.update("jax_num_cpu_devices", min(max([1, *map(int, counts)]), MOST_VIRTUAL))


def _devices(target: str) -> list[Any]:
    kind, _, count = target.partition(":")
    if kind != "cpu":
        mesh = topology_mesh(target, {"device": parse_topology(target).num_devices})
        return list(mesh.devices.flat)
    if not count.isdigit() or int(count) < 1:
        raise ValueError(f"{target}: name the number of virtual devices, as in cpu:8")
    if len(here := jax.devices("cpu")) < int(count):
        raise ValueError(f"{target}: jax was started with {len(here)} CPU devices; see XLA_FLAGS")
    return here[: int(count)]


def _read(
    step: CheckedStep, devices: Sequence[Any], screen: _command.Screen, path: Path
) -> tuple[StepRecord, Sequence[Problem]]:
    with screen.task(f"{step.name}: lowering"):
        given, layout, recipe = _told(lambda: step.lower(devices), path)
    with screen.task(f"{step.name}: compiling"), _command.refusing():
        try:
            is_done = isinstance(given, jax.stages.Compiled)
            program = Program.of(given) if is_done else compile_step(given)
        except DoesNotFit as refusal:
            raise _command.Failure(f"{step.name}: {refusal}", 1) from refusal
        except jax.errors.JaxRuntimeError as error:
            raise _command.Failure(f"{step.name}: the compiler failed: {error}", 1) from error
    count, is_cpu = program.module.num_devices, step.target.startswith("cpu:")
    platform = "cpu" if is_cpu else find_hardware(parse_topology(step.target).chip).platform
    if (count, program.platform) != (len(devices), platform):
        raise _command.Failure(
            f"{step.name}: the step is compiled for {count} {program.platform} device(s), not for "
            f"the {len(devices)} of the target: make its mesh of the devices that are handed over"
        )
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    record = StepRecord.of(program, devices, versions)
    with _command.refusing():  # the layout of another step
        return record, () if layout is None else audit(program, layout, recipe).problems


def _told(work: Callable[[], Result], path: Path) -> Result:
    """Run code of the user's; what it raises ends the command, with the line of the user's file."""
    try:
        return work()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [one.lineno for one in frames if Path(one.filename).resolve() == path.resolve()]
        told = f"{type(error).__name__}: {error}".removesuffix(": ")
        if Path(frames[-1].filename).resolve() != path.resolve():  # within what the file calls
            inner = frames[-1].filename.rpartition("site-packages/")[2]
            told += f" (at {inner}:{frames[-1].lineno})"
        told = f"{path}:{lines[-1]}: {told}" if lines else str(error)
        raise _command.Failure(told if path.name in told else f"{path}: {told}") from error


def _show(name: str, old: StepRecord | None, record: StepRecord, screen: Any) -> list[str]:
    """Show a step beside what was accepted; return in a few words what is wrong with it."""
    totals = record.totals
    words = [f"peak {binary(totals['peak bytes'])}"] if "peak bytes" in totals else []
    words += [
        f"{binary(count)} {total.removeprefix('bytes ')}"
        for total, count in totals.items()
        if total.startswith("bytes over")
    ]
    if "exposed share" in totals:
        words.append(f"waits for {totals['exposed share']:.1%} of the scheduled step")
    screen.show(Text.assemble((name, "bold"), ": " + ", ".join(words)))
    screen.say(f"  {record.theory}")
    if anew := [path for path, leaf in record.leaves.items() if not leaf.settled]:
        told = f"{anew[0]} and {len(anew) - 1} more come" if anew[1:] else f"{anew[0]} comes"
        screen.say(f"  the second step compiles anew: {told} back with another placement or dtype")
    if old is None:
        return ["is not in the lock file"]
    found = compare(old, record)
    for one in found:
        screen.show(Text(f"  {one}", style="green" if one.grows is False else "red"))
    if found and record.versions != old.versions:
        was, now = (" ".join(map(" ".join, x.versions.items())) for x in (old, record))
        screen.say(f"  accepted with {was}, compiled now with {now}")
    if not found:
        screen.say("  as the lock file says")
    return ["differs from the lock file"] if found else []
