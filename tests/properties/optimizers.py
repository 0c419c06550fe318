"""List every optimizer and transformation of optax, and what a test of it must know."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

Tree = Any

SHAPES: dict[str, Any] = {
    "dense": {"kernel": (50, 24), "bias": (24,)},
    "conv": (7, 7, 3, 5),
    "embed": (256, 130),  # the only one that Adafactor factors by default (two dims of 128 or more)
    "square": (16, 16),  # which dim a factor (16,) keeps cannot be read off its shape
    "scale": (),
    "layers": {"w": (4, 16, 24)},  # stacked
}
LABELS = {
    "dense": {"kernel": "adam", "bias": "sgd"},
    "conv": "adam",
    "embed": "lion",
    "square": "adam",
    "scale": "sgd",
    "layers": {"w": "lion"},
}
MATRICES = jax.tree.map(lambda s: len(s) > 1, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def example_params(seed: int = 0) -> Tree:
    """Draw fp32 parameters of `SHAPES`, of order one and none of them near zero."""
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    leaves = [
        jax.random.uniform(k, s, minval=0.5, maxval=1.5) * jax.random.rademacher(k, s, jnp.float32)
        for k, s in zip(keys, shapes, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def complex_params(params: Tree) -> Tree:
    """Make the matrices complex and leave the other leaves real."""
    return jax.tree.map(lambda p: p + 0.5j * p[::-1] if p.ndim > 1 else p, params)


def no_scalars(params: Tree) -> Tree:
    """Give scalar leaves one dim: optax's own SM3 fails on a leaf without dims."""
    return jax.tree.map(jnp.atleast_1d, params)


@dataclass(frozen=True)
class Case:
    """Name one optimizer and what its test needs.

    `tolerance` bounds, leaf by leaf and step by step, the largest error over the largest value
    of the update (where that is zero, both are equal); looser than 1e-6, it has its `reason`.
    `extra` names the keyword arguments that `update` takes, see `extra_args`.
    `params` turns plain parameters into those that the case needs.
    `around` is put around `sharded(make(), layout)`, and around `make()` in the reference run.
    `unsupported` says why `sharded` raises for it.
    """

    name: str
    make: Callable[[], Any]
    tolerance: float = 1e-6
    reason: str | None = None
    extra: tuple[str, ...] = ()
    params: Callable[[Tree], Tree] = lambda params: params
    around: Callable[[Any], Any] = lambda tx: tx
    unsupported: str | None = None

    def extra_args(self, loss_fn: Callable[[Tree], Any], value: Any, grad: Tree) -> dict[str, Any]:
        """Select what `update` takes by keyword: this step's loss, its value or its gradient."""
        known = {
            "value": value,
            "grad": grad,
            "value_fn": loss_fn,
            "obj_fn": loss_fn,
            "grad_fn": lambda params, _: jax.grad(loss_fn)(params),
        }
        return {name: known[name] for name in self.extra}


NORMS = "a norm or mean over a leaf or over all leaves is summed in another order"
NORM_BOUND = 2 * 2**-24 * (256 * 130) ** 0.5  # a random walk of half ulps over "embed"
DIFFERENCE = "a difference of numbers as large as a parameter: an ulp is 1.2e-7 |p| / |update|"
BIAS = "an ulp of b1**t is 1 / (1 - b1) ulps of the bias correction 1 - b1**t"
BIAS_BOUND = 4 * 2**-23 / (1 - 0.9)
QUOTIENT = "roundings of the sums under a root, or of n - m**2 there, fused in another way"
RECURSION = "whole-tree dot products are divided by each other, which amplifies their rounding"
NEWTON_SCHULZ = "five matrix iterations with slopes above 3 amplify the rounding of products"
SVD = "singular vectors turn by rounding over the gap of the singular values"

LINESEARCH = ("value", "grad", "value_fn")


def _biased(name: str, make: Callable[[], Any], **options: Any) -> Case:
    """Name an optimizer that corrects the bias of its moments, as Adam does."""
    return Case(name, make, BIAS_BOUND, BIAS, **options)


