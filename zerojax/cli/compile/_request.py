"""What `zerojax compile` was asked, checked before anything is compiled."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zerojax.aot import parse_topology, topology_mesh
from zerojax.cli.shared._command import option
from zerojax.cli.shared._machine import check_output
from zerojax.cli.shared._options import HARDWARE, MODEL, OUTPUT, ZERO, BuiltStepOptions, gpt_layout
from zerojax.layout import STAGES
from zerojax.models import gpt
from zerojax.planner import find_hardware
from zerojax.train import make_train_step

#: The clipping of a step; it moves no byte.
CLIP_NORM = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions(BuiltStepOptions):
    """What `zerojax compile` was asked for; None leaves a choice to it."""

    model: str = option("gpt2-small", metavar="NAME", panel=MODEL)
    topology: str = option(..., metavar="NAME", panel=HARDWARE)
    """Nodes x GPUs (h100:1x8, a100:4x8; also h200, b200), TPU chips along each dim of the torus
    (v5e:2x4, v6e:16x16, v4:2x2x4, v5p:8x8x16, tpu7x:2x2x1), or several TPU slices
    (v5e:4x4x2slices)."""
    all_stages: bool = option(False, panel=ZERO)
    """Compile stages 0 to 3 and compare them."""
    plot: Path | None = option(None, metavar="FILE.png", panel=OUTPUT)
    """Draw what a device holds and moves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.all_stages and "stage" in self.given:
            raise ValueError("--stage is one of --all-stages: leave one of them out")

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages to compile."""
        return tuple(STAGES) if self.all_stages else (self.stage,)


class CompileRequest:
    """A step to compile, for one stage.

    Attributes:
        memory: bytes of a device.
        config: the model.
        num_examples: in one step, over all devices and microbatches.
        step: the train step.
        theory: bytes of the model states by the stage's formula.
    """

    def __init__(self, options: CompileOptions, memory: int, mesh: Mesh, stage: int) -> None:
        self.options, self.memory, self.stage = options, memory, stage
        self.config = options.chosen_model
        self.num_examples = options.examples(mesh.shape["data"])
        loss: Any = functools.partial(gpt.loss, self.config)
        tx = options.chosen_optimizer.unscheduled(self.config.width)
        recipe = options.recipe(CLIP_NORM)
        self.layout = gpt_layout(self.config, mesh, stage)
        self.step = make_train_step(loss, tx, self.layout, recipe)
        self.theory = self.layout.count(tx, recipe).theory["total"]

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower the step."""
        shape = (self.num_examples, self.config.context + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.layout.batch)
        return self.step.lower(self.step.abstract_state(), batch)


def read_requests(options: CompileOptions) -> list[CompileRequest]:
    """Check what was asked, and return a request for each stage."""
    topology = parse_topology(options.topology)
    mesh = topology_mesh(options.topology, options.mesh_axes(topology.num_devices))
    memory = find_hardware(topology.chip).memory
    requests = [CompileRequest(options, memory, mesh, stage) for stage in options.stages]
    check_output("--plot", options.plot)
    return requests
