"""What `zerojax compile` was asked, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zerojax.aot import Topology, device_memory, digest, parse_topology, topology_mesh
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.shared._built_step import gpt_layout
from zerojax.cli.shared._files import check_outputs
from zerojax.layout import Description, Layout
from zerojax.models import gpt
from zerojax.train import TrainStep, make_train_step

#: The clipping of a step; it moves no byte.
CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A step to compile, for one stage.

    Attributes:
        num_examples: in one step, over all devices and microbatches.
    """

    options: CompileOptions
    config: gpt.Config
    topology: Topology
    num_examples: int
    tx: optax.GradientTransformation
    step: TrainStep

    @property
    def layout(self) -> Layout:
        """Where the leaves of the state live."""
        return self.step.layout

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return self.layout.stage

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return device_memory(self.topology.chip)

    @functools.cached_property
    def description(self) -> Description:
        """The placement of every leaf, with the bytes by the stage's formula."""
        return self.layout.describe(self.tx, self.step.recipe)

    @functools.cached_property
    def key(self) -> str:
        """The digest of all that decides the answer."""
        return digest(
            {
                "config": dataclasses.asdict(self.config),
                "topology": dataclasses.asdict(self.topology),
                "mesh": list(self.layout.mesh.shape.items()),
                "axis": self.layout.axis,
                "stage": self.stage,
                "num_examples": self.num_examples,
                "optimizer": self.options.optimizer,
                "recipe": self.step.recipe.to_dict(),
            }
        )

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the step."""
        shape = (self.num_examples, self.config.context + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)
        return self.step.lower(self.step.abstract_state(), batch)


def read_requests(options: CompileOptions) -> list[CompileRequest]:
    """Check what was asked, and return a request for each stage."""
    topology = parse_topology(options.topology)
    axes = options.mesh_axes(topology.num_devices)
    config = dataclasses.replace(options.chosen_model, scan=options.scan)
    num_examples = options.examples(axes["data"])
    mesh = topology_mesh(options.topology, axes)
    recipe = options.recipe(CLIP_NORM)
    tx = options.chosen_optimizer.unscheduled(config.width)
    loss: Any = functools.partial(gpt.loss, config)
    requests = [
        CompileRequest(
            options=options,
            config=config,
            topology=topology,
            num_examples=num_examples,
            tx=tx,
            step=make_train_step(loss, tx, gpt_layout(config, mesh, stage), recipe),
        )
        for stage in options.stages
    ]
    texts = {f"--hlo (stage {stage})": options.hlo_file(stage) for stage in options.stages}
    check_outputs({"--plot": options.plot_file, "--json": options.json, **texts})
    return requests
