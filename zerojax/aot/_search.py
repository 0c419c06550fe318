"""`search_plans`: the planner's search, its winners compiled for hardware that is not here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import optax

from zerojax._tree import as_shapes
from zerojax._types import LossFn, PyTree
from zerojax.aot._chips import GPU_CHIPS, TPU_CHIPS
from zerojax.aot._compile import DoesNotFit, compile_step
from zerojax.aot._topology import parse_topology, topology_mesh
from zerojax.audit import audit
from zerojax.layout import MIN_SIZE, Rule, make_layout
from zerojax.planner import (
    Choices,
    Hardware,
    Plan,
    Space,
    Transformer,
    Verified,
    as_count,
    find_hardware,
    rematerialised,
    search,
    torus_shape,
)
from zerojax.recipe import Precision, Recipe
from zerojax.train import make_train_step

#: Winners that `verify=True` compiles.
WINNERS = 3


def search_plans(
    params: PyTree | float,
    tx: optax.GradientTransformation,
    *,
    num_devices: int,
    hardware: str | Hardware,
    precision: Precision | None = None,
    memory_limit: float | None = None,
    loss_fn: LossFn | None = None,
    batch: PyTree = None,
    has_aux: bool = False,
    transformer: Transformer | None = None,
    tokens_per_device: float | None = None,
    specs: PyTree = None,
    rules: Sequence[Rule] = (),
    min_size: int | None = None,
    space: Space | None = None,
    verify: bool | int = False,
    topology: str | None = None,
) -> Choices:
    """Search for the fastest way to train under a memory limit, and compile the winners.

    Goes through stages, shard groups (all devices, or those of a node or slice), model axes,
    rematerialisation, what the host keeps, and microbatches. The choices are one plan for each
    family, fastest first; `.pareto` is the front of time against memory, `.rejected` what did not
    fit, each with what it would have needed.

    Args:
        params, tx, num_devices, hardware, precision: as for `plan`.
        memory_limit: bytes per device that a step may take; the device's memory by default.
        loss_fn, batch, has_aux, transformer, specs, rules, min_size: as for `plan`.
        tokens_per_device: tokens per device and step, all microbatches together.
        space: what to go through.
        verify: compile the best choices (True: three) and put their peaks beside the planned ones;
            needs `loss_fn` and the compilers of `pip install 'zerojax[aot]'`.
        topology: what to compile for ("v5p:4x4x4"); by default what the hardware's name and the
            number of devices say.

    Raises:
        ValueError: nothing meets the limit (the smallest need and how it is met are named), or an
            option that can't be meant.
    """
    if verify and (loss_fn is None or batch is None):
        raise ValueError("verify compiles the step: give loss_fn and batch")
    name = topology
    if verify and name is None:
        name = topology_name(find_hardware(hardware), as_count("num_devices", num_devices))
    choices = search(
        params, tx, num_devices=num_devices, hardware=hardware, precision=precision,
        memory_limit=memory_limit, loss_fn=loss_fn, batch=batch, has_aux=has_aux,
        transformer=transformer, tokens_per_device=tokens_per_device, specs=specs, rules=rules,
        min_size=min_size, space=space,
    )  # fmt: skip
    if name is None or not verify:
        return choices
    job = _Job(params, tx, precision or Precision(), loss_fn, batch, has_aux, rules, min_size, name)
    wanted = WINNERS if verify is True else verify
    verified: dict[int, Verified] = {}
    for number, plan in enumerate(choices):
        if sum(one.peak is not None for one in verified.values()) >= wanted:
            break
        verified[number] = job.compile(plan)
    return dataclasses.replace(choices, verified=verified)


def topology_name(hardware: Hardware, num_devices: int) -> str:
    """Name the topology of some devices: whole nodes, or the slice that one would rent.

    Raises:
        ValueError: no compiler knows the hardware, or the devices are no whole nodes or slices.
    """
    chip = {"v7": "tpu7x"}.get(hardware.name, hardware.name)  # as libtpu calls it
    per_domain = min(hardware.domain, num_devices)
    domains, rest = divmod(num_devices, per_domain)
    if rest:
        raise ValueError(
            f"{num_devices} x {hardware.name} are no whole nodes or slices of {per_domain}; say "
            "topology="
        )
    if hardware.torus:
        dims = "x".join(map(str, torus_shape(hardware, per_domain)))
        name = f"{chip}:{dims}" + (f"x{domains}slices" if domains > 1 else "")
    else:
        name = f"{chip}:{domains}x{per_domain}"
    if chip not in (*TPU_CHIPS, *GPU_CHIPS):
        raise ValueError(
            f"{hardware.name} can't be compiled for without one; the compilers know "
            f"{', '.join((*TPU_CHIPS, *GPU_CHIPS))}: plan without verify, or say topology="
        )
    if parse_topology(name).num_devices != num_devices:
        raise ValueError(f"{num_devices} x {hardware.name} are no whole chips; say topology=")
    return name


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a winner is compiled from."""

    params: PyTree
    tx: optax.GradientTransformation
    precision: Precision
    loss_fn: Any
    batch: PyTree
    has_aux: bool
    rules: Sequence[Rule]
    min_size: int | None
    topology: str

    def compile(self, plan: Plan) -> Verified:
        """Compile one choice; one that can't be made from the loss alone is left out."""
        if plan.model_axis > 1:
            return Verified(None, "not compiled: the loss would have to be model-parallel")
        if plan.offload:
            return Verified(None, "not compiled: with an offload the winners are planned only")
        copies = plan.num_devices // plan.num_shards
        replicas = {"replica": copies} if copies > 1 else {}
        mesh = topology_mesh(self.topology, replicas | {"data": plan.num_shards})
        shapes = as_shapes(self.params)
        layout = make_layout(
            shapes, mesh, stage=plan.stage, axis="data", batch_axes=tuple(mesh.axis_names),
            rules=self.rules, min_size=MIN_SIZE if self.min_size is None else self.min_size,
        )  # fmt: skip
        loss_fn = self.loss_fn
        if plan.remat is not None:
            loss_fn = rematerialised(loss_fn, plan.remat)
        recipe = Recipe(precision=self.precision, accumulate=plan.accumulate)
        step = make_train_step(loss_fn, self.tx, layout, recipe, has_aux=self.has_aux)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout.batch), self.batch
        )
        try:
            program = compile_step(step.lower(step.abstract_state(), batch))
        except DoesNotFit as refusal:
            return Verified(refusal.shortage.needed, str(refusal))
        report = audit(program, layout, Recipe(accumulate=plan.accumulate))
        return Verified(report.memory.peak, report.verdict)
