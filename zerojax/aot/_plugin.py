"""The compilers for hardware that you don't have: found, loaded and kept quiet."""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from zerojax._quiet import quiet_stderr

# Unless told not to, libtpu asks the metadata server of a TPU machine and locks its chips.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
}
_DEVICE_FILES = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
_CUDA_MODULES = ("xla_cuda13", "xla_cuda12")
_NVCC_MODULES = ("cu13", "cuda_nvcc")  # where jax itself looks for ptxas and libdevice


class MissingCompiler(RuntimeError):
    """Raised where the compiler for a target is missing or does not match the installed jax."""


def tpu_devices(name: str, **options: Any) -> list[Any]:
    """Return the devices of a TPU slice; `name` as libtpu has it: "v5p:2x2x2"."""
    require_libtpu()
    if not has_accelerators():
        for key, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(key, value)
    with quiet_stderr():
        _settle_backends()
        return list(topologies.get_topology_desc(name, platform="tpu", **options).devices)


def gpu_devices(target_config: str, num_nodes: int, gpus_per_node: int) -> list[Any]:
    """Return the devices of GPU nodes that you don't have, node by node."""
    module = require_cuda()
    arrangement = {"topology": f"1x{num_nodes}x{gpus_per_node}", "target_config": target_config}
    with quiet_stderr():
        _settle_backends()
        try:
            topology = topologies.get_topology_desc("", platform="cuda", **arrangement)
        except NotImplementedError:
            # jax looked for a GPU before this was called, found none and dropped the plugin.
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
            importlib.import_module(f"jax_plugins.{module}").initialize()
            topology = topologies.get_topology_desc("", platform="cuda", **arrangement)
    return list(topology.devices)


def require_libtpu() -> None:
    """Check that the libtpu that jax pins is here; of another one, programs can't be read."""
    pin = _pinned("libtpu")
    remedy = f'in a clone pip install ".[aot]", else pip install "jax[tpu]=={jax.__version__}"'
    installed = version_of("libtpu")
    if installed is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise MissingCompiler(f"Compiling for TPUs needs libtpu {pin} (no TPU): {remedy}")
    if installed is not None and pin.startswith("=="):
        wanted = re.escape(pin.removeprefix("==")).replace(r"\.\*", r"(\..*)?")
        if not re.fullmatch(wanted, installed):
            told = f"jax {jax.__version__} needs libtpu {pin}, and libtpu {installed} is installed:"
            raise MissingCompiler(f"{told} the programs of another version can't be read. {remedy}")


def require_cuda() -> str:
    """Check that the CUDA plugin that belongs to this jax is here; return its module's name."""
    local = f'"jax[cuda12-local]=={jax.__version__}" nvidia-cuda-nvcc-cu12'
    remedy = f'in a clone pip install ".[aot]", else pip install {local}'
    modules = [name for name in _CUDA_MODULES if _has_module("jax_plugins", name)]
    has_nvcc = any(_has_module("nvidia", name) for name in _NVCC_MODULES)
    has_nvcc = has_nvcc or "CUDA_ROOT" in os.environ or shutil.which("ptxas") is not None
    missing = [] if modules else ["the CUDA plugin"]
    missing += [] if has_nvcc else ["ptxas"]
    if missing:
        told = f"Compiling for GPUs needs {' and '.join(missing)} (no CUDA, no GPU): {remedy}"
        raise MissingCompiler(told)
    plugin = f"jax-{modules[0].removeprefix('xla_')}-plugin".replace("_", "-")
    installed, wanted = version_of(plugin), version_of("jaxlib")
    if installed is not None and installed != wanted:
        told = f"jaxlib {wanted} needs {plugin} {wanted}, and {installed} is installed:"
        raise MissingCompiler(f"{told} jax ignores a plugin of another version. {remedy}")
    return modules[0]


def _pinned(package: str) -> str:
    for requirement in importlib.metadata.requires("jax") or []:
        if match := re.match(rf"{package}\s*([=<>!~][^;]*)", requirement):
            return match[1].replace(" ", "")
    return ""


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_module(package: str, name: str) -> bool:
    names = (package, f"{package}.{name}")  # the second is asked for only if the first is there
    return all(importlib.util.find_spec(each) is not None for each in names)


def has_accelerators() -> bool:
    return any(any(Path("/dev").glob(pattern)) for pattern in _DEVICE_FILES)


def _settle_backends() -> None:
    """Keep jax from looking for accelerators where there are none, and let it start quietly.

    jax loads every plugin when it first starts a backend, which lowering a program does.
    """
    if not has_accelerators():
        if not getattr(jax.config, "jax_platforms", None):
            jax.config.update("jax_platforms", "cpu")
        jax.devices()
