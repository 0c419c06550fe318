"""`compile_plan`: what the compiler makes of a plan."""

from typing import Any

from zerojax._arguments import as_given
from zerojax._tree import as_shapes
from zerojax._types import PyTree
from zerojax.aot._compile import compile_step
from zerojax.aot._topology import parse_topology, topology_mesh
from zerojax.audit import AuditReport, audit
from zerojax.hardware import find_hardware
from zerojax.layout import make_layout
from zerojax.planner import Placement, Plan, Workload
from zerojax.train import make_train_step


def compile_plan(
    plan: Plan,
    params: PyTree,
    tx: Any,
    workload: Workload,
    *,
    topology: str,
    placement: Placement | None = None,
) -> AuditReport:
    """Compile the step of a plan, or of a choice of `search_plans`, for its hardware; audit it.

    In the report `memory.peak` (bytes), `volume` (elements moved per device and step, over Psi) and
    `schedule.step_seconds` stand beside the plan's `bytes.total`, `volume` and `step_time`.

    Args:
        plan: has the stage, the recipe, and how devices are shared out.
        params, tx, workload: as they were given for the plan.
        topology: the plan's hardware and devices as `topology_mesh` has them: "h100:1x8".
        placement: as it was given, for its `rules` and `min_size`.

    Raises:
        ValueError: another topology than the plan's, a plan without a loss, or one with a model
            axis: a plain loss is not cut over it.
        DoesNotFit: the compiler refuses the step for its memory.
        MissingCompiler: libtpu or the CUDA plugin is not installed.
    """
    plan = as_given(Plan, plan, "zerojax.plan(...), or search_plans(...)[0]", None)
    named = parse_topology(topology)
    theirs = plan.hardware.name, plan.num_devices  # a replaced figure may differ
    if (find_hardware(named.chip).name, named.num_devices) != theirs:
        told = f"topology {topology!r} has {named.num_devices} x {named.chip}, and the plan is of"
        raise ValueError(f"{told} {plan.num_devices} x {plan.hardware.name}: name the plan's own")
    if plan.model_axis > 1:
        raise ValueError(
            f"the plan has model_axis={plan.model_axis}, over which a plain loss is not cut: take "
            "one without, as search_plans(..., space=Space(model_axes=(1,))) finds"
        )
    load = as_given(Workload, workload, "zerojax.Workload(loss_fn=loss, batch=batch)", Workload())
    if load.loss_fn is None:
        raise ValueError("compile_plan compiles a loss: give Workload(loss_fn=..., batch=...)")
    given = as_given(Placement, placement, "zerojax.Placement(min_size=0)", Placement())
    groups = {"replica": plan.num_groups} if plan.num_groups > 1 else {}
    mesh = topology_mesh(topology, groups | {"data": plan.num_shards})
    wide = mesh.axis_names if plan.wide_optimizer else "data"
    layout = make_layout(
        as_shapes(params),
        mesh,
        stage=plan.stage,
        axis={"parameter": "data", "gradient": wide, "optimizer": wide},
        batch_axes=mesh.axis_names,
        rules=given.rules,
        min_size=given.min_size,
    )
    step = make_train_step(load.loss_fn, tx, layout, plan.recipe, has_aux=load.has_aux)
    program = compile_step(step.lower(step.abstract_state(), as_shapes(load.batch)))
    return audit(program, layout, plan.recipe)
