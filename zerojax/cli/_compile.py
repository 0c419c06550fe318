"""`zerojax compile`: compile, audit, show."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.table import Table
from rich.text import Text

from zerojax import charts
from zerojax._display import BINARY, binary, make_table, unit_for
from zerojax.aot import DoesNotFit, compile_step, parse_topology, topology_mesh
from zerojax.audit import AuditReport, Program, audit
from zerojax.cli.shared._command import Failure, Screen, command, option, refusing
from zerojax.cli.shared._machine import check_output
from zerojax.cli.shared._options import HARDWARE, MODEL, OUTPUT, ZERO, BuiltStepOptions, gpt_layout
from zerojax.hardware import find_hardware
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.train import make_train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(BuiltStepOptions):
    model: str = option("gpt2-small", metavar="NAME", panel=MODEL)
    topology: str = option(..., metavar="NAME", panel=HARDWARE)
    """Nodes x GPUs (h100:1x8, a100:4x8; also h200, b200), TPU chips along each dim of the torus
    (v5e:2x4, v6e:16x16, v4:2x2x4, v5p:8x8x16, tpu7x:2x2x1), or several TPU slices
    (v5e:4x4x2slices)."""
    all_stages: bool = option(False, panel=ZERO)
    """Compile stages 0 to 3 and compare them."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds and moves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.all_stages and "stage" in self.given:
            raise ValueError("--stage is one of --all-stages: leave one of them out")

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(STAGES) if self.all_stages else (self.stage,)


class CompileRequest:
    """A step to compile, for one stage; `memory` and the model states' `theory` are in bytes."""

    def __init__(self, options: CompileOptions, memory: int, mesh: Mesh, stage: int) -> None:
        self.options, self.memory, self.stage = options, memory, stage
        self.config = options.chosen_model
        self.num_examples = options.examples(mesh.shape["data"])  # of all devices and microbatches
        loss: Any = functools.partial(gpt.loss, self.config)
        tx = options.unscheduled(self.config.width)
        recipe = options.recipe(clip_norm=1.0)  # which moves no byte
        self.layout = gpt_layout(self.config, mesh, stage)
        self.step = make_train_step(loss, tx, self.layout, recipe)
        self.theory = self.layout.describe(tx, recipe).theory["total"]

    def lower(self) -> jax.stages.Lowered:
        shape = (self.num_examples, self.config.context + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)
        return self.step.lower(self.step.abstract_state(), batch)


def read_requests(options: CompileOptions) -> list[CompileRequest]:
    topology = parse_topology(options.topology)
    mesh = topology_mesh(options.topology, options.mesh_axes(topology.num_devices))
    memory = find_hardware(topology.chip).memory
    requests = [CompileRequest(options, memory, mesh, stage) for stage in options.stages]
    check_output("--plot", options.plot)
    return requests


@dataclasses.dataclass(frozen=True)
class CompileResult:
    request: CompileRequest
    # the audit of the program; None where the compiler refused it for its memory
    report: AuditReport | None
    # what the program lacks, by the compiler or by its peak; None where it fits
    shortage: DoesNotFit | None

    @classmethod
    def of(cls, request: CompileRequest, program: Program) -> "CompileResult":
        """Audit a compiled program and hold it against the memory of a device."""
        step, memory = request.step, request.memory
        report = audit(program, step.layout, step.recipe)
        needed = report.memory.allocated
        shortage = DoesNotFit(needed=needed, available=memory) if needed > memory else None
        return cls(request, report, shortage)

    @property
    def peak(self) -> int | None:
        """Bytes that it takes at its peak; None where a compiler that refused it did not tell."""
        return self.report.memory.peak if self.report else self.shortage and self.shortage.needed

    @property
    def verdict(self) -> str:
        if self.shortage is not None or self.report is None:
            return str(self.shortage)
        needed, there = self.report.memory.allocated, self.request.memory
        left = f"{binary(there - needed)} ({1 - needed / there:.0%}) left"
        return f"fits: {binary(needed)} of a device's {binary(there)}, {left}"

    @property
    def complaint(self) -> str:
        """What is wrong, in a few words; empty where the program is right and fits."""
        found = [] if self.shortage is None else [self.verdict]
        if self.report is not None and self.report.problems:
            found.append(self.report.verdict.partition(":")[0])
        return ", and ".join(found)


