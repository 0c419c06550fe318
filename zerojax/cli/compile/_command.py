"""`zerojax compile`: parse, compile, audit, show."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import jax

from zerojax.aot import Compilation, MissingCompiler, ProgramCache, compile_lowered
from zerojax.cli.compile import _options as o
from zerojax.cli.compile._outputs import Outputs
from zerojax.cli.compile._request import Question, read_question
from zerojax.cli.compile._result import Answer
from zerojax.cli.compile._screen import CompileScreen
from zerojax.cli.shared import _residual_options as r
from zerojax.cli.shared import _step_options as s
from zerojax.cli.shared._errors import Failure, refusing
from zerojax.cli.shared._progress import Phases


def compile_(
    topology: o.TopologyName,
    mesh: o.MeshAxes = None,
    model: s.Model[str] = "gpt2-small",
    context: s.Context = None,
    scan: o.Scan = True,
    remat: r.KeepsRemat = None,
    remat_policy: r.RematName = None,
    loss_chunk: r.LossChunk = None,
    stage: s.Stage = None,
    all_stages: o.AllStages = False,
    config: r.Config = None,
    model_axis: r.ModelAxis = None,
    sequence_parallel: r.SequenceParallel = False,
    offload: r.Offload = None,
    precision: s.PrecisionName = "bf16",
    reduce: s.Reduce = None,
    batch: o.Batch = 1,
    accumulate: s.Accumulate = 1,
    optimizer: s.Optimizer = "adamw",
    plot: s.Plot = None,
    hlo: o.Hlo = None,
    json: s.Json = None,
    no_cache: o.NoCache = False,
) -> None:
    r"""Compile a training step for hardware that is not here, and audit it.

    Nothing is run and no accelerator is needed: the compilers of TPUs and GPUs work on any Linux
    machine (`pip install 'zerojax[aot]'`). The compiled program itself shows whether ZeRO took
    effect: what it moves between devices and what it holds, beside the theory, and what is wrong.
    Then comes what one device holds, beside its memory.

    A program is kept, and the same question answered at once: in `~/.cache/zerojax/programs`, or
    where the variable `ZEROJAX_CACHE` says.

    Exit status: 0 all is well; 1 the audit found problems, or a program does not fit; 2 asked for
    what can't be done.

    Examples: GPT-2 XL on a node of eight H100s; all stages side by side on eight TPU chips, with a
    drawing; a hundred billion parameters on a pod slice; the same on GPUs as the paper did, 16 of
    them to a layer; and what a compiler makes of it all.

    ```
    zerojax compile --model gpt2-xl --topology h100:1x8 --stage 2
    zerojax compile --model gpt2-xl --topology v6e:2x4 --all-stages
    zerojax compile --model zero-100b --topology v5p:4x4x8 --stage 3 --batch 2
    zerojax compile --model zero-100b --topology h100:50x8 --mesh data=25,model=16 \
        --config C4 --batch 16
    zerojax compile --topology h100:4x8 --stage 1 --accumulate 8 --hlo step.txt
    ```
    """
    options = o.CompileOptions(
        topology=topology, mesh=mesh, model=model, context=context, scan=scan, remat=remat,
        remat_policy=remat_policy, loss_chunk=loss_chunk, stage=stage, all_stages=all_stages,
        config=config, model_axis=model_axis, sequence_parallel=sequence_parallel,
        offload=tuple(offload or ()), precision=precision, reduce=reduce, batch=batch,
        accumulate=accumulate, optimizer=optimizer, plot=plot, hlo=hlo, json=json,
        no_cache=no_cache,
    )  # fmt: skip
    _run(options)


def _run(options: o.CompileOptions) -> None:
    """Read the question, answer it, and show and write the answers."""
    screen = CompileScreen()
    with refusing():
        try:
            questions = read_question(options)
        except MissingCompiler as error:
            raise Failure(str(error)) from error
        outputs = Outputs.of(options)
        outputs.check()
    screen.start(questions[0])
    answers = _answer_all(questions, screen)
    screen.compiled(answers)
    if options.all_stages:
        screen.compare(answers)
    else:
        screen.show(answers[0])
    screen.wrote(outputs.write(answers))
    _end(answers)


def _answer_all(questions: Sequence[Question], screen: CompileScreen) -> list[Answer]:
    """Compile and audit every stage, each phase shown with its seconds."""
    cache = None if questions[0].options.no_cache else ProgramCache()
    phases = Phases(screen.console)
    answers = []
    try:
        with phases.shown():
            for question in questions:
                compilation = _compile(question, cache, phases)
                answers.append(
                    phases.run(
                        f"stage {question.stage}: reading the program",
                        lambda: Answer.of(question, compilation),  # noqa: B023 - called here
                    )
                )
    except KeyboardInterrupt:
        screen.say("interrupted")
        # A compiler that is at work in a thread can't be stopped, and leaving around it crashes.
        sys.stdout.flush()
        os._exit(130)
    for note in cache.notes if cache is not None else ():
        screen.say(f"note: {note}")
    return answers


def _compile(question: Question, cache: ProgramCache | None, phases: Phases) -> Compilation:
    kept = cache.find(question.key) if cache is not None else None
    if kept is not None:
        return kept
    name = f"stage {question.stage}"
    lowered = phases.run(f"{name}: tracing and lowering", question.lower)
    try:
        return phases.run(
            f"{name}: compiling for {question.options.topology}",
            lambda: compile_lowered(lowered, cache, None if cache is None else question.key),
        )
    except jax.errors.JaxRuntimeError as error:
        raise Failure(f"{name}: the compiler failed: {error}", 1) from error


def _end(answers: Sequence[Answer]) -> None:
    """End with status 1 where something is wrong, and say what."""
    wrong = [
        f"stage {answer.stage}: {', and '.join(answer.complaints)}"
        for answer in answers
        if answer.complaints
    ]
    if wrong:
        raise Failure("; ".join(wrong), 1)
