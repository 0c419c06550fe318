"""The compiled train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import as_shapes
from zerojax._types import LossFn, PyTree
from zerojax.audit import AuditReport, audit
from zerojax.collectives import (
    accumulate,
    auto_region,
    compiler_options,
    gather_where_used,
    reduce_once,
    store,
    write_back,
)
from zerojax.layout import Layout, as_transformation, check_layout
from zerojax.memory import activation_policy, rematerialised
from zerojax.recipe import Recipe, as_recipe
from zerojax.train._checks import (
    check_batch,
    check_leaves,
    check_placement,
    check_structure,
    read_loss,
)
from zerojax.train._clipping import global_norm
from zerojax.train._initial import InitialState
from zerojax.train._loss_scale import next_loss_scale, scaled
from zerojax.train._state import TrainState
from zerojax.train._update import Update


class TrainStep:
    """A compiled step: `state, metrics = step(state, batch)`.

    Attributes:
        layout: where every leaf lives.
        recipe: how the step is computed.
        shardings: the sharding of every leaf of the state, as a `TrainState`.
    """

    def __init__(
        self, loss_fn: LossFn, tx: Any, layout: Layout, recipe: Recipe, *, has_aux: bool
    ) -> None:
        self.layout = layout
        self.recipe = recipe
        self._reduction = recipe.reduction(layout.kinds)
        self._has_aux = has_aux
        self._evaluated_fn = loss_fn
        policy = activation_policy(recipe, layout.mesh)
        self._loss_fn = loss_fn if policy is None else rematerialised(loss_fn, policy)
        tx = as_transformation(tx)
        self._update = Update(tx, layout, recipe)
        self._initial = InitialState(tx, layout, recipe, self._update.placed, self._update.hosted)
        self.shardings = self._initial.shardings
        self._compiled: dict[Any, Any] = {}

    def init(self, init_fn_or_params: Callable[..., PyTree] | PyTree, *args: Any) -> TrainState:
        """Make the state, each leaf directly as shards.

        Args:
            init_fn_or_params: `init_fn(*args)` that returns the logical parameters, which is run
                under jit; or the logical parameters themselves.
            *args: for `init_fn`, a PRNG key for instance.

        Raises:
            ValueError: the parameters are not those that the layout was made from.
        """
        return self._initial.make(init_fn_or_params, *args)

    def abstract_state(self) -> TrainState:
        """Return the state as shapes with shardings; nothing is run."""
        return self._initial.abstract()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Do one step.

        The state is donated: use the one that is returned. Metrics are scalars on every device:
        `loss`, `grad_norm` (before clipping), `param_norm` (after the update), `learning_rate`
        where the optimizer's state holds one (`optax.inject_hyperparams`), `aux` with `has_aux`,
        and with a loss scale `loss_scale`, that of this step, and `skipped`, whether its gradients
        were not finite, so that parameters and optimizer state stayed what they were.

        Args:
            state: from `step.init` or from the step before; donated.
            batch: arrays whose leading dim is the global batch, placed as `layout.batch` or not
                placed at all; scalars and PRNG keys go to every device.

        Raises:
            ValueError: the state is of another layout, recipe or optimizer, or the devices or the
                microbatches don't divide the batch, or it is placed otherwise.
        """
        return self._call("step", state, batch)

    def evaluate(self, state: TrainState, batch: PyTree) -> jax.Array:
        """Compute the loss of logical parameters, a scalar on every device; nothing is changed.

        The arguments are those of a step; the batch is one, whatever the number of microbatches.
        """
        return self._call("evaluate", state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes, as `jax.jit(...).lower` does."""
        check_structure(state, self.shardings, self.abstract_state)
        return self._jitted("step", batch).lower(state, batch)

    def audit(self, batch: PyTree) -> AuditReport:
        """Compile the step for a batch, of arrays or shapes, and audit it.

        Everything that the audit should know, the step knows: `zerojax.audit` is for programs
        that were compiled elsewhere.
        """
        compiled = self.lower(self.abstract_state(), as_shapes(batch)).compile()
        return audit(compiled, self.layout, self.recipe)

    @property
    def num_compiled(self) -> int:
        """Count the steps that were compiled so far: one, unless shapes change."""
        return sum(
            jitted._cache_size() for (what, *_), jitted in self._compiled.items() if what == "step"
        )

    def _call(self, what: str, state: TrainState, batch: PyTree) -> Any:
        check_structure(state, self.shardings, self.abstract_state)
        jitted = self._jitted(what, batch)
        try:
            return jitted(state, batch)
        except ValueError:
            # What jit says of leaves and placements names neither; the good path pays nothing.
            check_leaves(state, self.abstract_state())
            check_placement(batch, self.layout)
            raise

    def _jitted(self, what: str, batch: PyTree) -> Any:
        """Return the jitted step or evaluation for a batch of this structure."""
        leaves, structure = jax.tree.flatten(batch)
        key = (what, structure, tuple(jnp.ndim(x) for x in leaves))
        steps = what == "step"
        check_batch(batch, self.layout, self.recipe.accumulate if steps else 1)
        if key not in self._compiled:
            whole = self.layout.sharding(P())
            placed = structure.unflatten(
                self.layout.batch if jnp.ndim(x) else whole for x in leaves
            )
            self._compiled[key] = jax.jit(
                self._step if steps else self._evaluate,
                in_shardings=(self.shardings, placed),
                out_shardings=(self.shardings, None) if steps else whole,
                donate_argnums=0 if steps else (),
                compiler_options=compiler_options(self.layout, self.recipe.bucket_bytes),
            )
        return self._compiled[key]

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        check_leaves(state, self.abstract_state())

        def specs(state: TrainState, batch: PyTree) -> Any:
            with jax.sharding.use_abstract_mesh(self.layout.auto_mesh.abstract_mesh):
                metrics = jax.eval_shape(self._run, *as_shapes((state, batch)))[1]
            held = jax.tree.map(lambda s: s.spec, self.shardings)
            return held, jax.tree.map(lambda _: P(), metrics)

        return auto_region(self._run, self.layout, specs)(state, batch)

    def _evaluate(self, state: TrainState, batch: PyTree) -> jax.Array:
        check_leaves(state, self.abstract_state())

        def run(params: PyTree, batch: PyTree) -> jax.Array:
            out = gather_where_used(self._evaluated_fn, self.layout)(params, batch)
            return read_loss(out, has_aux=self._has_aux)[0]

        return auto_region(run, self.layout, lambda *_: P())(state.params, batch)

    def _run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Compute gradients as shards, update shards, write the parameters back."""
        (loss, aux), grads = self._gradients(state, batch)
        updated = self._update(state, grads, loss)
        metrics = {
            "loss": loss,
            "grad_norm": updated.norm,
            "param_norm": global_norm(updated.params),
        }
        policy, loss_scale = self.recipe.precision.loss_scale, state.loss_scale
        if loss_scale is not None and policy is not None:
            finite = jnp.isfinite(updated.norm)
            metrics |= {"loss_scale": loss_scale.scale, "skipped": ~finite}
            loss_scale = next_loss_scale(policy, loss_scale, finite)
        new_state = TrainState(
            step=state.step + 1,
            params=self._written(state.params, updated.params),
            masters=updated.masters,
            opt_state=updated.opt_state,
            loss_scale=loss_scale,
            padded=state.padded,
        )
        rates = [
            value
            for _, value in optax.tree_utils.tree_get_all_with_path(
                updated.opt_state, "learning_rate"
            )
            if isinstance(value, jax.Array) and value.ndim == 0
        ]
        if len(rates) == 1:
            metrics["learning_rate"] = rates[0]
        if self._has_aux:
            metrics["aux"] = aux
        return new_state, metrics

    def _written(self, old: PyTree, updated: PyTree) -> PyTree:
        """Return the new parameters in the form of the old ones, from shards that may be wider."""
        if not self.layout.partitions("parameter"):
            return write_back(old, updated, self.layout, self.recipe.bucket_bytes)
        return self.layout.map_leaves(
            lambda leaf, was, x: store(x.astype(was.dtype), leaf, self.layout), old, updated
        )

    def _gradients(self, state: TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        """Return loss, aux and the gradients as stored shards, of the scaled loss if it is."""
        # A scalar of the batch goes to every device and microbatch, and so the scale does.
        params, layout, recipe = state.params, self.layout, self.recipe
        batch = (batch, None if state.loss_scale is None else state.loss_scale.scale)
        count, dtype = recipe.accumulate, recipe.accumulator
        if self._reduction == "once":
            run = self._value_and_grad(self._loss_fn)
            return reduce_once(run, layout, params, batch, count, dtype)
        # Below stage 3 parameters are logical, and so are their gradients, though cut: were they
        # padded first, they would all be there twice.
        loss_fn = gather_where_used(self._loss_fn, layout, reduce_dtype=recipe.precision.reduce)
        return accumulate(self._value_and_grad(loss_fn), params, batch, count, dtype)

    def _value_and_grad(self, loss_fn: LossFn) -> Any:
        """Return `(loss, aux), gradients` of parameters and `(batch, scale)`; aux may be None."""

        def with_aux(params: PyTree, given: tuple[PyTree, Any]) -> tuple[jax.Array, Any]:
            batch, scale = given
            loss, aux = read_loss(loss_fn(params, batch), has_aux=self._has_aux)
            return scaled(loss, scale), (loss, aux)

        def run(params: PyTree, given: tuple[PyTree, Any]) -> tuple[Any, PyTree]:
            (_, value), grads = jax.value_and_grad(with_aux, has_aux=True)(params, given)
            return value, grads

        return run


def make_train_step(
    loss_fn: LossFn,
    tx: Any,
    layout: Layout,
    recipe: Recipe | None = None,
    *,
    has_aux: bool = False,
) -> TrainStep:
    """Make the train step of a loss under a ZeRO stage.

    Args:
        loss_fn: `loss_fn(params, batch)` of logical parameters returns a scalar, or with `has_aux`
            a scalar and a pytree; it knows nothing of the mesh.
        tx: the optimizer, bare or wrapped by `sharded`.
        layout: the placement; its stage decides what is partitioned.
        recipe: precision, microbatches, clipping, rematerialisation, offload; fp32 by default.
        has_aux: whether `loss_fn` returns more than the loss. Over microbatches, floating leaves
            are averaged and whole numbers summed.

    Raises:
        ValueError: a recipe that the layout can't follow: "once" at stage 3, where no device holds
            a whole gradient, or an offload on a backend without host memory.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}")
    check_layout(layout, "make_train_step(loss_fn, tx, layout, recipe)")
    return TrainStep(loss_fn, tx, layout, as_recipe(recipe), has_aux=has_aux)
