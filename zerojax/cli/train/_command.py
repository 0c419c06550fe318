"""`zerojax train`: parse, prepare, train, show."""

from __future__ import annotations

from pathlib import Path

import typer

from zerojax.cli.shared import _residual_options as r
from zerojax.cli.shared import _step_options as s
from zerojax.cli.shared._errors import refusing
from zerojax.cli.train import _options as o
from zerojax.cli.train._loop import run
from zerojax.cli.train._run import prepare, take_up
from zerojax.cli.train._screen import Screen


def train(
    ctx: typer.Context,
    model: s.Model[str] = "tiny",
    context: s.Context = None,
    remat_policy: r.RematName = None,
    loss_chunk: r.LossChunk = None,
    stage: s.Stage = None,
    config: r.Config = None,
    model_axis: r.ModelAxis = None,
    sequence_parallel: r.SequenceParallel = False,
    offload: r.Offload = None,
    devices: o.Devices = None,
    precision: s.PrecisionName = "fp32",
    layout: o.ShowLayout = False,
    steps: o.Steps = 200,
    batch_size: o.BatchSize = None,
    accumulate: s.Accumulate = 1,
    optimizer: s.Optimizer = "adamw",
    lr: o.LearningRate = None,
    warmup: o.Warmup = None,
    weight_decay: o.WeightDecay = 0.1,
    clip_norm: o.ClipNorm = 1.0,
    seed: o.Seed = 0,
    init: o.Init = None,
    data: o.Data = None,
    eval_every: o.EvalEvery = None,
    eval_windows: o.EvalWindows = 256,
    sample_bytes: o.SampleBytes = 200,
    prompt: o.Prompt = None,
    out: o.Out = Path("runs/train"),
    save_every: o.SaveEvery = None,
    keep: o.Keep = None,
    resume: o.Resume = False,
) -> None:
    """Train a GPT on the bytes of text under a ZeRO stage.

    Shows the bytes that one device holds of each kind, beside the theory and beside plain data
    parallelism; trains; evaluates on held-out text; writes metrics.jsonl and training.png to the
    folder `--out`; ends with a sample of what the model writes. Ctrl-C finishes the step and
    writes what there is.

    Without an accelerator the devices are virtual ones on the CPU: they hold, compute and exchange
    what real ones would.

    Examples: the tiny model on Python's standard library; everything partitioned, with the reason
    for each leaf; the paper's configuration C4, with each layer shared by two devices; text of
    one's own, with checkpoints; and going on from them, also on another number of devices.

    ```
    zerojax train
    zerojax train --stage 3 --precision bf16 --layout
    zerojax train --config C4 --model-axis 2
    zerojax train --data 'books/*.txt' --steps 2000 --save-every 500 --out runs/books
    zerojax train --resume --steps 4000 --out runs/books
    ```
    """
    options = o.Options(
        model=model, context=context, stage=stage, config=config, model_axis=model_axis,
        sequence_parallel=sequence_parallel, remat_policy=remat_policy, loss_chunk=loss_chunk,
        offload=tuple(offload or ()), devices=devices, precision=precision, layout=layout,
        steps=steps, batch_size=batch_size, accumulate=accumulate, optimizer=optimizer, lr=lr,
        warmup=warmup, weight_decay=weight_decay, clip_norm=clip_norm, seed=seed, init=init,
        data=tuple(data or ()), eval_every=eval_every, eval_windows=eval_windows, prompt=prompt,
        sample_bytes=sample_bytes, out=out, save_every=save_every, keep=keep, resume=resume,
    )  # fmt: skip
    screen = Screen()
    with refusing():
        options, checkpoint = take_up(options, _given(ctx))
        session = prepare(options, checkpoint)
    run(session, screen)


def _given(ctx: typer.Context) -> frozenset[str]:
    """Name the options that were given, and not left out."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(
        name for name, source in sources.items() if source and source.name == "COMMANDLINE"
    )
