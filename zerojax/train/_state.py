"""The train state, and the logical leaves in it."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from rich.table import Table
from rich.text import Text

from zerojax._display import Shown, decimal, make_bar, make_table
from zerojax._tree import UNNAMED, num_bytes, unwrapped
from zerojax._types import PyTree, Shape
from zerojax.collectives.forms import auto_region, constrain, to_logical
from zerojax.layout import Layout, check_layout
from zerojax.processes import gather_texts
from zerojax.recipe import HOST_MEMORY


@jax.tree_util.register_pytree_with_keys_class
class Stored:
    """Hold parameters of which some are padded, so that no loss takes them for logical ones.

    A pytree of one child, the stored tree. What reads into it gets an error with the remedy.
    """

    def __init__(self, tree: PyTree) -> None:
        self._tree = tree

    def __repr__(self) -> str:
        return f"Stored({self._tree!r})"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_STORED)

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(_STORED)

    __getitem__ = __call__ = _refuse

    def tree_flatten_with_keys(self) -> tuple[tuple[Any], None]:
        return ((UNNAMED, self._tree),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> "Stored":
        return cls(children[0])


_STORED = (
    "these parameters are stored, some of them with padding: zerojax.unpad(state.params, layout) "
    "returns the logical ones, and step.evaluate(state, batch) the loss"
)


def hold(params: PyTree, layout: Layout) -> PyTree:
    padded = layout.partitions("parameter") and any(leaf.is_padded for leaf in layout.leaves)
    return Stored(params) if padded else params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TrainState(Shown):
    """What a training step reads and writes.

    >>> state = step.init(params)  # makes one, `step(state, batch)` the next
    >>> weights = zerojax.unpad(state.params, step.layout)

    Attributes:
        step: int32 scalar, steps done, with those that a loss scale skipped.
        params: what the loss reads. Stages 0 to 2: logical leaves. Stage 3: stored leaves; where
            one is padded, because no dim divides, they can't be read but through `unpad`.
        masters: stored high-precision copy that the optimizer updates, or None.
        opt_state: stored optimizer state, in the structure of `tx.init`.
        loss_scale: `scale`, a float32 scalar, and `good_steps`, an int32 one, finite steps since it
            last changed; None where `Precision` asks for no loss scale.
        key: the PRNG key that each step's own is derived from, where the loss asks for one.
        model_state: what the loss returns anew and nothing trains, where it asks for that.
        padded: number in `jax.tree.leaves(opt_state)` and logical shape of every optimizer leaf
            that is stored with padding. Static: it is part of the tree's structure.
    """

    step: Any
    params: PyTree
    masters: PyTree
    opt_state: PyTree
    loss_scale: Any = None
    key: Any = None
    model_state: PyTree = None
    padded: tuple[tuple[int, Shape], ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def _summary(self) -> str:
        count = sum(math.prod(x.shape) for xs in _by_memory(self.params).values() for x in xs)
        held = _by_memory(self).items()
        sizes = [f"{decimal(sum(map(_bytes_per_device, xs)))}{where}" for where, xs in held]
        return f"{_count_of(self.step)}, {count:,} stored parameters, {', '.join(sizes)} per device"

    def _parts(self) -> Iterator[Text | Table]:
        table = make_table("part", ">leaves", ">elements", "dtypes", ">B/device", "share")
        total = sum(_bytes_per_device(x) for xs in _by_memory(self).values() for x in xs)
        for field in dataclasses.fields(self):
            for where, leaves in _by_memory(getattr(self, field.name)).items():
                size = sum(map(_bytes_per_device, leaves))
                elements = sum(math.prod(x.shape) for x in leaves)
                dtypes = ", ".join(dict.fromkeys(str(x.dtype) for x in leaves))
                counts = (f"{len(leaves):,}", f"{elements:,}", dtypes, f"{size:,}")
                table.add_row(f"{field.name}{where}", *counts, make_bar(size, total))
        yield table


def _by_memory(tree: PyTree) -> dict[str, list[Any]]:
    """Group the arrays of a tree, or their shapes, by where they live: "" is the device.

    A state may hold other things too, such as shardings.
    """
    found: dict[str, list[Any]] = {}
    for x in jax.tree.leaves(tree):
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            kind = getattr(getattr(x, "sharding", None), "memory_kind", None)
            found.setdefault(" on the host" if kind == HOST_MEMORY else "", []).append(x)
    return found


def _bytes_per_device(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    return num_bytes(x.shape if sharding is None else sharding.shard_shape(x.shape), x.dtype)


def _count_of(step: Any) -> str:
    if not isinstance(step, jax.Array) or isinstance(step, Tracer):
        return "shapes of a state"
    return "donated to a step" if step.is_deleted() else f"step {step.tolist()}"


def unpad(tree: PyTree, layout: Layout) -> PyTree:
    """Return the logical leaves of a tree like the parameters: stored padding is cut off.

    A leaf that was padded comes back whole on every device.

    Args:
        tree: `state.params`, `state.masters`, or anything of that structure.
        layout: the placement that the tree was stored under.

    Raises:
        ValueError: a leaf is missing, too many or of another shape; it is named.
    """
    check_layout(layout, "unpad(state.params, layout)")
    given = layout.flatten(unwrapped(tree), "leaves of unpad(state.params, layout)", stored=True)
    numbered = enumerate(zip(layout.leaves, given, strict=True))
    padded = [number for number, (leaf, x) in numbered if jnp.shape(x) != leaf.shape]
    leaves = [layout.leaves[number] for number in padded]
    specs = [leaf.whole_spec for leaf in leaves]

    def cut(stored: list[jax.Array]) -> list[jax.Array]:
        logical = map(to_logical, stored, leaves)
        return [constrain(x, layout, spec) for x, spec in zip(logical, specs, strict=True)]

    if padded:
        one = given[padded[0]]
        if isinstance(one, jax.Array) and not (isinstance(one, Tracer) or one.is_fully_addressable):
            gather_texts("unpad", "")  # all have to call it: the collective itself waits for ever
        run = jax.jit(auto_region(cut, layout, specs), out_shardings=[*map(layout.sharding, specs)])
        for number, x in zip(padded, run([given[n] for n in padded]), strict=True):
            given[number] = x
    return layout.structure.unflatten(given)
