"""`verify_plans`: the winners of a search, compiled for hardware that is not here."""

from __future__ import annotations

import dataclasses

from zerojax._tree import as_shapes
from zerojax._types import LossFn
from zerojax.aot._chips import GPU_CHIPS, TPU_CHIPS
from zerojax.aot._compile import DoesNotFit, compile_step
from zerojax.aot._topology import parse_topology, topology_mesh
from zerojax.audit import audit
from zerojax.layout import make_layout
from zerojax.planner import (
    Choices,
    Hardware,
    Plan,
    SearchRequest,
    Verified,
    as_given,
    torus_shape,
)
from zerojax.train import make_train_step


def verify_plans(choices: Choices, *, count: int = 3, topology: str | None = None) -> Choices:
    """Compile the best choices of a search, and put their peaks beside the planned ones.

    Choices with model parallelism are left out: a plain loss can't be cut. Needs the compilers of
    `pip install 'zerojax[aot]'`.

    Args:
        choices: what `search_plans` found, for a loss and its batch.
        count: choices to compile.
        topology: what to compile for ("v5p:4x4x4"); by default what the hardware's name and the
            number of devices say.

    Returns:
        The choices, with what the compiler and the audit said in `.verified`.

    Raises:
        TypeError: what is verified is no `Choices`.
        ValueError: the search had no loss, or no compiler knows the hardware.
    """
    asked = as_given(Choices, choices, "zerojax.search_plans(...)").asked
    loss_fn = asked.model.workload.loss_fn
    if loss_fn is None:
        raise ValueError(
            "verify_plans compiles the step: search with workload=Workload(loss_fn=..., batch=...)"
        )
    name = topology or topology_name(asked.hardware, asked.num_devices)
    verified: dict[int, Verified] = {}
    for number, plan in enumerate(choices):
        if sum(one.peak is not None for one in verified.values()) >= count:
            break
        verified[number] = _compile(plan, loss_fn, asked, name)
    return dataclasses.replace(choices, verified=verified)


def topology_name(hardware: Hardware, num_devices: int) -> str:
    """Name the topology of some devices: whole nodes, or the slice that one would rent."""
    chip = {"v7": "tpu7x"}.get(hardware.name, hardware.name)  # as libtpu calls it
    known = (*TPU_CHIPS, *GPU_CHIPS)
    if chip not in known:
        raise ValueError(
            f"{hardware.name} can't be compiled for without one; the compilers know "
            f"{', '.join(known)}: plan without verifying, or say topology="
        )
    per_domain = min(hardware.domain, num_devices)
    domains = num_devices // per_domain
    name = f"{chip}:{domains}x{per_domain}"
    if hardware.torus:
        dims = "x".join(map(str, torus_shape(hardware, per_domain)))
        name = f"{chip}:{dims}" + (f"x{domains}slices" if domains > 1 else "")
    if parse_topology(name).num_devices != num_devices:
        raise ValueError(
            f"{num_devices} x {hardware.name} are no whole nodes, slices or chips; say topology="
        )
    return name


def _compile(plan: Plan, loss_fn: LossFn, asked: SearchRequest, topology: str) -> Verified:
    """Compile one choice; one that can't be made from the loss alone is left out."""
    if plan.model_axis > 1:
        return Verified(None, "not compiled: the loss would have to be model-parallel")
    copies = plan.num_devices // plan.num_shards
    replicas = {"replica": copies} if copies > 1 else {}
    mesh = topology_mesh(topology, replicas | {"data": plan.num_shards})
    model, recipe = asked.model, plan.recipe
    layout = make_layout(
        as_shapes(model.params),
        mesh,
        stage=plan.stage,
        axis="data",
        batch_axes=tuple(mesh.axis_names),
        rules=asked.space.rules,
        min_size=asked.space.min_size,
    )
    step = make_train_step(loss_fn, model.tx, layout, recipe, has_aux=model.workload.has_aux)
    try:
        program = compile_step(step.lower(step.abstract_state(), as_shapes(model.workload.batch)))
    except DoesNotFit as refusal:
        return Verified(refusal.shortage.needed, str(refusal))
    report = audit(program, layout, recipe)
    return Verified(report.memory.peak, report.verdict)
