"""Functions that give the step to be checked, found in a file of the user's."""

from __future__ import annotations

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
    """A step for one target.

    Attributes:
        name: of the function and the target, "train_step @ h100:1x8".
        target: "cpu:8", or a topology as `topology_mesh` takes it.
        make: `make(devices)` gives the step.
    """

    name: str
    target: str
    make: Callable[[Sequence[Any]], Any]

    def lower(self, devices: Sequence[Any]) -> tuple[Any, Layout | None, Recipe | None]:
        """Return the lowered or compiled step, and what it is to be audited with, if anything.

        Raises:
            TypeError: the function gives something else.
        """
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
            mesh = Mesh(np.array(devices), ("data",))
            ...
            return jax.jit(step, in_shardings=...).lower(state, batch)

    Args:
        targets: topologies as `topology_mesh` takes them, and "cpu:8" for virtual devices.
    """
    if not targets or not all(isinstance(target, str) for target in targets):
        raise TypeError('name the targets: @zerojax.checked("h100:1x8", "cpu:8")')

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, _TARGETS, targets)
        return function

    return mark


def find_steps(path: Path, name: str = "", targets: Sequence[str] = ()) -> list[CheckedStep]:
    """Find the steps that a file marks, or the one of a name.

    Args:
        path: a Python file; it is run.
        name: of a function in it, marked or not; empty for all that are marked.
        targets: in the place of those that the functions are marked with.

    Raises:
        ValueError: there is no such function, or nothing says for which hardware.
    """
    module = _load(path)
    own = {key: x for key, x in vars(module).items() if callable(x)}
    found = {key: x for key, x in own.items() if hasattr(x, _TARGETS)}
    if name:
        if name not in own:
            raise ValueError(f"{path} has no function {name!r}; it has {', '.join(own) or 'none'}")
        found = {name: own[name]}
    if not found:
        raise ValueError(
            f"{path} marks no step: decorate one with @zerojax.checked(...), or name it: "
            f"{path}:train_step"
        )
    steps = []
    for key, function in found.items():
        wanted = targets or getattr(function, _TARGETS, ())
        if not wanted:
            raise ValueError(f"for which hardware is {key}? Give --target h100:1x8")
        steps += [CheckedStep(name=f"{key} @ {one}", target=one, make=function) for one in wanted]
    return steps


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module
