"""ZeRO for JAX: model states partitioned over a device mesh."""

from zerojax import _quiet  # the first to import jax
from zerojax._examples import Whole
from zerojax._version import __version__
from zerojax.aot import topology_mesh
from zerojax.audit import AuditError, AuditReport, audit
from zerojax.checkpoint import Checkpoints, restore, save
from zerojax.collectives import gather_where_used
from zerojax.hardware import Hardware
from zerojax.layout import Layout, Rule, make_layout, make_mesh
from zerojax.lock import checked
from zerojax.memory import rematerialised
from zerojax.optim import apply_updates, quantized, sharded
from zerojax.planner import Placement, Plan, Workload, model_state_bytes, plan, search_plans
from zerojax.recipe import DynamicLossScale, Precision, Recipe, RematPolicy
from zerojax.train import TrainState, TrainStep, make_train_step, unpad

__all__ = [
    "AuditError",
    "AuditReport",
    "Checkpoints",
    "DynamicLossScale",
    "Hardware",
    "Layout",
    "Placement",
    "Plan",
    "Precision",
    "Recipe",
    "RematPolicy",
    "Rule",
    "TrainState",
    "TrainStep",
    "Whole",
    "Workload",
    "__version__",
    "apply_updates",
    "audit",
    "checked",
    "gather_where_used",
    "make_layout",
    "make_mesh",
    "make_train_step",
    "model_state_bytes",
    "plan",
    "quantized",
    "rematerialised",
    "restore",
    "save",
    "search_plans",
    "sharded",
    "topology_mesh",
    "unpad",
]
