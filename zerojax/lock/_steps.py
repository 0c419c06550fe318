"""Functions that give the step to be checked, found in a file of the user's."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from zerojax._tree import as_shapes
from zerojax.layout import Layout
from zerojax.recipe import Recipe
from zerojax.train import TrainStep

_TARGETS = "__zerojax_targets__"


@dataclass(frozen=True, kw_only=True)
class CheckedStep:
    name: str  # of the function and the target, "train_step @ h100:1x8"
    target: str  # "cpu:8", or a topology as `topology_mesh` takes it
    make: Callable[[Sequence[Any]], Any]  # `make(devices)` gives the step

    def lower(self, devices: Sequence[Any]) -> tuple[Any, Layout | None, Recipe | None]:
        """Return the lowered or compiled step, and what it is to be audited with, if anything."""
        given, layout, recipe = self.make(devices), None, None
        match given:
            case (TrainStep() as step, batch):
                given = step.lower(step.abstract_state(), as_shapes(batch))
                layout, recipe = step.layout, step.recipe
            case (given, Layout() as layout):
                pass
            case (given, Layout() as layout, Recipe() as recipe):
                pass
        given = getattr(given, "lowered", getattr(given, "compiled", given))  # nnx's, equinox's
        if not isinstance(given, jax.stages.Lowered | jax.stages.Compiled):
            raise TypeError(
                f"{self.name} gives a {type(given).__name__}; return jax.jit(step).lower(...), or "
                "(lowered, layout, recipe), or (train_step, batch)"
            )
        return given, layout, recipe


def checked(*targets: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function that gives a step for `zerojax check`, and say for which hardware.

    The function takes the devices of a target and returns the lowered or compiled step, of any
    framework; or `(lowered, layout, recipe)` or `(train_step, batch)`, which are audited too.

        @zerojax.checked("h100:1x8", "cpu:8")
        def train(devices):
            ...
            return jax.jit(step, in_shardings=...).lower(state, batch)

    Args:
        targets: topologies as `topology_mesh` takes them, and "cpu:8" for virtual devices.

    Raises:
        TypeError: no target is named.
    """
    if not targets or not all(isinstance(target, str) for target in targets):
        raise TypeError('name the targets: @zerojax.checked("h100:1x8", "cpu:8")')

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        name = getattr(function, "__name__", "")
        if hasattr(getattr(function, "__globals__", {}).get(name), _TARGETS):
            raise ValueError(f"{name!r} is marked twice: give each step a name of its own")
        setattr(function, _TARGETS, (*targets, *getattr(function, _TARGETS, ())))
        return function

    return mark


def find_steps(path: Path) -> list[CheckedStep]:
    """Find the steps that a Python file marks, which is run; a ValueError where it marks none."""
    marked = {key: x for key, x in vars(_load(path)).items() if hasattr(x, _TARGETS)}
    if not marked:
        raise ValueError(f"{path} marks no step: decorate one with @zerojax.checked('h100:1x8')")
    return [
        CheckedStep(name=f"{key} @ {one}", target=one, make=function)
        for key, function in marked.items()
        for one in getattr(function, _TARGETS)
    ]


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"steps_{path.stem}", path)  # jax.py is not jax
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
