"""Chips that a step can be compiled for without having one, by the names that compilers know."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from zerojax.planner import Hardware, find_hardware

_FILES = resources.files("zerojax.aot")
#: What XLA asks of a GPU beside what the planner knows of it; see chips.toml.
GPU_CHIPS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    tomllib.loads(_FILES.joinpath("chips.toml").read_text(encoding="utf-8"))
)
#: libtpu knows TPUs itself; memory and slices are the planner's.
TPU_CHIPS: Mapping[str, Hardware] = MappingProxyType(
    {name: find_hardware(name) for name in ("v4", "v5e", "v5p", "v6e", "tpu7x")}
)
#: A GPU as XLA's GpuTargetConfigProto; limits that no chip differs in are CUDA's own.
_TARGET_CONFIG = _FILES.joinpath("target_config.pbtxt").read_text(encoding="utf-8")


def gpu_target_config(chip: str) -> str:
    """Return a GPU as the text of XLA's GpuTargetConfigProto."""
    figures, hardware = GPU_CHIPS[chip], find_hardware(chip)
    capability: str = figures["compute_capability"]
    major, minor = capability.removesuffix("a").split(".")
    features = "ACCELERATED_FEATURES" if capability.endswith("a") else "NONE"
    return _TARGET_CONFIG.format(
        **figures,
        major=major,
        minor=minor,
        features=features,
        memory=hardware.memory,
        name=hardware.device_kinds[0],
    )
