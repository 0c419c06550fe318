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

__all__ = ["__version__"]
__all__ += ["Layout", "Rule", "make_layout", "make_mesh", "topology_mesh"]  # where leaves live
__all__ += ["DynamicLossScale", "Precision", "Recipe", "RematPolicy"]  # how a step is computed
__all__ += ["TrainState", "TrainStep", "Whole", "make_train_step", "unpad"]
__all__ += ["apply_updates", "gather_where_used", "quantized", "rematerialised", "sharded"]
__all__ += ["AuditError", "AuditReport", "audit", "checked"]
__all__ += ["Hardware", "Placement", "Workload"]
__all__ += ["Plan", "model_state_bytes", "plan", "search_plans"]  # before anything is compiled
__all__ += ["Checkpoints", "restore", "save"]
