"""The options that commands share: the model, how it is partitioned, a step, and what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from zerojax.cli.shared._optimizers import OPTIMIZERS
from zerojax.models import gpt

MODEL, ZERO, TRAINING, OUTPUT = "Model", "ZeRO", "Training", "Output"

#: `str` or `int`, or with None where a command can do without.
Given = TypeVar("Given")

Model = Annotated[
    Given,
    typer.Option(metavar="NAME", help=f"A GPT: {', '.join(gpt.PRESETS)}.", rich_help_panel=MODEL),
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of an example.", show_default="the model's own", rich_help_panel=MODEL
    ),
]


def _stage(default: str) -> Any:
    return typer.Option(
        min=0,
        max=3,
        metavar="0|1|2|3",
        help="What is partitioned: 0 nothing (plain data parallelism), 1 optimizer states, "
        "2 also gradients, 3 also parameters.",
        show_default=default,
        rich_help_panel=ZERO,
    )


Stage = Annotated[int | None, _stage("2, or the configuration's")]
PlannedStage = Annotated[int | None, _stage("all, or the configuration's")]
PrecisionName = Annotated[
    str,
    typer.Option(
        metavar="bf16|fp16|fp32",
        help="bf16 or fp16 parameters and gradients with partitioned fp32 masters (fp16 with a "
        "dynamic loss scale), or fp32.",
        rich_help_panel=ZERO,
    ),
]
Reduce = Annotated[
    str | None,
    typer.Option(
        metavar="once|each",
        help="Sum gradients over devices once per step, or for each microbatch.",
        show_default="once at stages 0 and 1 with several microbatches, else each",
        rich_help_panel=ZERO,
    ),
]
Accumulate = Annotated[
    int, typer.Option(min=1, help="Microbatches per step.", rich_help_panel=TRAINING)
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="NAME", help=f"Optax's {', '.join(OPTIMIZERS)}.", rich_help_panel=TRAINING
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.png", help="Keep a drawing.", rich_help_panel=OUTPUT),
]
Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Keep the report as JSON.", rich_help_panel=OUTPUT),
]
