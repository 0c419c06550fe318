"""What `zerojax compile` was asked, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.aot import Topology, device_memory, digest, parse_topology, topology_mesh
from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.shared._built_step import gpt_layout
from zerojax.cli.shared._files import check_outputs
from zerojax.layout import Layout
from zerojax.models import gpt
from zerojax.train import make_train_step

#: The clipping of a step; it moves no byte.
CLIP_NORM = 1.0


class CompileRequest:
    """A step to compile, for one stage.

    Attributes:
        topology: the hardware; `mesh` has its devices.
        config: the model.
        num_examples: in one step, over all devices and microbatches.
        step: the train step.
    """

    def __init__(self, options: CompileOptions, topology: Topology, mesh: Mesh, stage: int) -> None:
        self.options, self.topology = options, topology
        self.config = dataclasses.replace(options.chosen_model, scan=options.scan)
        self.num_examples = options.examples(mesh.shape["data"])
        self._tx = options.chosen_optimizer.unscheduled(self.config.width)
        loss: Any = functools.partial(gpt.loss, self.config)
        layout = gpt_layout(self.config, mesh, stage)
        self.step = make_train_step(loss, self._tx, layout, options.recipe(CLIP_NORM))

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
    def theory(self) -> int:
        """Bytes of the model states by the stage's formula."""
        return self.layout.describe(self._tx, self.step.recipe).theory["total"]

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
    mesh = topology_mesh(options.topology, options.mesh_axes(topology.num_devices))
    requests = [CompileRequest(options, topology, mesh, stage) for stage in options.stages]
    texts = {f"--hlo (stage {stage})": options.hlo_file(stage) for stage in options.stages}
    check_outputs({"--plot": options.plot, "--json": options.json, **texts})
    return requests
