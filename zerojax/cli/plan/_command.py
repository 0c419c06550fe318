"""`zerojax plan`: parse, ask the planner, show."""

from __future__ import annotations

import json as json_
import os
import sys
from typing import Any

import jax
import typer
from rich.console import Console

from zerojax.aot import MissingCompiler
from zerojax.cli.plan import _options as o
from zerojax.cli.plan._largest import find_largest
from zerojax.cli.plan._request import PlanQuestion, read_plan_question, shortage
from zerojax.cli.plan._screen import PlanScreen
from zerojax.cli.shared import _residual_options as r
from zerojax.cli.shared import _step_options as s
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.cli.shared._progress import Phases
from zerojax.planner import Choices


def plan(
    params: o.Params = None,
    model: s.Model[str | None] = None,
    context: s.Context = None,
    remat: r.KeepsRemat = None,
    remat_policy: r.RematName = None,
    hardware: o.HardwareName = "h100",
    devices: o.Devices = 8,
    memory_limit: o.MemoryLimit = None,
    stage: s.PlannedStage = None,
    config: r.Config = None,
    shards: o.Shards = None,
    model_axis: r.ModelAxis = None,
    offload: r.Offload = None,
    precision: s.PrecisionName = "bf16",
    reduce: s.Reduce = None,
    batch: o.Batch = 1,
    accumulate: s.Accumulate = 1,
    optimizer: s.Optimizer = "adamw",
    search: o.Search = False,
    verify: o.Verify = False,
    largest: o.Largest = False,
    plot: o.Plot = None,
    json: o.Json = None,
) -> None:
    """Plan a training step: bytes, volume and time, before anything runs.

    Without --stage, all four stages are shown side by side: what one device holds of each kind, the
    sum by ZeRO's formula, the planned peak, what a device moves, how long a step takes at least and
    what it waits for. With --stage or --config, one of them in full. GB are 1e9 bytes; hardware is
    h100 unless you say otherwise.

    A model is traced; a bare number of parameters goes by formulas. Either way nothing is computed
    and no accelerator is touched.

    Exit status: 0 done; 1 a compiler of --verify failed; 2 asked for what can't be done, such as a
    --memory-limit that nothing meets: then the smallest need and how it is met are named.

    Examples: the paper's figure 1; GPT-2 XL on a node, with a drawing; one stage in full, 4
    examples a device, sharded within each node; the paper's C4 as it was run; the fastest way to
    train under a limit; the largest models of a chip; and the figures as JSON.

    ```
    zerojax plan --params 7.5e9 --devices 64
    zerojax plan --model gpt2-xl --devices 8 --plot gpt2-xl.png
    zerojax plan --model zero-8b --devices 64 --stage 3 --shards 8 --batch 4
    zerojax plan --model zero-100b --devices 400 --config C4 --model-axis 16 --batch 16
    zerojax plan --model gpt2-xl --batch 8 --search --memory-limit 20GB
    zerojax plan --largest --hardware v5p
    zerojax plan --params 1T --devices 1024 --hardware b200 --json -
    ```
    """
    options = o.PlanOptions(
        params=params, model=model, context=context, remat=remat, remat_policy=remat_policy,
        hardware=hardware, devices=devices, memory_limit=memory_limit, stage=stage, config=config,
        shards=shards, model_axis=model_axis, offload=tuple(offload or ()), precision=precision,
        reduce=reduce, batch=batch, accumulate=accumulate, optimizer=optimizer, search=search,
        verify=verify, largest=largest, json=json, plot=plot,
    )  # fmt: skip
    _stay_on_cpu()
    with refusing():
        question = read_plan_question(options)
    screen = PlanScreen(quiet=options.prints_json)
    answer = _show_largest if largest else _show_choices if search else _show_stages
    with screen.shown():
        answer(question, screen)


def _stay_on_cpu() -> None:
    """Keep jax from taking an accelerator, which shapes don't need."""
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")


def _show_stages(question: PlanQuestion, screen: PlanScreen) -> None:
    options = question.options
    with refusing():
        plans = [question.plan(stage) for stage in options.stages]
    screen.start(question, plans[0].network)
    if len(plans) > 1:
        screen.stages(question, plans)
    else:
        screen.show(plans[0])
    _write(question, screen, {"stages": [one.to_dict() for one in plans]})
    missed = None if options.memory_limit is None else shortage(plans)
    if missed is not None:
        raise Failure(missed)


def _show_choices(question: PlanQuestion, screen: PlanScreen) -> None:
    with refusing():
        choices = _verified(question) if question.options.verify else question.search()
    screen.start(question)
    screen.show(choices)
    _write(question, screen, json_.loads(choices.to_json()))


def _verified(question: PlanQuestion) -> Choices:
    """Search and compile, with the seconds that it takes on stderr."""
    phases = Phases(Console(stderr=True, highlight=False))
    try:
        with phases.shown():
            what = f"compiling the winners for {question.hardware.name}"
            return phases.run(what, question.search)
    except MissingCompiler as error:
        raise Failure(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"the compiler failed: {error}", 1) from error
    except KeyboardInterrupt:
        # A compiler that is at work in a thread can't be stopped, and leaving around it crashes.
        sys.stderr.flush()
        os._exit(130)


def _show_largest(question: PlanQuestion, screen: PlanScreen) -> None:
    with refusing():
        largest = find_largest(question)
    screen.start(question)
    screen.largest(largest)
    _write(question, screen, {"largest": largest.to_dict()})


def _write(question: PlanQuestion, screen: PlanScreen, answer: dict[str, Any]) -> None:
    """Write the files that were asked for, or the figures to stdout."""
    options = question.options
    written = []
    if options.plot is not None:
        from zerojax.cli.plan._plot import write_plan_plot

        write_plan_plot(question, options.plot)
        written.append(options.plot)
    if options.json is not None:
        text = json_.dumps({"question": question.to_dict(), **answer}, indent=2)
        if options.prints_json:
            typer.echo(text)
        else:
            options.json.write_text(text + "\n")
            written.append(options.json)
    screen.wrote(written)
