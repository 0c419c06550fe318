"""What a loss asks for, and what a step refuses: states, batches, and what a loss returns."""

import dataclasses
import inspect
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zerojax._examples import count_examples, example_leaves, map_batch, per_microbatch, unmarked
from zerojax._loss import parameters_of, read_loss
from zerojax._tree import as_shapes, flatten_with_names
from zerojax._types import LossFn, PyTree
from zerojax.layout import Layout
from zerojax.train._state import TrainState


def check_usable(state: TrainState, layout: Layout, beside: PyTree = None) -> None:
    """Refuse no state, one that was donated or is of other devices: jaxlib 0.10 can crash on it."""
    if not isinstance(state, TrainState):
        told = f"a step and its evaluate take a TrainState first, got {type(state).__name__}"
        why = "make one with step.init(params), and hand over all of it"
        why = "write state, metrics = step(state, batch)" if isinstance(state, tuple) else why
        why = "hand over its .state" if hasattr(state, "state") else why  # of what was restored
        raise TypeError(f"{told}: {why}")
    check_context(layout)
    if isinstance(state.step, Tracer):
        raise TypeError("a train step is compiled by itself: call it outside of jax.jit")
    if path := _first_deleted(state):
        told = f"the state was donated to an earlier step, {path!r} at least: use the state that"
        raise ValueError(f"{told} the step returned, or a copy: jax.tree.map(jnp.copy, state)")
    if beside is not None:
        _check_apart(state, beside)
    mesh = getattr(getattr(state.step, "sharding", None), "mesh", layout.mesh)
    if mesh != layout.mesh and isinstance(mesh, Mesh):
        found, wanted = [*mesh.devices.flat], [*layout.devices.flat]
        if {*found} == {*wanted} and found != wanted:
            told = f"the state lies on the step's {len(found)} devices in another order"
            raise ValueError(f"{told}: write jax.device_put(state, step.shardings)")
        if {*found} != {*wanted}:
            told = f"the state lies on {dict(mesh.shape)}, and the step's devices are others"
            raise ValueError(
                f"{told}, {dict(layout.mesh.shape)}: make one with step.init, or save it and write "
                "zerojax.restore(folder, step.layout, step.abstract_state())"
            )


def check_kept(params: PyTree) -> None:
    """Refuse parameters that were donated, maybe as what `jax.device_put` made of them."""
    if path := _first_deleted(params):
        raise ValueError(
            f"parameter {path!r} was donated to a jitted function, itself or as what it shares its "
            "buffer with: jax.device_put(params, layout.params) copies no leaf that lies so "
            "already. Hand over jax.device_put(jax.tree.map(np.asarray, params), layout.params)"
        )


def _first_deleted(tree: PyTree) -> str:
    deleted = [getattr(x, "is_deleted", bool)() for x in jax.tree.leaves(tree)]
    return flatten_with_names(tree)[0][deleted.index(True)] if any(deleted) else ""


def _check_apart(state: TrainState, beside: PyTree) -> None:
    """Refuse an array that is in the state twice, or in the batch too: jaxlib crashes on it."""
    held = [id(x) for x in jax.tree.leaves(state)]
    if len({*held}) == len(held) and {*held}.isdisjoint(map(id, jax.tree.leaves(beside))):
        return
    seen = dict[int, str]()
    for tree in (state, beside):
        for name, x in zip(*flatten_with_names(tree)[:2], strict=True):
            if isinstance(x, jax.Array) and id(x) in seen:
                told = f"{seen[id(x)]!r} of the state is {name!r} too, and a step donates its state"
                raise ValueError(f"{told}: hand over jnp.copy of it")
            seen |= {id(x): name} if tree is state else {}


