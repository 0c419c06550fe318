"""The compiled train step."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from zerojax._tree import flatten_with_names
from zerojax._types import LossFn, PyTree
from zerojax.collectives import (
    accumulate as accumulate_gradients,
)
from zerojax.collectives import (
    auto_region,
    check_bucket_bytes,
    compiler_options,
    gather_where_used,
    reduce_once,
    shard_tree,
    store,
    view,
    write_back,
)
from zerojax.layout import Layout
from zerojax.memory import of_step, rematerialised
from zerojax.optim import as_transformation, hosted_leaves, update_shards
from zerojax.recipe import OffloadPolicy, Precision, Remat, RematPolicy
from zerojax.train._clipping import clip, global_norm
from zerojax.train._guard import guarded, kept_unless
from zerojax.train._loss_scale import next_loss_scale, scaled, unscaled
from zerojax.train._offloaded import update_offloaded
from zerojax.train._precision import cast_floating
from zerojax.train._state import TrainState, state_shardings

Reduce = Literal["once", "each"]


class TrainStep:
    """A compiled step: `state, metrics = step(state, batch)`.

    The state is donated: use the one that is returned. Metrics are scalars on every device: `loss`,
    `grad_norm` (before clipping), `param_norm` (after the update), `learning_rate` where the
    optimizer's state holds one (`optax.inject_hyperparams`), `aux` with `has_aux`, and with a loss
    scale `loss_scale`, that of this step, and `skipped`, whether its gradients were not finite, so
    that parameters and optimizer state stayed what they were.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        layout: Layout,
        precision: Precision,
        accumulate: int,
        reduce: Reduce,
        clip_norm: float | None,
        has_aux: bool,
        offload: OffloadPolicy | None = None,
        bucket_bytes: int | None = None,
    ) -> None:
        self.layout = layout
        self.precision = precision
        self.num_microbatches = accumulate
        self.reduce = reduce
        self.clip_norm = clip_norm
        self.has_aux = has_aux
        self.offload = offload
        self.bucket_bytes = bucket_bytes
        self._loss_fn = loss_fn
        self._tx = optax.with_extra_args_support(as_transformation(tx))
        self._placed = layout.optimizer(self._tx, precision.updated)
        self._hosted = hosted_leaves(
            offload, layout, self._placed, has_masters=precision.master is not None
        )
        self._shardings = state_shardings(self._tx, layout, precision, self._hosted)
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Do one step.

        Args:
            state: from `init_train_state` or from the step before; donated.
            batch: arrays whose leading dim is the global batch, placed as `layout.batch` or not
                placed at all; scalars and PRNG keys go to every device.

        Raises:
            ValueError: the devices or the microbatches don't divide the batch.
        """
        self._check_state(state)
        return self._jitted(batch)(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Lower the step for arrays or shapes, as `jax.jit(...).lower` does."""
        self._check_state(state)
        return self._jitted(batch).lower(state, batch)

    @property
    def num_compiled(self) -> int:
        """Count the programs that were compiled so far: one, unless shapes change."""
        return sum(jitted._cache_size() for jitted in self._compiled.values())

    def _jitted(self, batch: PyTree) -> Any:
        names, leaves, structure = flatten_with_names(batch)
        key = (structure, tuple(jnp.ndim(x) for x in leaves))
        self._check_batch(names, leaves)
        if key not in self._compiled:
            whole = self.layout.sharding(P())
            placed = structure.unflatten(
                self.layout.batch if jnp.ndim(x) else whole for x in leaves
            )
            self._compiled[key] = jax.jit(
                self._step,
                in_shardings=(self._shardings, placed),
                out_shardings=(self._shardings, None),
                donate_argnums=0,
                compiler_options=compiler_options(self.layout, self.bucket_bytes),
            )
        return self._compiled[key]

    def _check_state(self, state: TrainState) -> None:
        """Refuse a state of another structure before jit does in terms of pytrees."""
        for name, what in (("masters", "masters"), ("loss_scale", "a loss scale")):
            found, wanted = (getattr(s, name) is not None for s in (state, self._shardings))
            if found != wanted:
                raise ValueError(
                    f"the state {'holds' if found else 'lacks'} {what} and the step's precision "
                    f"{'asks for' if wanted else 'has'} {what if wanted else 'none'}: give "
                    "init_train_state and make_train_step the same precision"
                )

    def _check_batch(self, names: list[str], leaves: list[Any]) -> None:
        parts = self.layout.num_batch_parts
        wanted = parts * self.num_microbatches
        for name, x in zip(names, leaves, strict=True):
            shape = jnp.shape(x)
            if shape and shape[0] % wanted:
                raise ValueError(
                    f"batch leaf {name!r} has {shape[0]} examples; {parts} devices along "
                    f"{self.layout.batch_axes} times {self.num_microbatches} microbatches need a "
                    f"multiple of {wanted}"
                )

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        def specs(state: TrainState, batch: PyTree) -> Any:
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch))
            metrics = jax.eval_shape(self._run, *shapes)[1]
            held = jax.tree.map(lambda s: s.spec, self._shardings)
            return held, jax.tree.map(lambda _: P(), metrics)

        return auto_region(self._run, self.layout, specs)(state, batch)

    def _run(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
        """Compute gradients as shards, update shards, write the parameters back."""
        (loss, aux), grads = self._gradients(state, batch)
        if self._hosted and self.offload is not None:
            norm, updated, masters, opt_state = update_offloaded(
                self._tx, self.layout, self._placed, self._hosted, self.precision, self.clip_norm,
                state, grads, loss, on_host=self.offload.update == "host",
            )  # fmt: skip
        else:
            masters = None
            norm, updated, opt_state = self._update(state, grads, loss)
        metrics = {"loss": loss, "grad_norm": norm, "param_norm": global_norm(updated)}
        loss_scale = state.loss_scale
        if loss_scale is not None and self.precision.loss_scale is not None:
            finite = jnp.isfinite(norm)
            metrics |= {"loss_scale": loss_scale.scale, "skipped": ~finite}
            loss_scale = next_loss_scale(self.precision.loss_scale, loss_scale, finite)
        new_state = TrainState(
            step=state.step + 1,
            params=self._written(state.params, updated),
            masters=self._masters(updated) if masters is None else masters,
            opt_state=opt_state,
            loss_scale=loss_scale,
            padded=state.padded,
        )
        rates = [
            value
            for _, value in optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
            if isinstance(value, jax.Array) and value.ndim == 0
        ]
        if len(rates) == 1:
            metrics["learning_rate"] = rates[0]
        if self.has_aux:
            metrics["aux"] = aux
        return new_state, metrics

    def _update(
        self, state: TrainState, grads: PyTree, loss: jax.Array
    ) -> tuple[jax.Array, PyTree, PyTree]:
        """Give the gradients' norm, what the optimizer updates as shards, and the stored state."""
        layout, precision = self.layout, self.precision
        grads = unscaled(cast_floating(grads, precision.updated), state.loss_scale)
        norm = global_norm(grads)
        grads = clip(grads, norm, self.clip_norm)

        held = state.params if precision.master is None else state.masters
        is_stored = precision.master is not None or layout.partitions("parameter")
        updated = (
            layout.map_leaves(lambda leaf, x: view(x, leaf, layout), held)
            if is_stored
            else shard_tree(held, layout)
        )
        grads = layout.map_leaves(lambda leaf, g: view(g, leaf, layout), grads)
        finite = None if state.loss_scale is None else jnp.isfinite(norm)
        tx = self._tx if finite is None else guarded(self._tx, finite)
        updates, opt_state = update_shards(
            tx, layout, self._placed, grads, state.opt_state, updated,
            {"value": loss, "grad": grads},
        )  # fmt: skip
        new = optax.apply_updates(updated, updates)
        if finite is not None:
            new = kept_unless(finite, new, updated)
        return norm, shard_tree(new, layout), opt_state

    def _masters(self, updated: PyTree) -> PyTree:
        """Store what the optimizer updated, where masters are kept."""
        if self.precision.master is None:
            return None
        return self.layout.map_leaves(lambda leaf, x: store(x, leaf, self.layout), updated)

    def _written(self, old: PyTree, updated: PyTree) -> PyTree:
        """Give the new parameters in the form of the old ones, from shards that may be wider."""
        if not self.layout.partitions("parameter"):
            return write_back(old, updated, self.layout, self.bucket_bytes)
        return self.layout.map_leaves(
            lambda leaf, was, x: store(x.astype(was.dtype), leaf, self.layout), old, updated
        )

    def _gradients(self, state: TrainState, batch: PyTree) -> tuple[Any, PyTree]:
        """Give loss, aux and the gradients as stored shards, of the scaled loss if it is."""
        # A scalar of the batch goes to every device and microbatch, and so the scale does.
        params = state.params
        batch = (batch, None if state.loss_scale is None else state.loss_scale.scale)
        layout, count = self.layout, self.num_microbatches
        dtype = self.precision.reduce or (self.precision.master if count > 1 else None)
        if self.reduce == "once":
            return reduce_once(
                self._value_and_grad(self._loss_fn), layout, params, batch, count, dtype
            )
        # Below stage 3 parameters are logical, and so are their gradients, though cut: were they
        # padded first, they would all be there twice.
        loss_fn = gather_where_used(self._loss_fn, layout, reduce_dtype=self.precision.reduce)
        return accumulate_gradients(self._value_and_grad(loss_fn), params, batch, count, dtype)

    def _value_and_grad(self, loss_fn: LossFn) -> Any:
        """Give `(loss, aux), gradients` of parameters and `(batch, scale)`; aux may be None."""

        def with_aux(params: PyTree, given: tuple[PyTree, Any]) -> tuple[jax.Array, Any]:
            batch, scale = given
            out = loss_fn(params, batch)
            loss, aux = out if self.has_aux else (out, None)
            if jnp.shape(loss):
                raise ValueError(f"loss_fn must return a scalar, got shape {jnp.shape(loss)}")
            return scaled(loss, scale), (loss, aux)

        def run(params: PyTree, given: tuple[PyTree, Any]) -> tuple[Any, PyTree]:
            (_, value), grads = jax.value_and_grad(with_aux, has_aux=True)(params, given)
            return value, grads

        return run


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    layout: Layout,
    *,
    precision: Precision | None = None,
    accumulate: int = 1,
    reduce: Reduce | None = None,
    clip_norm: float | None = None,
    has_aux: bool = False,
    remat: RematPolicy | Remat | None = None,
    offload: OffloadPolicy | None = None,
    bucket_bytes: int | None = None,
) -> TrainStep:
    """Make the train step of a loss under a ZeRO stage.

    Args:
        loss_fn: `loss_fn(params, batch)` of logical parameters gives a scalar, or with `has_aux`
            a scalar and a pytree; it knows nothing of the mesh.
        tx: the optimizer, not wrapped.
        layout: the placement; its stage decides what is partitioned.
        precision: dtypes, the same that the state was initialised with.
        accumulate: microbatches per step.
        reduce: "each" sums every microbatch's gradients over devices into a partitioned
            accumulator, which is stage 2's memory; the loss sees the whole microbatch. "once" sums
            over devices once per step, from an accumulator that is whole on each device; the loss
            sees one device's examples at a time, as data parallelism in other frameworks has it,
            so it must be a mean over examples and can't constrain shardings over the batch axes.
            The default is "once" for stages 0 and 1 with several microbatches, else "each".
        clip_norm: largest global norm of the gradients.
        has_aux: whether `loss_fn` returns more than the loss. Over microbatches, floating leaves
            are averaged and whole numbers summed.
        remat: what the backward pass of each layer computes again, keeps, partitions or offloads,
            instead of what the model does by itself.
        offload: what lives in the host's memory, the same that the state was initialised with;
            `param_norm` is then that of the parameters as the loss reads them.
        bucket_bytes: most bytes that the compiler combines into one collective (the paper's
            constant-size buffers); None leaves it to the compiler, but at stage 3 on a GPU, which
            would gather several layers at once. Larger ones are fewer and take more memory.

    Raises:
        ValueError: an option that can't be meant, "once" at stage 3, where no device holds a whole
            gradient, or an offload on a backend without host memory.

    Source: arXiv 1910.02054, sections 5 and 7.
    """
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a positive whole number, got {accumulate!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be positive, got {clip_norm!r}")
    if reduce not in (None, "once", "each"):
        raise ValueError(f"reduce must be 'once', 'each' or None, got {reduce!r}")
    if reduce == "once" and layout.partitions("parameter"):
        raise ValueError(
            "reduce='once' needs a whole gradient on each device, and stage 3 never holds one; "
            "use reduce='each', or stage 1 or 2"
        )
    if reduce is None:
        whole = accumulate > 1 and not layout.partitions("gradient")
        reduce = "once" if whole else "each"
    check_bucket_bytes(bucket_bytes)
    policy = of_step(remat, offload, layout.mesh)
    if policy is not None:
        loss_fn = rematerialised(loss_fn, policy)
    return TrainStep(
        loss_fn, tx, layout, (precision or Precision()), accumulate, reduce, clip_norm, has_aux,
        offload, bucket_bytes,
    )  # fmt: skip
