"""The user's loss as the step calls it: what it asks for, and what it returns."""

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from zerojax._types import LossFn, PyTree
from zerojax.collectives import unmarked
from zerojax.train._checks import difference

#: The parameters by which a loss asks for more than `loss_fn(params, batch)`.
ASKABLE = ("key", "step", "model_state")


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of parameters, of what the step gives, and of the model's state."""

    function: LossFn  # the user's
    has_aux: bool  # whether it returns more than the loss
    asks: tuple[str, ...]  # what it asks for, a part of `ASKABLE`

    def __call__(
        self, params: PyTree, given: dict[str, Any], model_state: PyTree
    ) -> tuple[Any, PyTree, PyTree]:
        """Return the loss, the aux and the new state of the model; None where there is none.

        Raises:
            ValueError: the function returned something else than `make_train_step` asks for.
        """
        values = {**given, "model_state": model_state}
        asked = {name: values[name] for name in self.asks}
        out = self.function(params, unmarked(given["batch"]), **asked)
        has_state = "model_state" in self.asks
        loss, extra = _read(out, has_aux=self.has_aux, has_state=has_state)
        if not has_state:
            return loss, extra, None
        aux, new = extra if self.has_aux else (None, extra)
        if text := difference(new, model_state):
            raise ValueError(f"the model_state that loss_fn returns is not as it was given: {text}")
        return loss, aux, new

    def without_noise(self) -> "Loss":
        """Return the loss that does not ask for a key where it can do without one."""
        parameters = _parameters(self.function) if "key" in self.asks else {}
        if "key" not in parameters or parameters["key"].default is inspect.Parameter.empty:
            return self
        return dataclasses.replace(self, asks=tuple(name for name in self.asks if name != "key"))


def make_loss(loss_fn: LossFn, *, has_aux: bool) -> Loss:
    """Read off a function what it asks for: parameters after the first two, named as `ASKABLE`."""
    names = _parameters(loss_fn)
    return Loss(loss_fn, has_aux, tuple(name for name in ASKABLE if name in names))


def _parameters(loss_fn: LossFn) -> dict[str, inspect.Parameter]:
    """Return the parameters of a loss after the first two, without those that are bound."""
    try:
        found = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):  # of a callable that does not say
        return {}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    first = [name for name, p in found.items() if p.kind in positional][:2]
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    return {name: p for name, p in found.items() if name not in (*first, *bound)}


def _read(out: Any, *, has_aux: bool, has_state: bool) -> tuple[Any, Any]:
    """Return the loss, and what came with it."""
    more = "(aux, model_state)" if has_aux and has_state else "aux" if has_aux else "model_state"
    if has_aux or has_state:
        why = "with has_aux=True" if has_aux else "a loss that asks for model_state"
        nested = not (has_aux and has_state) or (
            isinstance(out, tuple) and isinstance(out[-1], tuple) and len(out[-1]) == 2
        )
        if not (isinstance(out, tuple) and len(out) == 2 and nested):
            raise ValueError(f"{why}: loss_fn must return (loss, {more}), got {type(out).__name__}")
    loss, extra = out if has_aux or has_state else (out, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise ValueError(
            f"loss_fn must return a scalar, got {type(loss).__name__}; if it returns (loss, aux), "
            "write make_train_step(..., has_aux=True)"
        )
    if jnp.shape(loss):
        raise ValueError(
            f"loss_fn must return a scalar, got shape {jnp.shape(loss)}: return the mean over it"
        )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"loss_fn must return a floating scalar, got {jnp.result_type(loss)}: "
            "compute the loss from floating values"
        )
    return loss, jax.tree.map(jnp.asarray, extra)