def _schedule() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)


def _ndim_mask(params: Tree) -> Tree:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _ndim_labels(params: Tree) -> Tree:
    return jax.tree.map(lambda p: "adam" if p.ndim > 1 else "sgd", params)


def _groups() -> dict[Hashable, optax.GradientTransformation]:
    return {"adam": optax.adamw(1e-2), "sgd": optax.sgd(1e-2, 0.9), "lion": optax.lion(1e-3)}


def _even(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def _sam(**kwargs: Any) -> optax.GradientTransformation:
    adversary = optax.chain(contrib.normalize(), optax.sgd(1e-1))
    return contrib.sam(optax.sgd(1e-1, 0.9), adversary, **kwargs)


def _sophia() -> optax.GradientTransformation:
    hessian = contrib.hutchinson_estimator_diag_hessian()
    return contrib.sophia(1e-2, update_interval=2, hessian_diagonal_fn=hessian)


def _backtracking() -> optax.GradientTransformation:
    search = optax.scale_by_backtracking_linesearch(15, store_grad=True)
    return optax.chain(optax.sgd(1.0), search)


def _multi_steps(tx: optax.GradientTransformation, **kwargs: Any) -> optax.GradientTransformation:
    return optax.MultiSteps(tx, 2, **kwargs).gradient_transformation()


def _nested() -> optax.GradientTransformation:
    masked = optax.masked(optax.lamb(1e-2), _ndim_mask)
    ema = optax.inject_hyperparams(optax.ema)(0.9)
    return _multi_steps(optax.chain(optax.clip_by_global_norm(1.0), masked, ema))


def _stateless() -> optax.GradientTransformation:
    return optax.chain(
        optax.zero_nans(),
        optax.centralize(),
        optax.normalize_by_update_norm(),
        optax.scale_by_param_block_norm(),
        optax.stateless(lambda u, _: jax.tree.map(lambda x: x / 10, u)),
        optax.stateless_with_tree_map(lambda u, _: jnp.negative(u)),
        optax.keep_params_nonnegative(),
    )


OPTIMIZERS = (
    _biased("adabelief", lambda: optax.adabelief(1e-2)),
    Case("adadelta", lambda: optax.adadelta(1e-1, weight_decay=1e-2)),
    Case("adafactor", lambda: optax.adafactor(1e-2), NORM_BOUND, NORMS),
    Case("adafactor_all", lambda: optax.adafactor(1e-2, 3, momentum=0.9), NORM_BOUND, NORMS),
    Case("adagrad", lambda: optax.adagrad(1e-2)),
    _biased("adam", lambda: optax.adam(1e-2)),
    _biased("adam_bf16_moment", lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16)),
    _biased("adamax", lambda: optax.adamax(1e-2)),
    _biased("adamaxw", lambda: optax.adamaxw(1e-2)),
    _biased("adamw", lambda: optax.adamw(_schedule(), mask=_ndim_mask)),
    _biased("adan", lambda: optax.adan(1e-2)),
    _biased("amsgrad", lambda: optax.amsgrad(1e-2)),
    Case("fromage", lambda: optax.fromage(1e-2), NORM_BOUND, NORMS),
    Case("lamb", lambda: optax.lamb(1e-2, weight_decay=1e-2), NORM_BOUND, NORMS),
    Case("lars", lambda: optax.lars(1e-1, weight_decay=1e-2), NORM_BOUND, NORMS),
    Case(
        "lbfgs",
        lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(20)),
        1e-4,
        RECURSION,
        LINESEARCH,
    ),
    Case("lbfgs_fixed_step", lambda: optax.lbfgs(1e-1, 3, linesearch=None), 1e-3, RECURSION),
    Case("lion", lambda: optax.lion(1e-3)),
    _biased("nadam", lambda: optax.nadam(1e-2)),
    _biased("nadamw", lambda: optax.nadamw(1e-2)),
    Case("noisy_sgd", lambda: optax.noisy_sgd(1e-2, key=0)),
    Case("novograd", lambda: optax.novograd(1e-2, weight_decay=1e-2), NORM_BOUND, NORMS),
    _biased("optimistic_adam_v2", lambda: optax.optimistic_adam_v2(1e-2)),
    Case("optimistic_gradient_descent", lambda: optax.optimistic_gradient_descent(1e-2)),
    Case("polyak_sgd", optax.polyak_sgd, NORM_BOUND, NORMS, ("value",)),
    _biased("radam", lambda: optax.radam(1e-2)),
    Case("rmsprop", lambda: optax.rmsprop(1e-2, momentum=0.9, nesterov=True)),
    Case("rmsprop_centered", lambda: optax.rmsprop(1e-2, centered=True), 1e-5, QUOTIENT),
    Case("rprop", lambda: optax.rprop(1e-2)),
    Case("sgd", lambda: optax.sgd(1e-2, momentum=0.9)),
    Case("sign_sgd", lambda: optax.sign_sgd(1e-3)),
    Case("signum", lambda: optax.signum(1e-3)),
    Case("sm3", lambda: optax.sm3(1e-2), 1e-5, QUOTIENT, params=no_scalars),
    _biased("yogi", lambda: optax.yogi(1e-2)),
)

