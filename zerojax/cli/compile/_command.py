"""`zerojax compile`: compile, audit, show."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from zerojax.aot import Compilation, ProgramCache, compile_lowered
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.compile._outputs import write
from zerojax.cli.compile._request import CompileRequest, read_requests
from zerojax.cli.compile._result import CompileResult
from zerojax.cli.compile._screen import CompileScreen
from zerojax.cli.shared._command import command
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.cli.shared._progress import run_task


@command
def compile_(options: CompileOptions) -> None:
    r"""Compile a training step for hardware that is not here, and audit it.

    Nothing is run and no accelerator is needed: the compilers of TPUs and GPUs work on any Linux
    machine (`pip install 'zerojax[aot]'`). The compiled program itself shows whether ZeRO took
    effect: what it moves between devices and what it holds, beside the theory and a device's
    memory, and what is wrong.

    A program is kept, and the same question answered at once: in `~/.cache/zerojax/programs`, or
    where the variable `ZEROJAX_CACHE` says.

    Exit status: 0 all is well; 1 the audit found problems, or a program does not fit; 2 asked for
    what can't be done.

    Examples: GPT-2 XL on a node of eight H100s; all stages side by side on eight TPU chips, with a
    drawing; a hundred billion parameters on a pod slice; the same on GPUs as the paper did, 16 of
    them to a layer; and what a compiler makes of it all.

    ```
    zerojax compile --model gpt2-xl --topology h100:1x8 --stage 2
    zerojax compile --model gpt2-xl --topology v6e:2x4 --all-stages --plot stages.png
    zerojax compile --model zero-100b --topology v5p:4x4x8 --stage 3 --batch-size 256
    zerojax compile --model zero-100b --topology h100:50x8 --model-axis 16 --config C4 \
        --batch-size 400
    zerojax compile --topology h100:4x8 --stage 1 --accumulate 8 --hlo step.txt
    ```
    """
    screen = CompileScreen()
    with refusing():
        requests = read_requests(options)
    screen.start(requests[0])
    results = _compile_all(requests, screen)
    screen.compiled(results)
    screen.results(results)
    screen.wrote(*write(results))
    complaints = {one.stage: ", and ".join(one.complaints) for one in results if one.complaints}
    if complaints:
        raise Failure("; ".join(f"stage {stage}: {x}" for stage, x in complaints.items()), 1)


def _compile_all(requests: Sequence[CompileRequest], screen: CompileScreen) -> list[CompileResult]:
    """Compile and audit every stage, each task shown with its seconds."""
    cache = None if requests[0].options.no_cache else ProgramCache()
    results = []
    for request in requests:
        compilation = _compile(request, cache, screen)
        read = functools.partial(CompileResult.of, request, compilation)
        results.append(
            run_task(screen.console, f"stage {request.stage}: reading the program", read)
        )
    for note in cache.notes if cache is not None else ():
        screen.say(f"note: {note}")
    return results


def _compile(
    request: CompileRequest, cache: ProgramCache | None, screen: CompileScreen
) -> Compilation:
    key = None if cache is None else request.key
    if cache is not None and (kept := cache.find(request.key)) is not None:
        return kept
    name, where = f"stage {request.stage}", request.options.topology
    lowered = run_task(screen.console, f"{name}: tracing and lowering", request.lower)
    try:
        work = functools.partial(compile_lowered, lowered, cache, key)
        return run_task(screen.console, f"{name}: compiling for {where}", work)
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"{name}: the compiler failed: {error}", 1) from error
