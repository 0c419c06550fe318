"""What `zerojax compile` was asked, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from zerojax.aot import Topology, device_memory, digest, parse_topology, topology_mesh
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.shared._optimizers import find_optimizer, make_schedule
from zerojax.cli.shared._residual_options import MODEL_AXIS, Residual
from zerojax.cli.train._run import PRECISIONS
from zerojax.layout import Description, Layout, make_layout
from zerojax.models import gpt
from zerojax.recipe import OffloadPolicy, Precision, RematPolicy
from zerojax.train import TrainStep, abstract_train_state, make_train_step

#: What the schedule, the decay and the clipping of the step are; none of them moves a byte.
STEPS, WARMUP, WEIGHT_DECAY, CLIP_NORM = 1000, 100, 0.1, 1.0
#: Names that an axis may have: the presets are cut over one axis beside those of data.
DATA_AXES = ("data", "fsdp", "node", "slice", "x", "y", "z")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A step to compile, for one stage.

    Attributes:
        residual: what was asked for beside the model states.
        memory: bytes of a device.
        num_examples: in one step, over all devices and microbatches.
    """

    options: CompileOptions
    residual: Residual
    config: gpt.Config
    topology: Topology
    memory: int
    num_examples: int
    layout: Layout
    tx: optax.GradientTransformation
    precision: Precision
    remat: RematPolicy | None
    offload: OffloadPolicy | None
    step: TrainStep

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.layout.stage

    @property
    def reduce(self) -> Literal["once", "each"]:
        """When the step sums gradients over devices."""
        return "once" if self.step.reduce == "once" else "each"

    @functools.cached_property
    def description(self) -> Description:
        """The placement of every leaf, with the bytes by the stage's formula."""
        return self.layout.describe(self.tx, self.precision)

    @functools.cached_property
    def key(self) -> str:
        """The digest of all that decides the answer."""
        options = self.options
        return digest(
            {
                "config": dataclasses.asdict(self.config),
                "topology": [self.topology.chip, *self.topology.dims, self.topology.num_slices],
                "mesh": list(self.layout.mesh.shape.items()),
                "axis": self.layout.axis,
                "stage": self.stage,
                "num_examples": self.num_examples,
                "precision": options.precision,
                "accumulate": options.accumulate,
                "reduce": self.reduce,
                "optimizer": options.optimizer,
                "remat": self.remat and dataclasses.asdict(self.remat),
                "offload": self.offload and dataclasses.asdict(self.offload),
            }
        )

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the step."""
        state = abstract_train_state(
            functools.partial(gpt.init, self.config), self.tx, self.layout, jax.random.key(0),
            precision=self.precision, offload=self.offload,
        )  # fmt: skip
        shape = (self.num_examples, self.config.context + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)
        return self.step.lower(state, batch)


def read_question(options: CompileOptions) -> list[Question]:
    """Check what was asked, and give a question for each stage.

    Raises:
        ValueError: an option that can't be met.
        MissingCompiler: there is no compiler for the topology here.
    """
    residual, stages = options.residual, options.stages
    config = gpt.preset(options.model)
    config = dataclasses.replace(
        config, context=options.context or config.context, scan=options.scan
    )
    choice = find_optimizer(options.optimizer)
    if options.precision not in PRECISIONS:
        raise ValueError(f"--precision {options.precision}: give one of {', '.join(PRECISIONS)}")
    if options.reduce not in (None, "once", "each"):
        raise ValueError(f"--reduce {options.reduce}: give once or each")
    if options.reduce == "once" and 3 in stages:
        raise ValueError(
            "--reduce once needs a whole gradient on each device, and stage 3 never holds one; "
            "leave it out, or give --stage 1 or 2"
        )
    topology = parse_topology(options.topology)
    axes = read_axes(options.mesh, topology, residual)
    residual = dataclasses.replace(residual, model_axis=axes.get(MODEL_AXIS))
    config = residual.model(config)
    mesh = topology_mesh(options.topology, axes)
    schedule = make_schedule(choice, None, WARMUP, STEPS, config.width)
    common = {
        "options": options,
        "residual": residual,
        "config": config,
        "topology": topology,
        "memory": device_memory(topology.chip),
        "tx": choice.make(schedule, WEIGHT_DECAY),
        "precision": PRECISIONS[options.precision],
        "remat": residual.remat(),
        "offload": residual.offloads(choice, list(mesh.devices.flat)),
    }
    return [_of_stage(mesh, stage, common) for stage in stages]


def read_axes(
    given: str | None, topology: Topology, residual: Residual | None = None
) -> dict[str, int]:
    """Read the axes of the mesh, "data=8" or "node=4,data=8"; None is one axis of all devices.

    Args:
        given: as the user wrote it.
        topology: whose devices they share out.
        residual: options that may ask for a model axis, which comes last where it is not named.

    Raises:
        ValueError: what is given can't be read, names an axis of another use, contradicts the
            model axis, or has another number of devices than the topology.
    """
    residual = residual or Residual()
    there = topology.num_devices
    if given is None:
        return residual.axes(there)
    axes = _parse_axes(given, there)
    asked = residual.model_axis
    if asked is not None and asked != axes.get(MODEL_AXIS, asked):
        raise ValueError(
            f"--mesh {given} and --model-axis {asked} name different sizes of the model axis: give "
            "one of them"
        )
    axes |= {name: size for name, size in residual.model_axes.items() if name not in axes}
    if math.prod(axes.values()) != there:
        beside = f" and --model-axis {asked}" if asked is not None else ""
        raise ValueError(
            f"--mesh {given}{beside} has {math.prod(axes.values())} devices, and the topology "
            f"{topology.name} has {there}; give sizes whose product is {there}"
        )
    return axes


def _parse_axes(given: str, num_devices: int) -> dict[str, int]:
    """Read names and sizes."""
    axes: dict[str, int] = {}
    for part in given.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*", part)
        if match is None or not int(match[2]):
            raise ValueError(f"--mesh {given}: {part!r} is no axis and size; give data=8, say")
        if match[1] in axes:
            raise ValueError(f"--mesh {given} names the axis {match[1]!r} twice")
        axes[match[1]] = int(match[2])
    for name in axes:
        if name not in (*DATA_AXES, MODEL_AXIS):
            raise ValueError(
                f"--mesh {given}: the models of this command are not cut over an axis {name!r}, "
                f"so its devices would all do the same; give axes of data "
                f"({', '.join(DATA_AXES)}) and the axis {MODEL_AXIS}, such as data={num_devices}"
            )
    return axes if set(axes) != {MODEL_AXIS} else {"data": 1, **axes}


def _of_stage(mesh: Mesh, stage: int, common: dict[str, Any]) -> Question:
    """Make the layout and the step of a stage, from what all stages have in common."""
    options, config, precision = common["options"], common["config"], common["precision"]
    shapes = jax.eval_shape(functools.partial(gpt.init, config), jax.random.key(0))
    layout = make_layout(
        shapes, mesh, stage=stage,
        axis=[name for name in mesh.axis_names if name != MODEL_AXIS],
        specs=None if config.model_axis is None else gpt.specs(config),
    )  # fmt: skip
    step = make_train_step(
        functools.partial(gpt.loss, config), common["tx"], layout, precision=precision,
        accumulate=options.accumulate, reduce=options.reduce, clip_norm=CLIP_NORM,
        remat=common["remat"], offload=common["offload"],
    )  # fmt: skip
    return Question(
        layout=layout,
        num_examples=options.batch * options.accumulate * layout.num_batch_parts,
        step=step,
        **common,
    )