CONTRIB = (
    _biased("acprop", lambda: contrib.acprop(1e-2)),
    _biased("ademamix", lambda: contrib.ademamix(1e-2, weight_decay=1e-2)),
    _biased("simplified_ademamix", lambda: contrib.simplified_ademamix(1e-2)),
    Case("adopt", lambda: contrib.adopt(1e-2)),
    Case("cocob", lambda: contrib.cocob(alpha=10.0), 1e-5, DIFFERENCE),
    Case("dadapt_adamw", lambda: contrib.dadapt_adamw(weight_decay=1e-2), NORM_BOUND, NORMS),
    Case("dog", lambda: contrib.dog(init_step=("heuristic", 1e-2)), NORM_BOUND, NORMS),
    Case("dowg", lambda: contrib.dowg(init_estim_sq_dist=1e-2), NORM_BOUND, NORMS),
    Case("galore", lambda: contrib.galore(1e-2, rank=4), 5e-4, SVD),
    Case("madgrad", lambda: contrib.madgrad(1e-1), 5e-5, DIFFERENCE),
    Case("mechanize", lambda: contrib.mechanize(optax.adamw(1.0), s_init=0.1), 5e-5, DIFFERENCE),
    Case("momo", lambda: contrib.momo(1e-1), NORM_BOUND, NORMS, ("value",)),
    Case("momo_adam", lambda: contrib.momo_adam(1e-2), NORM_BOUND, NORMS, ("value",)),
    Case("muon", lambda: contrib.muon(1e-2), 3e-5, NEWTON_SCHULZ),
    Case("prodigy", lambda: contrib.prodigy(weight_decay=1e-2), NORM_BOUND, NORMS),
    _biased(
        "reduce_on_plateau",
        lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=1)),
        extra=("value",),
    ),
    Case("sam", _sam, 1e-4, DIFFERENCE),
    Case("sam_opaque", partial(_sam, opaque_mode=True), NORM_BOUND, NORMS, ("grad_fn",)),
    Case("schedule_free", lambda: contrib.schedule_free(optax.sgd(0.1), 0.1), 1e-4, DIFFERENCE),
    Case("schedule_free_adamw", lambda: contrib.schedule_free_adamw(1e-1), 1e-4, DIFFERENCE),
    Case("schedule_free_sgd", lambda: contrib.schedule_free_sgd(1e-1), 1e-4, DIFFERENCE),
    Case("sophia", _sophia, extra=("obj_fn",)),
    _biased(
        "split_real_and_imaginary",
        lambda: contrib.split_real_and_imaginary(optax.adam(1e-2)),
        params=complex_params,
    ),
)

