"""ZeRO for JAX: model states partitioned over a device mesh."""

from zerojax.aot import topology_mesh
from zerojax.audit import AuditError, AuditReport, audit
from zerojax.layout import Layout, Precision, Rule, make_layout, make_mesh
from zerojax.optim import apply_updates, sharded
from zerojax.train import (
    TrainState,
    TrainStep,
    abstract_train_state,
    init_train_state,
    make_train_step,
    unpad,
)

__all__ = [
    "AuditError",
    "AuditReport",
    "Layout",
    "Precision",
    "Rule",
    "TrainState",
    "TrainStep",
    "abstract_train_state",
    "apply_updates",
    "audit",
    "init_train_state",
    "make_layout",
    "make_mesh",
    "make_train_step",
    "sharded",
    "topology_mesh",
    "unpad",
]
