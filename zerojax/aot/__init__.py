"""Compile a step for hardware that you don't have."""

from zerojax.aot._compile import DoesNotFit, compile_step
from zerojax.aot._planned import compile_plan
from zerojax.aot._plugin import MissingCompiler, has_accelerators, version_of
from zerojax.aot._topology import Topology, known_topologies, parse_topology, topology_mesh

__all__ = [
    "DoesNotFit",
    "MissingCompiler",
    "Topology",
    "compile_plan",
    "compile_step",
    "has_accelerators",
    "known_topologies",
    "parse_topology",
    "topology_mesh",
    "version_of",
]
