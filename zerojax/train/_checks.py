"""What a step refuses, each with what is expected: states, batches, and what a loss returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding

from zerojax._tree import flatten_with_names
from zerojax._types import PyTree
from zerojax.layout import Layout
from zerojax.train._state import TrainState

_REMEDY = "make it with this step's init, or restore it like step.abstract_state()"


def check_structure(
    state: TrainState, shardings: TrainState, like: Callable[[], TrainState]
) -> None:
    """Refuse a state of another structure, or one that was donated, before jit does.

    Args:
        state: what the step was given.
        shardings: those of the step's own states.
        like: returns the shapes of those; asked only for what to say.
    """
    if jax.tree.structure(state) == jax.tree.structure(shardings):
        # jaxlib 0.10 can crash on a donated array; one leaf tells for all.
        if getattr(state.step, "is_deleted", bool)():
            raise ValueError(
                "the state was donated to an earlier step; use the state that the step returned"
            )
        return
    for name, what in (("masters", "masters"), ("loss_scale", "a loss scale")):
        found, wanted = (getattr(s, name, None) is not None for s in (state, shardings))
        if found != wanted:
            raise ValueError(
                f"the state {'holds' if found else 'lacks'} {what} and the step's recipe "
                f"{'asks for' if wanted else 'has'} {what if wanted else 'none'}: make the "
                "state with this step's init, or the step with the state's precision"
            )
    found, wanted = (set(flatten_with_names(s)[0]) for s in (state, shardings))
    differs = f"missing {sorted(wanted - found)[:5]}, unexpected {sorted(found - wanted)[:5]}"
    if found == wanted:  # other shapes, or other containers: adam's and adabelief's, say
        check_leaves(state, like())
        differs = f"{jax.tree.structure(state)} where {jax.tree.structure(shardings)} is expected"
    raise ValueError(
        f"the state is not of this step's layout, recipe and optimizer: {differs}; {_REMEDY}"
    )


def check_leaves(state: TrainState, like: TrainState) -> None:
    """Refuse leaves of another shape, dtype or placement.

    Args:
        state: arrays, traced or not; placements of traced ones are not looked at.
        like: shapes with shardings.
    """
    names, wanted, _ = flatten_with_names(like)
    wrong = [
        text
        for name, x, want in zip(names, jax.tree.leaves(state), wanted, strict=True)
        if (text := _difference(name, x, want))
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"the state is not of this step's layout and recipe: {'; '.join(wrong[:3])}{more}; "
            f"{_REMEDY}, or give the step the state's precision and layout"
        )


def _difference(name: str, x: Any, want: Any) -> str:
    if (x.shape, x.dtype) != (want.shape, want.dtype):
        expected = f"{want.dtype}{list(want.shape)}"
        return f"{name} is {x.dtype}{list(x.shape)} where {expected} is expected"
    if _lies_otherwise(x, want.sharding):
        return f"{name} is placed as {x.sharding} where {want.sharding} is expected"
    return ""


def _lies_otherwise(x: Any, wanted: NamedSharding) -> bool:
    """Return whether an array was placed, and not as wanted; a traced one has no place yet."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
        return False
    return not x.sharding.is_equivalent_to(wanted, x.ndim)


def check_batch(batch: PyTree, layout: Layout, num_microbatches: int) -> None:
    """Refuse examples that devices and microbatches don't divide."""
    parts = layout.num_batch_parts
    names, leaves, _ = flatten_with_names(batch)
    for name, x in zip(names, leaves, strict=True):
        shape = jnp.shape(x)
        if shape and (shape[0] % (parts * num_microbatches) or not shape[0]):
            raise ValueError(
                f"batch leaf {name!r} has {shape[0]} examples; {parts} devices along "
                f"{layout.batch_axes} times {num_microbatches} microbatches need a "
                f"multiple of {parts * num_microbatches}"
            )


def check_placement(batch: PyTree, layout: Layout) -> None:
    """Refuse a batch that lies otherwise than the layout asks for."""
    names, leaves, _ = flatten_with_names(batch)
    for name, x in zip(names, leaves, strict=True):
        if jnp.ndim(x) and _lies_otherwise(x, layout.batch):
            raise ValueError(
                f"batch leaf {name!r} is placed as {x.sharding} where {layout.batch} is expected; "
                "write jax.device_put(batch, layout.batch)"
            )


def read_loss(out: Any, *, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and the aux of what a loss function returned; without aux, None.

    Raises:
        ValueError: it is no scalar, or no pair where `has_aux` promises one.
    """
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise ValueError(
            f"with has_aux=True loss_fn must return (loss, aux), got {type(out).__name__}"
        )
    loss, aux = out if has_aux else (out, None)
    if isinstance(loss, tuple | list | dict) or loss is None:
        raise ValueError(
            f"loss_fn must return a scalar, got {type(loss).__name__}; if it returns (loss, aux), "
            "write make_train_step(..., has_aux=True)"
        )
    if jnp.shape(loss):
        raise ValueError(f"loss_fn must return a scalar, got shape {jnp.shape(loss)}")
    return loss, aux
