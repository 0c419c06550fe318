"""The compiled train step."""

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from zerojax._display import Shown
from zerojax._examples import map_batch, num_examples
from zerojax._quiet import uncollected
from zerojax._tree import as_shapes, unwrapped
from zerojax._types import PyTree
from zerojax.audit import AuditReport, audit
from zerojax.collectives import compiler_options, forms, gathers, gradients, passes
from zerojax.layout import Layout, LeafLayout, as_transformation
from zerojax.memory import check_policy, rematerialised
from zerojax.processes import check_copies
from zerojax.recipe import Recipe
from zerojax.train._checks import Loss, check_batch, check_placement, check_state, check_usable
from zerojax.train._initial import InitialState
from zerojax.train._processes import agree_on, batch_part, place_rows
from zerojax.train._state import TrainState, hold
from zerojax.train._update import Update, global_norm, kept_unless, next_loss_scale, scaled

#: Between the check of a state and the call no other thread may donate it: jaxlib would crash.
_CALLING = threading.RLock()
#: From so many programs on a step tells that each takes its time to compile.
MANY = 8


class TrainStep(Shown):
    """A compiled step: `state, metrics = step(state, batch)`.

    Attributes:
        layout: where every leaf lives.
        recipe: how the step is computed.
        shardings: the sharding of every leaf of the state, as a `TrainState`.
    """

    def __init__(self, loss: Loss, tx: Any, layout: Layout, recipe: Recipe, own_state: Any) -> None:
        self.layout = layout = dataclasses.replace(layout, has_options=True)
        self.recipe = recipe
        self._reduction = recipe.reduction(layout.kinds)
        recipe.lookahead(layout.kinds, "")  # refused where weights are whole
        self._loss = loss
        self._loss_fn = loss
        if recipe.remat is not None:
            check_policy(recipe.remat, layout.mesh)
            self._loss_fn = rematerialised(loss, recipe.remat, is_loss=True)
        self._gathering = gathers.gathering(self._loss_fn, layout, recipe)
        self._update = Update(as_transformation(tx), layout, recipe)
        self._initial = InitialState(self._update, "key" in loss.asks, own_state)
        self.shardings = self._initial.shardings
        self._compiled: dict[Any, Any] = {}
        self._agreed: set[Any] = set()
        self._late: dict[str, None] = {}  # why loops can't gather ahead

    def init(
        self, init_fn_or_params: Callable[..., PyTree] | PyTree, *args: Any, key: Any = None
    ) -> TrainState:
        """Make the state, each leaf directly as shards.

        Args:
            init_fn_or_params: `init_fn(*args)` that returns the logical parameters, which is run
                under jit; or the logical parameters themselves.
            *args: for `init_fn`, a PRNG key for instance.
            key: the PRNG key that those of all steps are derived from, where the loss asks for one.

        Raises:
            ValueError: the parameters are not those that the layout was made from; the loss asks
                for a key, and there is none.
        """
        return self._initial.make(init_fn_or_params, args, key)

    def abstract_state(self) -> TrainState:
        """Return the state as shapes with shardings; nothing is run."""
        return self._initial.abstract()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Do one step.

        The state is donated: use the one that is returned. Metrics are scalars on every device:
        `loss`, `grad_norm` (before clipping, without leaves that the optimizer leaves alone, as
        `optax.set_to_zero` does), `param_norm` (after the update), with `has_aux` `aux`, with a
        loss scale `loss_scale`, that of this step, and with one or `skip_nonfinite` `skipped`,
        whether its gradients were not finite, so that parameters, optimizer state and the model's
        state stayed what they were.

        Args:
            state: from `step.init` or from the step before; donated.
            batch: arrays whose leading dim is the global batch, placed as `layout.batch` or not
                placed at all; of several processes, what `place` returns. Scalars and what is
                marked `Whole` go to every device. A PRNG key (a scalar) is folded for each
                microbatch, and for each device that computes its gradients alone, so that no two
                examples draw the same noise.

        Raises:
            ValueError: the state is of another layout, recipe or optimizer, or the devices or the
                microbatches don't divide the batch, or it is placed otherwise.
        """
        return self._call("step", state, batch)

    def evaluate(self, state: TrainState, batch: PyTree) -> Any:
        """Return the loss, a scalar on every device, or with `has_aux` `(loss, aux)`.

        The arguments are those of a step, and nothing is changed. The batch is one, whatever the
        number of microbatches. A loss that has a default for its key gets none.
        """
        return self._call("evaluate", state, batch)

    def place(self, batch: PyTree) -> PyTree:
        """Make global arrays of the rows of a batch that this process has, for the step.

        Each of several processes hands over its own rows, as many as the others; together they are
        the batch. One process hands over all.

        Args:
            batch: numpy or jax arrays on this process, whose leading dim counts its rows. Scalars
                and what is marked `Whole` have to be the same on all processes. JAX may read a
                numpy array until the step is done: write the next batch into another one.

        >>> index, count = step.batch_part
        >>> state, metrics = step(state, step.place(x[index::count]))

        Raises:
            ValueError: the devices don't divide the rows.
        """
        return place_rows(batch, self.layout, self.batch_part[1])

    @functools.cached_property
    def batch_part(self) -> tuple[int, int]:
        """`(index, count)`: the part of each batch that this process places, of how many.

        Processes whose devices hold the same rows, as along a model axis, have the same part.
        """
        return batch_part(self.layout)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes, as `jax.jit(...).lower` does.

        Raises:
            TypeError: the state is no `TrainState`.
            ValueError: it was donated, or it is not of this step's layout, recipe and optimizer.
        """
        check_usable(state, self.layout)
        check_state(state, self.abstract_state())
        return self._jitted("step", batch).lower(state, batch)

    def audit(self, batch: PyTree, *, joins_examples: bool = False) -> AuditReport:
        """Compile the step for a batch, of arrays or shapes, and audit it; see `zerojax.audit`.

        Raises:
            ValueError: the devices or the microbatches don't divide the batch.
        """
        check_batch(batch, self.layout, self.recipe.accumulate)
        at = self.layout.batch  # a part of what jax compiles for: what was run is not compiled anew

        def like(x: Any) -> jax.ShapeDtypeStruct:
            return as_shapes(x).update(sharding=at if getattr(x, "sharding", None) == at else None)

        compiled = self.lower(self.abstract_state(), jax.tree.map(like, batch)).compile()
        report = audit(compiled, self.layout, self.recipe, joins_examples=joins_examples)
        return dataclasses.replace(report, notes=(*report.notes, *self._late))

    @property
    def num_compiled(self) -> int:
        """Count the steps that were compiled so far: one, unless shapes change."""
        return sum(x._cache_size() for (what, *_), x in self._compiled.items() if what == "step")

    @property
    def _summary(self) -> str:
        return f"{self.layout.title}, {self.recipe!r}"

    def _parts(self) -> Any:
        return self.abstract_state()._parts()

    def _call(self, what: str, state: TrainState, batch: PyTree) -> Any:
        with _CALLING:
            check_usable(state, self.layout, {"batch": batch} if what == "step" else None)
            jitted = self._jitted(what, batch)
            try:
                if jitted not in self._agreed:
                    lower = functools.partial(jitted.lower, state, batch)
                    given = {"batch": batch}
                    if agree_on(f"compiling {what}", self.layout, self.recipe, state, lower, given):
                        check_copies(f"compiling {what}", {"state": state, "batch": batch})
                    self._agreed.add(jitted)
                    if len(self._agreed) == MANY:
                        shapes = jax.tree.map(jnp.shape, batch)
                        told = f"{MANY} programs are compiled for batches of other shapes, {shapes}"
                        warnings.warn(f"{told} now: pad examples to a few lengths", stacklevel=3)
                return jitted(state, batch)
            except ValueError:
                # What jit says of leaves and placements names neither; the good path pays nothing.
                check_state(state, self.abstract_state())
                check_placement(batch, self.layout)
                raise

    def _jitted(self, what: str, batch: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(batch)
        # Checked once for these shapes and dtypes: a check takes as long as a small step's call.
        kinds = ((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)
        key = (what, structure, tuple(kinds))
        steps = what == "step"
        if key not in self._compiled:
            check_batch(batch, self.layout, self.recipe.accumulate if steps else 1)
            whole = self.layout.sharding(P())
            placed = map_batch(lambda _: self.layout.batch, batch, lambda _: whole)
            self._compiled[key] = jax.jit(
                self._step if steps else self._evaluate,
                in_shardings=(self.shardings, placed),
                out_shardings=(self.shardings, None) if steps else None,
                donate_argnums=0 if steps else (),
                compiler_options=compiler_options(self.layout, self.recipe.bucket_bytes),
            )
        return self._compiled[key]

    @uncollected()
    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        check_state(state, self.abstract_state())
        held = jax.tree.map(lambda s: s.spec, self.shardings)
        specs = held, self._spec_like(batch)
        return forms.auto_region(self._run, self.layout, specs)(state, batch)

    @uncollected()
    def _evaluate(self, state: TrainState, batch: PyTree) -> Any:
        check_state(state, self.abstract_state())

        def run(state: TrainState, batch: PyTree) -> Any:
            loss_fn = gathers.gather_where_used(self._loss.without_noise(), self.layout)
            given = self._given(state, batch)
            out = self._ahead(loss_fn)(unwrapped(state.params), given, state.model_state)
            return out[:2] if self._loss.has_aux else out[0]

        return forms.auto_region(run, self.layout, self._spec_like(batch))(state, batch)

    def _spec_like(self, batch: PyTree) -> Callable[[Any], P]:
        rows = num_examples(batch)
        return lambda x: self.layout.batch.spec if x.ndim and x.shape[0] == rows else P()

    def _given(self, state: TrainState, batch: PyTree) -> dict[str, Any]:
        """Return what goes to every device and microbatch beside parameters and model state."""
        return {
            "batch": batch,
            "key": None if state.key is None else jax.random.fold_in(state.key, state.step),
            "step": state.step,
            "scale": None if state.loss_scale is None else state.loss_scale.scale,
        }

    def _run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        (loss, aux, model_state), grads = self._gradients(state, batch)
        norm, params, new_state = self._update(state, grads, loss)
        metrics = {"loss": loss, "grad_norm": norm, "param_norm": global_norm(params, self.layout)}
        finite = jnp.isfinite(norm)
        if self.recipe.skips:
            metrics["skipped"] = ~finite
            model_state = kept_unless(finite, model_state, state.model_state)
        policy, loss_scale = self.recipe.precision.loss_scale, state.loss_scale
        if loss_scale is not None and policy is not None:
            metrics["loss_scale"] = loss_scale.scale
            loss_scale = next_loss_scale(policy, loss_scale, finite)
        kept = {"step": state.step + 1, "loss_scale": loss_scale, "model_state": model_state}
        params = hold(self._written(unwrapped(state.params), params), self.layout)
        new_state = dataclasses.replace(new_state, params=params, **kept)
        if self._loss.has_aux:
            metrics["aux"] = aux
        return new_state, metrics

    def _written(self, old: PyTree, updated: PyTree) -> PyTree:
        """Return the new parameters in the form of the old ones, from shards that may be wider."""
        if not self.layout.partitions("parameter"):
            return forms.write_back(old, updated, self.layout, self.recipe.bucket_bytes)

        def one(leaf: LeafLayout, was: jax.Array, x: jax.Array) -> jax.Array:
            return was if x is was else forms.widened(x.astype(was.dtype), leaf, self.layout)

        return self.layout.map_leaves(one, old, updated)

    def _gradients(self, state: TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        params, layout, recipe = unwrapped(state.params), self.layout, self.recipe
        given = self._given(state, batch)
        count, dtype, loss_fn = recipe.accumulate, recipe.accumulator, _scaled(self._loss_fn)
        if self._reduction == "once":
            return gradients.reduce_once(loss_fn, layout, params, given, count, dtype)
        if count > 1 and state.model_state is None:
            gradients.warn_unless_mean(loss_fn, layout, params, given, count)
        # Below stage 3 parameters are logical, and so are their gradients, though cut: were they
        # padded first, they would all be there twice.
        ahead = self._ahead if count == 1 or layout.platform != "tpu" else self._apart
        run = functools.partial(gradients.accumulate, is_tpu=layout.platform == "tpu")
        return run(_scaled(self._gathering), params, given, state.model_state, count, dtype, ahead)

    def _apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Keep gradients of microbatches apart: libtpu would add up whole ones, to scatter once."""
        return lambda *x: jax.tree.map(jax.lax.optimization_barrier, self._ahead(function)(*x))

    def _ahead(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let a function that is not differentiated any more gather ahead, as the recipe says."""
        recipe, layout = self.recipe, self.layout

        def told(reason: str) -> None:
            self._late[reason] = None
            if recipe.prefetch is not None:
                warnings.warn(reason, stacklevel=2)

        layers = recipe.lookahead(layout.kinds, layout.platform)
        ahead = passes.prefetched(function, layers, layout, recipe.bucket_bytes, told)
        return passes.fenced(ahead, layout.platform, layout.num_batch_parts)


def _scaled(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(params: PyTree, given: dict[str, Any], carried: PyTree) -> Any:
        loss, aux, carried = loss_fn(params, given, carried)
        return scaled(loss, given["scale"]), (loss, aux, carried)

    return run
