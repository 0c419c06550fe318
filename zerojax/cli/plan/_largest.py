"""The largest models that some hardware holds, by stage, configuration and number of devices."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerojax.cli.plan._request import PlanQuestion
from zerojax.planner import CONFIGURATIONS, Transformer, max_params, max_transformer, plan

STAGES = (0, 1, 2, 3)
#: Numbers of devices, with that which was asked for.
COUNTS = tuple(2**power for power in range(11))
#: The model axis of the paper's figure 6, as far as fast links go.
MODEL_AXIS = 16
#: A number of parameters on which an optimizer's bytes for each show.
MANY = 10**12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestRow:
    """What some devices hold.

    Attributes:
        num_devices: all of them.
        params: by stage, the most parameters whose states fit; None where not one does.
        gpts: by configuration, the largest GPT; None where the devices are too few.
    """

    num_devices: int
    params: dict[int, int | None]
    gpts: dict[str, Transformer | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Largest:
    """The largest models of some hardware.

    Attributes:
        model_axis: devices that cut the parameters of a stage's column.
        gpt_axis: devices that cut the GPTs.
        bytes_per_param: of parameters, gradients and optimizer.
    """

    question: PlanQuestion
    model_axis: int
    gpt_axis: int
    bytes_per_param: tuple[float, float, float]
    rows: tuple[LargestRow, ...]

    def to_dict(self) -> dict[str, object]:
        """Give the figures as plain data."""
        return {
            "model_axis_of_params": self.model_axis,
            "model_axis_of_gpts": self.gpt_axis,
            "bytes_per_param": dict(
                zip(("parameters", "gradients", "optimizer"), self.bytes_per_param, strict=True)
            ),
            "rows": [
                {
                    "num_devices": row.num_devices,
                    "params": row.params,
                    "gpts": {
                        name: one and {**dataclasses.asdict(one), "num_params": one.num_params}
                        for name, one in row.gpts.items()
                    },
                }
                for row in self.rows
            ],
        }


def find_largest(question: PlanQuestion) -> Largest:
    """Find the largest models.

    Raises:
        ValueError: an option that can't be met.
    """
    options, hardware = question.options, question.hardware
    asked = options.model_axis
    axis, gpt_axis = asked or 1, asked or min(MODEL_AXIS, hardware.domain)
    states = plan(
        MANY, question.tx, stage=0, num_devices=1, hardware=hardware, precision=question.precision
    ).bytes
    widths = (
        round(states.parameters / MANY, 6),
        round(states.gradients / MANY, 6),
        round(states.optimizer / MANY, 6),
    )
    counts = sorted({*COUNTS, options.devices})
    rows = (_row(question, count, axis, gpt_axis, widths) for count in counts)
    return Largest(
        question=question,
        model_axis=axis,
        gpt_axis=gpt_axis,
        bytes_per_param=widths,
        rows=tuple(row for row in rows if any((*row.params.values(), *row.gpts.values()))),
    )


def _row(
    question: PlanQuestion,
    num_devices: int,
    axis: int,
    gpt_axis: int,
    widths: tuple[float, float, float],
) -> LargestRow:
    given: dict[str, Any] = {
        "param_bytes": widths[0], "grad_bytes": widths[1], "optimizer_bytes_per_param": widths[2],
    }  # fmt: skip
    memory = question.hardware

    def params(stage: int) -> int | None:
        if num_devices % axis:
            return None
        return max_params(
            memory, stage=stage, num_shards=num_devices // axis, model_axis=axis, **given
        )

    def gpt(name: str) -> Transformer | None:
        if num_devices % gpt_axis:
            return None
        return max_transformer(
            memory, name, num_shards=num_devices // gpt_axis, model_axis=gpt_axis,
            batch=question.options.batch, num_tokens=question.options.context, **given,
        )  # fmt: skip

    return LargestRow(
        num_devices=num_devices,
        params={stage: params(stage) for stage in STAGES},
        gpts={name: gpt(name) for name in CONFIGURATIONS},
    )
