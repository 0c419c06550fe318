"""Find by program what optax exports that makes an optimizer, and what the table makes of it."""

from __future__ import annotations

import inspect
import sys
from types import CodeType, FrameType
from typing import Any

import optax
from optax import contrib

from tests.properties.optimizers import TABLE

# Public, and declared to return a GradientTransformation or not annotated: but not to test.
EXCLUDED = {
    "GradientTransformation": "the type itself",
    "GradientTransformationExtraArgs": "the type itself",
    "bias_correction": "a function of moments",
    "dpsgd": "warns of a deprecated argument; differentially_private_aggregate stands for it",
    "inject_stateful_hyperparams": "deprecated and warns; it is inject_hyperparams",
    "matrix_inverse_pth_root": "a function of a matrix",
    "optimistic_adam": "deprecated and warns; optimistic_adam_v2 stands for it",
    "schedule_free_eval_params": "a function of a state",
    "sigmoid_binary_cross_entropy": "a loss",
    "update_infinity_moment": "a function of moments",
    "update_moment": "a function of moments",
    "update_moment_per_elem_norm": "a function of moments",
}


def _may_be_factory(value: Any) -> bool:
    if inspect.isclass(value):
        return hasattr(value, "init") and hasattr(value, "update")
    if not callable(value) or hasattr(value, "__origin__"):  # `__origin__`: a typing alias
        return False
    returned = inspect.signature(value).return_annotation
    return returned is inspect.Signature.empty or "GradientTransformation" in str(returned)


def public_factories() -> dict[str, Any]:
    """Find by program what optax exports that returns, or may return, a GradientTransformation."""
    return {
        name: value
        for module in (optax, optax.transforms, contrib)
        for name, value in vars(module).items()
        if not name.startswith("_") and _may_be_factory(value)
    }


def _code(factory: Any) -> CodeType | None:
    function = factory.__init__ if inspect.isclass(factory) else factory
    return getattr(function, "__code__", None)


def made_factories() -> set[str]:
    """Name the rows and the public factories that some `make` or `around` calls."""
    called: set[CodeType] = set()

    def record(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            called.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        for case in TABLE:
            case.around(case.make())
    finally:
        sys.setprofile(before)
    made = {name for name, factory in public_factories().items() if _code(factory) in called}
    return made | {case.name for case in TABLE}  # nadam and nadamw are partials: no code