COMPOSITIONS = (
    Case(
        "adaptive_grad_clip",
        lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
        NORM_BOUND,
        NORMS,
    ),
    _biased("apply_every", lambda: optax.chain(optax.adam(1e-2), optax.apply_every(2))),
    _biased("apply_if_finite", lambda: optax.apply_if_finite(optax.adamw(1e-2), 3)),
    Case("backtracking", _backtracking, NORM_BOUND, NORMS, LINESEARCH),
    Case(
        "chain",
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(_schedule())),
        NORM_BOUND,
        NORMS,
    ),
    _biased("conditionally_mask", lambda: optax.conditionally_mask(optax.adam(1e-2), _even)),
    _biased(
        "conditionally_transform", lambda: optax.conditionally_transform(optax.adam(1e-2), _even)
    ),
    Case(
        "distance_over_gradients",
        lambda: optax.chain(optax.scale_by_distance_over_gradients(1e-2), optax.scale(-1.0)),
        NORM_BOUND,
        NORMS,
        params=no_scalars,  # its update of a scalar has one dim
    ),
    _biased("ema", lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9))),
    Case(
        "flatten",
        lambda: optax.flatten(optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))),
        NORM_BOUND,
        NORMS,
    ),
    _biased("freeze", lambda: optax.chain(optax.adam(1e-2), optax.freeze(MATRICES))),
    _biased(
        "inject_hyperparams", lambda: optax.inject_hyperparams(optax.adamw)(_schedule(), b1=0.8)
    ),
    Case(
        "lookahead",
        lambda: optax.adamw(1e-2),
        5e-5,
        DIFFERENCE,
        params=optax.LookaheadParams.init_synced,
        around=partial(optax.lookahead, sync_period=2, slow_step_size=0.5),
    ),
    _biased(
        "masked",
        lambda: optax.chain(
            optax.masked(optax.adam(1e-2), _ndim_mask), optax.masked(optax.ema(0.9), MATRICES)
        ),
    ),
    _biased(
        "multi_steps",
        lambda: _multi_steps(optax.adamw(1e-2), should_skip_update_fn=optax.skip_not_finite),
    ),
    _biased("multi_transform_by_tree", lambda: optax.multi_transform(_groups(), LABELS)),
    _biased("multi_transform_by_callable", lambda: optax.multi_transform(_groups(), _ndim_labels)),
    _biased(
        "named_chain",
        lambda: optax.named_chain(("clip", optax.clip(1e-2)), ("adam", optax.adam(1e-2))),
    ),
    Case("nested", _nested, NORM_BOUND, NORMS),
    _biased(
        "selective_transform",
        lambda: optax.selective_transform(optax.adam(1e-2), freeze_mask=MATRICES),
    ),
    _biased("snapshot", lambda: optax.chain(optax.adam(1e-2), optax.snapshot("kept", lambda u: u))),
    Case("stateless", _stateless, NORM_BOUND, NORMS),
)

UNSUPPORTED = (
    Case(
        "lookahead_inside",
        lambda: optax.lookahead(optax.adamw(1e-2), 2, 0.5),
        params=optax.LookaheadParams.init_synced,
        unsupported="its parameters are a pair, its gradients are not: "
        "write optax.lookahead(sharded(tx, layout), ...)",
    ),
    Case(
        "differentially_private_aggregate",
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, key=0),
        unsupported="it takes one gradient per example, [B, ...], which no parameter's layout fits",
    ),
    Case(
        "measure_with_ema",
        lambda: optax.measure_with_ema(optax.tree.norm, 0.9),
        unsupported="it returns a measurement instead of updates: it only works inside monitor",
    ),
    Case(
        "monitor",
        lambda: optax.monitor({"norm": optax.measure_with_ema(optax.tree.norm, 0.9)}),
        unsupported="its state has another structure after the first update than after init",
    ),
)

TABLE = OPTIMIZERS + CONTRIB + COMPOSITIONS + UNSUPPORTED
