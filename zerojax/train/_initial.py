"""The first state of a training: born sharded, or as shapes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import treedef_is_leaf

from zerojax._tree import as_shapes, floating_dtype
from zerojax._types import PyTree
from zerojax.collectives.forms import auto_region, constrain, shard_tree, store
from zerojax.optim import as_params, store_state
from zerojax.recipe import HOST_MEMORY
from zerojax.train._checks import check_context, check_kept, check_key, difference
from zerojax.train._processes import agree_on, place_whole
from zerojax.train._state import TrainState, hold
from zerojax.train._update import LossScale, Update, cast_floating, first_loss_scale


@dataclasses.dataclass(frozen=True)
class InitialState:
    update: Update  # knows the optimizer, the layout, the recipe and where states live
    has_key: bool  # whether the state has a PRNG key
    model_state: PyTree  # arrays or shapes; None where there is none

    def make(self, given: PyTree, args: tuple[Any, ...], key: Any) -> TrainState:
        check_context(self.update.layout)
        check_key(key, asked=self.has_key)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(self.model_state)):
            told = "make_train_step(model_state=) was given shapes, and a state starts from arrays"
            raise ValueError(told)
        # The step donates its state, and `device_put` may share what the user holds.
        own = jax.tree.map(jnp.copy, (key, self.model_state))
        rest = place_whole(own, (self.shardings.key, self.shardings.model_state))
        return dataclasses.replace(self._make(given, args), key=rest[0], model_state=rest[1])

    def _make(self, given: Callable[..., PyTree] | PyTree, args: tuple[Any, ...]) -> TrainState:
        shardings = dataclasses.replace(self.shardings, key=None, model_state=None)
        # An equinox or nnx module is callable, and is parameters: it has leaves.
        is_leaf = treedef_is_leaf(jax.tree.structure(given))
        if callable(given) and (is_leaf or isinstance(given, jax.tree_util.Partial)):
            build = jax.jit(lambda *args: self._build(given(*args)), out_shardings=shardings)
            values, told = args, {"arguments": args}
        elif args:
            raise TypeError("step.init takes params alone, or init_fn before its arguments")
        elif any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given)):
            raise ValueError("step.init takes arrays, got shapes; they are for step.abstract_state")
        else:
            check_kept(given)
            told = {"arguments": as_params(given, self.update.layout, "params")}
            build = jax.jit(self._build, out_shardings=shardings)
            values = (place_whole(told["arguments"], self.update.layout.params),)
        lower = functools.partial(build.lower, *values)
        agree_on("step.init", self.update.layout, self.update.recipe, self.abstract(), lower, told)
        return build(*values)

    def abstract(self) -> TrainState:
        """Return the state as shapes with shardings, in containers of its own; nothing is run."""
        return jax.tree.map(lambda x: x, self._abstract)

    @cached_property
    def _abstract(self) -> TrainState:
        # A mesh that the user has set, with Explicit axes, is not the one of the constraints.
        with jax.sharding.use_abstract_mesh(self.update.layout.auto_mesh.abstract_mesh):
            shapes = jax.eval_shape(self._place, self.update.layout.shapes)
        key = jax.eval_shape(lambda: jax.random.key(0)) if self.has_key else None
        shapes = dataclasses.replace(shapes, key=key, model_state=as_shapes(self.model_state))
        place = self.shardings
        return jax.tree.map(lambda x, at: x.update(sharding=at, weak_type=False), shapes, place)

    @cached_property
    def shardings(self) -> TrainState:
        layout, placed = self.update.layout, self.update.placed
        precision = self.update.recipe.precision
        everywhere = layout.sharding(P())
        shardings = TrainState(
            step=everywhere,
            params=hold(layout.stored("parameter"), layout),
            masters=None if precision.master is None else layout.stored("master"),
            opt_state=placed.shardings(layout),
            loss_scale=None if precision.loss_scale is None else LossScale(everywhere, everywhere),
            key=everywhere if self.has_key else None,
            model_state=jax.tree.map(self._place_of, self.model_state),
            padded=placed.padded,
        )
        return self._map_hosted(lambda s: s.with_memory_kind(HOST_MEMORY), shardings)

    def _place_of(self, given: Any) -> NamedSharding:
        """Return where a leaf of the model's state stays: where it was placed on the mesh."""
        layout, held, spec = self.update.layout, getattr(given, "sharding", None), P()
        if isinstance(held, NamedSharding) and held.mesh in (layout.mesh, layout.auto_mesh):
            spec = held.spec
        return layout.sharding(spec, jnp.ndim(given))

    def _build(self, params: PyTree) -> TrainState:
        params = as_params(params, self.update.layout, "what init_fn returns")
        casts = self.update.recipe.precision.updated is not None
        if not casts and (text := difference(params, self.update.layout.shapes)):
            raise ValueError(
                f"the parameters are not those of the layout: {text}; make the layout from these, "
                "or cast them with Recipe(precision=Precision(params=...))"
            )
        held = dataclasses.replace(self.shardings, key=None, model_state=None)
        specs = jax.tree.map(lambda s: s.spec, held)
        return auto_region(self._place, self.update.layout, specs)(params)

    def _place(self, params: PyTree) -> TrainState:
        layout, precision = self.update.layout, self.update.recipe.precision
        updated = shard_tree(cast_floating(params, precision.updated), layout)
        low, masters = updated, None
        if precision.master is not None:
            low = layout.map_leaves(
                lambda leaf, x: x.astype(floating_dtype(leaf.dtype, precision.params)), updated
            )
            masters = layout.map_leaves(lambda leaf, x: store(x, leaf, layout), updated)
        if layout.partitions("parameter"):
            placed = layout.map_leaves(lambda leaf, x: store(x, leaf, layout, "parameter"), low)
        else:
            placed = layout.map_leaves(lambda leaf, x: constrain(x, layout, leaf.whole_spec), low)
        state = TrainState(
            step=jnp.zeros((), jnp.int32),
            params=hold(placed, layout),
            masters=masters,
            opt_state=store_state(self.update.tx.init(updated), self.update.placed, layout),
            loss_scale=first_loss_scale(precision.loss_scale),
            padded=self.update.placed.padded,
        )
        return self._map_hosted(lambda x: jax.device_put(x, jax.memory.Space.Host), state)

    def _map_hosted(self, function: Callable[[Any], Any], state: TrainState) -> TrainState:
        def over(tree: PyTree, far: Sequence[bool]) -> PyTree:
            leaves, structure = jax.tree.flatten(tree)
            return structure.unflatten(
                function(x) if on_host else x for x, on_host in zip(leaves, far, strict=False)
            )

        if not self.update.hosted:
            return state
        return dataclasses.replace(
            state,
            masters=over(state.masters, self.update.hosted.masters),  # none, or all that there are
            opt_state=over(state.opt_state, self.update.hosted.state),
        )