@command
def compile_(options: CompileOptions) -> None:
    r"""Compile a training step for hardware that you don't have, and audit it.

    Nothing is run and no accelerator is needed: the compilers of TPUs and GPUs work on any Linux
    machine (`pip install '.[aot]'`). The compiled program itself shows whether ZeRO took
    effect: what it moves and holds, beside the theory and a device's memory, and what is wrong.

    A program is compiled once and kept in `~/.cache/zerojax/programs` or `$ZEROJAX_CACHE`.

    Exit status: 0 all is well; 1 the audit found problems, or a program does not fit; 2 bad input.

    Examples: GPT-2 XL on a node of eight H100s; all stages side by side on eight TPU chips, with a
    drawing; a hundred billion parameters on a pod slice; the same on GPUs, 16 to a layer.

    ```
    zerojax compile --model gpt2-xl --topology h100:1x8 --stage 2
    zerojax compile --model gpt2-xl --topology v6e:2x4 --all-stages --plot a.png
    zerojax compile --model zero-100b --topology v5p:4x4x8 --stage 3 \
      --batch-size 256
    zerojax compile --model zero-100b --topology h100:50x8 --model-axis 16 \
      --partition-activations
    ```
    """
    screen = Screen()
    with refusing():
        requests = read_requests(options)
    request = requests[0]
    layout, config, chosen = request.layout, request.config, options.in_words()
    axes = ", ".join(f"{name}={size}" for name, size in layout.mesh.shape.items())
    kept = "activations kept" if options.remat == "none" else "rematerialised"
    layers = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''} scanned, {kept}"
    device = f"{layout.devices.flat[0].device_kind}, {binary(request.memory)} each"
    facts = {
        "model": f"{options.model}, {layout.num_params:,} parameters, {layers}",
        "hardware": f"{options.topology}: {layout.devices.size} x {device}",
        "mesh": axes + (f"; {chosen}" if chosen else ""),
        "step": options.step_in_words(request.num_examples, config.context),
    }
    screen.facts(facts)
    results = [_compile(request, screen) for request in requests]
    _show(results, screen)
    reports = {f"stage {x.request.stage}": x.report for x in results if x.report is not None}
    if options.plot is not None and reports:
        title = f"{options.model}, {layout.num_params:,} parameters, {options.precision}, "
        title += f"{options.optimizer}, compiled for {options.topology}"
        charts.write(charts.compare(reports, title=title, available=request.memory), options.plot)
        screen.wrote(options.plot)
    if wrong := [f"stage {one.request.stage}: {one.complaint}" for one in results if one.complaint]:
        raise Failure("; ".join(wrong), 1)


def _compile(request: CompileRequest, screen: Screen) -> CompileResult:
    name = f"stage {request.stage}"
    with screen.task(f"{name}: tracing and lowering"):
        lowered = request.lower()
    try:
        with screen.task(f"{name}: compiling for {request.options.topology}"):
            program = compile_step(lowered)
    except DoesNotFit as refusal:
        return CompileResult(request, None, refusal)
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"{name}: the compiler failed: {error}", 1) from error
    with screen.task(f"{name}: reading the program"):
        return CompileResult.of(request, program)


def _show(results: Sequence[CompileResult], screen: Screen) -> None:
    first, is_one = results[0], len(results) == 1
    if is_one and first.report is not None:
        screen.console.print(first.report)
    else:
        there = binary(first.request.memory)
        screen.title(f"a device has {there}; volume in elements per parameter")
        screen.show(comparison_table(results))
        screen.say("states: by the stage's formula; waits: for collectives, of the scheduled step")
    for result in results:
        short, name = result.shortage, (f"stage {result.request.stage} ", "bold")
        screen.show(Text.assemble(name, result.verdict, style="red" if short else "green"))
        if short is not None and short.message:
            screen.say(f"  the compiler: {short.message}")
        for problem in result.report.problems if result.report and not is_one else ():
            screen.show(Text(f"stage {result.request.stage}: {problem}", style="red"))


def comparison_table(results: Sequence[CompileResult]) -> Table:
    """Make the table of stages; of a program that the compiler refused there is no audit."""
    unit = unit_for(max(one.peak or one.request.memory for one in results), BINARY)
    beside = (f">states, {unit.name}", ">volume", ">theory", ">waits", ">problems")
    made = make_table(">stage", f">peak, {unit.name}", *beside)
    for one in results:
        cells = [str(one.request.stage), unit.number(one.peak), unit.number(one.request.theory)]
        if (report := one.report) is not None:
            share = report.schedule and report.schedule.exposed_share
            cells += [f"{report.volume:.4f}", f"{report.theory_volume:.4f}"]
            cells += ["-" if share is None else f"{share:.1%}", str(len(report.problems))]
        made.add_row(*cells, style="red" if one.shortage else "")
    return made
