"""`zerojax plan`: ask the planner, show."""

from __future__ import annotations

import json
from typing import Any

import jax
import typer

from zerojax.cli import charts
from zerojax.cli.plan._largest import find_largest
from zerojax.cli.plan._options import PlanOptions
from zerojax.cli.plan._request import PlanRequest, read_request, shortage, slower
from zerojax.cli.plan._screen import PlanScreen
from zerojax.cli.shared._command import command
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.cli.shared._progress import TimedTasks
from zerojax.cli.shared._screen import Screen
from zerojax.planner import Choices


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
    train under a limit; the largest models of a chip; and the figures as JSON.

    ```
    zerojax plan --params 7.5e9 --devices 64
    zerojax plan --model gpt2-xl --devices 8 --plot gpt2-xl.png
    zerojax plan --model zero-8b --devices 64 --stage 3 --shards 8 --batch-size 256
    zerojax plan --model zero-100b --devices 400 --config C4 --model-axis 16 --batch-size 400
    zerojax plan --model gpt2-xl --batch-size 64 --search --memory-limit 20GB
    zerojax plan --largest --hardware v5p
    zerojax plan --params 1T --devices 1024 --hardware b200 --json -
    ```
    """
    if not getattr(jax.config, "jax_platforms", None):
        jax.config.update("jax_platforms", "cpu")  # shapes need no accelerator
    with refusing():
        request = read_request(options)
    screen = PlanScreen(quiet=options.prints_json)
    show = _show_largest if options.largest else _show_search if options.search else _show_stages
    with screen.console:  # all at once: `| grep -q` may stop listening
        show(request, screen)


def _show_stages(request: PlanRequest, screen: PlanScreen) -> None:
    with refusing():
        plans = [request.plan(stage) for stage in request.options.stages]
    screen.start(request, plans[0].network)
    if len(plans) > 1:
        screen.stages(request, plans)
    else:
        screen.show(plans[0])
    _write(request, screen, {"stages": [one.to_dict() for one in plans]})
    missed = None if request.options.memory_limit is None else shortage(plans)
    if missed is not None:
        raise Failure(missed)


def _show_search(request: PlanRequest, screen: PlanScreen) -> None:
    with refusing():
        choices = _verified(request) if request.options.verify else request.search()
    screen.start(request)
    screen.show(choices)
    _write(request, screen, json.loads(choices.to_json()))


def _verified(request: PlanRequest) -> Choices:
    """Search and compile, with the seconds that it takes on stderr."""
    tasks = TimedTasks(Screen(stderr=True).console)
    try:
        with tasks.shown():
            return tasks.run(f"compiling the winners for {request.hardware.name}", request.search)
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"the compiler failed: {error}", 1) from error


def _show_largest(request: PlanRequest, screen: PlanScreen) -> None:
    with refusing():
        largest = find_largest(request)
    screen.start(request)
    screen.largest(largest)
    _write(request, screen, {"largest": largest.to_dict()})


def _write(request: PlanRequest, screen: PlanScreen, found: dict[str, Any]) -> None:
    """Write the files that were asked for, or the figures to stdout."""
    options = request.options
    written = []
    if options.plot is not None:
        charts.write(_draw(request, screen), options.plot)
        written.append(options.plot)
    text = json.dumps({"question": request.to_dict(), **found}, indent=2)
    if options.prints_json:
        typer.echo(text)
    elif options.json is not None:
        options.json.write_text(text + "\n")
        written.append(options.json)
    screen.wrote(written)


def _draw(request: PlanRequest, screen: PlanScreen) -> Any:
    one, counts = request.hardware, request.options.device_counts
    networks = {f"time of a step on {one.name}": one}
    networks |= {f"links {factor} x slower": slower(one, factor) for factor in charts.SLOWER}
    plans = [request.plan(stage) for stage in charts.STAGES]
    return charts.plan_figure(
        screen.chart_title(request, plans[0].num_params),
        plans=plans,
        times=request.sweep(counts, list(networks.values())),
        networks=networks,
        counts=counts,
        asked=request.options.devices,
    )
