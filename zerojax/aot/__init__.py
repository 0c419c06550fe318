"""Compile a step for hardware that is not here."""

from __future__ import annotations

from zerojax.aot._cache import Compilation, ProgramCache, Shortage, digest
from zerojax.aot._chips import device_memory
from zerojax.aot._compile import DoesNotFit, compile_lowered, compile_step, describe_shortage
from zerojax.aot._plugin import MissingCompiler, has_accelerators, require_cuda, require_libtpu
from zerojax.aot._topology import Topology, known_topologies, parse_topology, topology_mesh
from zerojax.aot._verify import verify_plans

__all__ = [
    "Compilation",
    "DoesNotFit",
    "MissingCompiler",
    "ProgramCache",
    "Shortage",
    "Topology",
    "compile_lowered",
    "compile_step",
    "describe_shortage",
    "device_memory",
    "digest",
    "has_accelerators",
    "known_topologies",
    "parse_topology",
    "require_cuda",
    "require_libtpu",
    "topology_mesh",
    "verify_plans",
]