def check_context(layout: Layout) -> None:
    """Refuse a step where jit is disabled, or a mesh is set that it can't use."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        told = "a train step is a compiled program, and jax.disable_jit() is on"
        raise RuntimeError(f"{told}: debug the loss alone under it, or a loop with zerojax.sharded")
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # within jit
        return
    if mesh.empty or mesh == layout.mesh:
        return
    is_explicit = AxisType.Explicit in (*mesh.axis_types, *layout.mesh.axis_types)
    if is_explicit or [*mesh.devices.flat] != [*layout.devices.flat]:
        told = f"jax.set_mesh has set {dict(mesh.shape)}, whose devices or axes are not"
        raise ValueError(
            f"{told} the step's, {dict(layout.mesh.shape)}: call the step outside of it, or within "
            "jax.set_mesh(step.layout.mesh)"
        )


def check_state(state: TrainState, like: TrainState) -> None:
    """Refuse a state of another structure, or with leaves of another shape, dtype or placement.

    `like` has shapes with shardings; placements of traced arrays are not looked at.
    """
    if text := difference(state, like):
        raise ValueError(
            f"the state is not of this step's layout, recipe and optimizer: {text}; make it with "
            "this step's init, restore it like step.abstract_state(), or give the step the state's "
            "precision and layout"
        )


def difference(given: PyTree, like: PyTree) -> str:
    """Say how a tree differs from another: in leaves, containers, shapes, dtypes or placement."""
    (names, leaves, found), (others, likes, wanted) = map(flatten_with_names, (given, like))
    missing, unexpected = sorted({*others} - {*names}), sorted({*names} - {*others})
    if missing or unexpected:
        return f"missing {missing[:5]}, unexpected {unexpected[:5]}"
    by_name = dict(zip(names, leaves, strict=True))
    texts = (_difference(name, by_name[name], x) for name, x in zip(others, likes, strict=True))
    if wrong := list(filter(None, texts)):
        return "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if wrong[3:] else "")
    return "" if found == wanted else f"{found} where {wanted} is expected"  # adam, adabelief


def _difference(name: str, x: Any, want: Any) -> str:
    given = as_shapes(x)  # a number has no shape
    if (given.shape, given.dtype) != (want.shape, want.dtype):
        expected = f"{want.dtype}{list(want.shape)}"
        return f"{name} is {given.dtype}{list(given.shape)} where {expected} is expected"
    if isinstance(want, jax.ShapeDtypeStruct) and _lies_otherwise(x, want.sharding):
        return f"{name} is placed as {x.sharding} where {want.sharding} is expected"
    return ""


def _lies_otherwise(x: Any, wanted: NamedSharding) -> bool:
    if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
        return False
    return not x.sharding.is_equivalent_to(wanted, x.ndim)


def check_batch(batch: PyTree, layout: Layout, num_microbatches: int) -> None:
    """Refuse what is no array, or no examples, or not divided by devices and microbatches."""
    for name, x in zip(*flatten_with_names(batch)[:2], strict=True):
        if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
            raise TypeError(f"batch leaf {name!r} is a {type(x).__name__}; a step takes arrays")
        dtype = x.dtype if isinstance(x, np.ndarray | np.generic) else jnp.dtype(bool)
        if not dtype.isnative or not any(jnp.issubdtype(dtype, x) for x in (jnp.number, jnp.bool_)):
            told = f"batch leaf {name!r} holds {dtype.str}; a step takes numbers, in the byte order"
            raise TypeError(f"{told} of this machine: x.astype(x.dtype.newbyteorder('='))")
    for size, name in count_examples(batch).items():
        per_microbatch(f"batch leaf {name!r}", size, layout.num_batch_parts, num_microbatches)


def check_placement(batch: PyTree, layout: Layout) -> None:
    for name, x in example_leaves(batch):
        if jax.process_count() > 1 and getattr(x, "is_fully_addressable", True):
            raise ValueError(
                f"batch leaf {name!r} is on this process alone, one of {jax.process_count()}; hand "
                "over its own rows: step(state, step.place(batch))"
            )
        if _lies_otherwise(x, layout.batch):
            raise ValueError(
                f"batch leaf {name!r} is placed as {x.sharding} where {layout.batch} is expected; "
                "write jax.device_put(batch, layout.batch)"
            )
    rest = map_batch(lambda _: None, batch)
    for name, x in zip(*flatten_with_names(rest)[:2], strict=True):
        if _lies_otherwise(x, layout.sharding(P())):
            raise ValueError(
                f"batch leaf {name!r} is placed as {x.sharding}, and every device gets all of it: "
                "write jax.device_put(x, layout.sharding(P())); of a model that is too large for "
                "a device make a frozen part of the parameters, as examples/lora.py does"
            )


def check_trainable(layout: Layout) -> None:
    for leaf in layout.leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ValueError(
                f"leaf {leaf.path!r} of the parameters is {leaf.dtype}, which has no "
                "gradient: give it to the loss otherwise, in model_state or in the batch as "
                "zerojax.Whole, and make the layout without it"
            )


def check_key(key: Any, *, asked: bool) -> None:
    """Refuse a key that the loss does not ask for, none where it does, and what is no key."""
    if (key is not None) != asked:
        raise ValueError(
            "the loss asks for a key: write step.init(..., key=jax.random.key(seed))"
            if asked
            else "the loss does not ask for a key: name one of its parameters `key`"
        )
    wanted, dtype = jax.random.key(0).dtype, getattr(key, "dtype", None)
    if asked and (dtype != wanted or key.ndim):
        got = f"{dtype}{list(jnp.shape(key))}" if dtype else repr(key)
        told = f"step.init(key=) takes a key of jax.random.key(seed), {wanted}, got {got}; of a raw"
        raise ValueError(
            f"{told} PRNGKey take jax.random.wrap_key_data; jax_default_prng_impl sets the kind"
        )


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of parameters, of what the step gives, and of the model's state."""

    function: LossFn  # the user's
    has_aux: bool  # whether it returns more than the loss
    asks: tuple[str, ...]  # what it asks for, as `asked_of` says

    def __call__(
        self, params: PyTree, given: dict[str, Any], model_state: PyTree
    ) -> tuple[Any, PyTree, PyTree]:
        """Return the loss, the aux and the new state of the model; None where there is none."""
        values = {**given, "model_state": model_state}
        asked = {name: values[name] for name in self.asks}
        batch = unmarked(given["batch"])
        try:
            out = self.function(params, batch, **asked)
        except Exception as error:
            types = jax.tree.map(lambda x: str(jax.typeof(x)), batch)
            error.add_note(f"raised while loss_fn was traced with params and the batch {types}")
            raise
        has_state = "model_state" in self.asks
        loss, extra = read_loss(out, has_aux=self.has_aux, has_state=has_state)
        if jnp.result_type(loss).itemsize < 4:
            told = f"the loss is {jnp.result_type(loss)}, which has few digits"
            warnings.warn(f"{told}: compute it from logits.astype(jnp.float32)", stacklevel=2)
        if not has_state:
            return loss, extra, None
        aux, new = extra if self.has_aux else (None, extra)
        if text := difference(new, model_state):
            raise ValueError(f"the model_state that loss_fn returns is not as it was given: {text}")
        return loss, aux, new

    def without_noise(self) -> "Loss":
        """Return the loss that does not ask for a key where it can do without one."""
        parameters = parameters_of(self.function) if "key" in self.asks else {}
        if "key" not in parameters:
            return self
        if parameters["key"].default is inspect.Parameter.empty:
            told = "step.evaluate: the loss asks for a key without a default, so it draws noise"
            remedy = "write key=None, and draw none without a key"
            warnings.warn(f"{told} here too; {remedy}", stacklevel=2)
            return self
        return dataclasses.replace(self, asks=tuple(name for name in self.asks if name != "key"))
