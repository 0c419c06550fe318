"""The largest models that some hardware holds, by stage, configuration and number of devices."""

from __future__ import annotations

import dataclasses
import functools

from zerojax.cli.plan._request import PlanRequest
from zerojax.planner import CONFIGURATIONS, Transformer, max_params, max_transformer, plan
from zerojax.recipe import Recipe

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
class LargestModels:
    """The largest models of some hardware.

    Attributes:
        model_axis: devices that cut the parameters of a stage's column.
        gpt_axis: devices that cut the GPTs.
        examples: of a microbatch, for each group of devices that cut a GPT.
        bytes_per_param: of parameters, gradients and optimizer.
    """

    request: PlanRequest
    model_axis: int
    gpt_axis: int
    examples: int
    bytes_per_param: tuple[float, ...]
    rows: tuple[LargestRow, ...]

    def to_dict(self) -> dict[str, object]:
        """Return the figures as plain data."""
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


def find_largest(request: PlanRequest) -> LargestModels:
    """Find the largest models."""
    options, hardware = request.options, request.hardware
    axis = options.model_parts
    gpt_axis = options.model_axis or min(MODEL_AXIS, hardware.domain)
    groups = max(1, options.devices // gpt_axis)
    examples = dataclasses.replace(options, model_axis=gpt_axis).examples(groups) // groups
    states = plan(
        MANY,
        request.tx,
        stage=0,
        num_devices=1,
        hardware=hardware,
        recipe=Recipe(precision=options.precision),
    ).bytes
    kinds = (states.parameters, states.gradients, states.optimizer)
    of_param, of_gradient, of_optimizer = (round(count / MANY, 6) for count in kinds)
    params = functools.partial(
        max_params,
        hardware,
        model_axis=axis,
        param_bytes=of_param,
        grad_bytes=of_gradient,
        optimizer_bytes_per_param=of_optimizer,
    )
    widths = (of_param, of_gradient, of_optimizer)
    gpts = functools.partial(
        max_transformer,
        hardware,
        model_axis=gpt_axis,
        batch=examples,
        num_tokens=options.context,
        bytes_per_param=widths,
    )
    rows = []
    for count in sorted({*COUNTS, options.devices}):
        shards, left = divmod(count, axis)
        gpt_shards, gpt_left = divmod(count, gpt_axis)
        row = LargestRow(
            num_devices=count,
            params={s: None if left else params(stage=s, num_shards=shards) for s in STAGES},
            gpts={
                name: None if gpt_left else gpts(name, num_shards=gpt_shards)
                for name in CONFIGURATIONS
            },
        )
        if any((*row.params.values(), *row.gpts.values())):
            rows.append(row)
    return LargestModels(
        request=request,
        model_axis=axis,
        gpt_axis=gpt_axis,
        examples=examples,
        bytes_per_param=widths,
        rows=tuple(rows),
    )
