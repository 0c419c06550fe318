"""Compile a step for hardware that you don't have."""

from zerojax.aot._compile import DoesNotFit as DoesNotFit
from zerojax.aot._compile import compile_step as compile_step
from zerojax.aot._planned import compile_plan as compile_plan
from zerojax.aot._plugin import MissingCompiler as MissingCompiler
from zerojax.aot._plugin import has_accelerators, version_of
from zerojax.aot._topology import known_topologies, parse_topology, topology_mesh
