"""`zerojax plan`: ask the planner, show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import typer

from zerojax.cli import charts
from zerojax.cli.plan._options import PlanOptions
from zerojax.cli.plan._question import PlanQuestion
from zerojax.cli.plan._screen import PlanScreen
from zerojax.cli.shared._command import command
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.cli.shared._progress import run_task
from zerojax.cli.shared._screen import Screen
from zerojax.cli.shared._units import DECIMAL, unit_for
from zerojax.layout import STAGES
from zerojax.planner import Choices, Plan


@command
def plan(options: PlanOptions) -> None:
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
    train under a limit; and the figures as JSON.

    ```
    zerojax plan --params 7.5e9 --devices 64
    zerojax plan --model gpt2-xl --devices 8 --plot gpt2-xl.png
    zerojax plan --model zero-8b --devices 64 --stage 3 --shards 8 --batch-size 256
    zerojax plan --model zero-100b --devices 400 --config C4 --model-axis 16 --batch-size 400
    zerojax plan --model gpt2-xl --batch-size 64 --search --memory-limit 20GB
    zerojax plan --params 1T --devices 1024 --hardware b200 --json -
    ```
    """
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator
    with refusing():
        asked = PlanQuestion(options)
    screen = PlanScreen(quiet=options.prints_json)
    with screen.console:  # all at once: `| grep -q` may stop listening
        if options.search:
            _show_search(asked, screen)
        else:
            _show_stages(asked, screen)


def _show_stages(asked: PlanQuestion, screen: PlanScreen) -> None:
    with refusing():
        plans = [asked.plan(stage) for stage in asked.options.stages]
    screen.start(asked, plans[0].network)
    if len(plans) > 1:
        screen.stages(asked, plans)
    else:
        screen.show(plans[0])
    _write(asked, screen, {"stages": [one.to_dict() for one in plans]})
    if asked.options.memory_limit is not None and not any(one.fits for one in plans):
        raise Failure(_shortage(plans))


def _shortage(plans: Sequence[Plan]) -> str:
    least = min(plans, key=lambda one: one.bytes.total)
    return (
        f"nothing fits {least.hardware.memory / 1e9:,.3f} GB per device; the smallest need is "
        f"{least.bytes.total / 1e9:,.3f} GB: {least.title}; --search goes through more ways"
    )


def _show_search(asked: PlanQuestion, screen: PlanScreen) -> None:
    with refusing():
        choices = _verified(asked) if asked.options.verify else asked.search()
    screen.start(asked)
    screen.show(choices)
    _write(asked, screen, json.loads(choices.to_json()))


def _verified(asked: PlanQuestion) -> Choices:
    """Search and compile, with the seconds that it takes on stderr."""
    console, what = Screen(stderr=True).console, f"compiling the winners for {asked.hardware.name}"
    try:
        return run_task(console, what, asked.search)
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"the compiler failed: {error}", 1) from error


def _write(asked: PlanQuestion, screen: PlanScreen, found: dict[str, Any]) -> None:
    """Write the files that were asked for, or the figures to stdout."""
    options = asked.options
    if options.plot is not None:
        charts.write(_draw(asked), options.plot)
    text = json.dumps({"question": asked.to_dict(), **found}, indent=2)
    if options.prints_json:
        typer.echo(text)
    elif options.json is not None:
        options.json.write_text(text + "\n")
    screen.wrote(options.plot, None if options.prints_json else options.json)


def _draw(asked: PlanQuestion) -> Any:
    plans = [asked.plan(stage) for stage in STAGES]
    unit = unit_for(max(max(one.bytes.total, one.bytes.theory) for one in plans), DECIMAL)
    hardware = f"{asked.options.devices:,} x {asked.hardware.name}"
    step = asked.options.step_in_words(asked.num_examples, asked.context)
    return charts.plan_figure(
        f"{plans[0].num_params:,} parameters, {hardware}\n{step}",
        memory=[charts.plan_bar(one, unit) for one in plans],
        times=asked.sweep(),
        available=asked.hardware.memory,
        unit=unit,
        asked=asked.options.devices,
    )
