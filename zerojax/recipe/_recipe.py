"""`Recipe`: how a step is computed, decided once as plain data."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, get_args

from zerojax._arguments import as_amount, as_count, as_given
from zerojax._types import Kind
from zerojax.recipe import _policies

#: When gradients are summed over devices: once a step, or once a microbatch.
Reduce = Literal["once", "each"]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """Choose how a step is computed; the layout says where its tensors live.

    Names are replaced by their policies, so that equal recipes compare equal:
    `Recipe(precision="bf16").precision` is a `Precision`.

    >>> recipe = zerojax.Recipe(precision="bf16", accumulate=4, clip_norm=1.0)
    >>> step = zerojax.make_train_step(loss_fn, optax.adamw(1e-3), layout, recipe)

    Attributes:
        precision: a `Precision`, or "fp32", "bf16", "fp16" (with fp32 masters; fp16 scales losses).
        accumulate: microbatches per step, whose losses and gradients are averaged.
        reduce: "each" sums every microbatch's gradients over devices into a partitioned
            accumulator, which is stage 2's memory; the loss sees the whole microbatch. "once" sums
            over devices once per step, from an accumulator that is whole on each device; the loss
            sees one device's examples at a time. So it must be a mean over examples, which is
            checked, and can't constrain shardings over the batch axes. None is "once" at stages 0
            and 1 with several microbatches, else "each".
        clip_norm: largest global norm of the gradients, as the metric `grad_norm` counts it.
        skip_nonfinite: whether a step whose gradients' norm is not finite leaves parameters,
            optimizer state and the model's state as they were; with a loss scale that is always so.
        remat: what the backward pass of each layer computes again, keeps, partitions or offloads:
            "none", "dots", "full" or a `RematPolicy`; None is what the model does by itself.
        offload: whether optimizer states and masters live in the host's memory and are updated
            there: gradients go down and new parameters come up, 4 bytes a parameter with bf16. The
            host computes every element for itself, as Adam, Lion and SGD do; other optimizers are
            refused. `param_norm` is then that of the parameters as the loss reads them.
        bucket_bytes: most bytes that the compiler combines into one collective (the paper's
            constant-size buffers, section 6.2). None is the compiler's limit, and a smaller one at
            stage 3 on GPUs, which would gather several layers at once. Between processes on CPUs it
            bounds the weights that are gathered in one message, 30 MiB by default, and those kept
            for the backward pass. Larger ones are fewer and take more memory.
        prefetch: the part, 0 to 1, of the next layer's weights that stage 3 gathers while a layer
            computes, forward and backward: of its bytes in the order of use, and the first large
            weight at least. 0 leaves it to the compiler. Layers are the iterations of a scan, or
            what stands below a number in paths (`blocks/0/...`), or else the largest leaf. None is
            half a layer on GPUs and TPUs, and nothing on CPUs.
        reshard_after_forward: whether stage 3 gives gathered weights up after the forward pass and
            gathers them again for the backward pass. False keeps them until the backward pass has
            used them: each microbatch moves 2 Psi (N-1)/N elements instead of 3, and while it runs
            a device holds all parameters as the loss reads them, as at stage 2 (2 Psi bytes in
            bf16). Slow links and memory to spare are what it is for.

    Raises:
        ValueError: a choice that can't be meant, with what is expected.

    Source: arXiv 1910.02054, sections 3.1, 6 and 7; ZeRO-Offload, arXiv 2101.06840, section 3;
    `reshard_after_forward` is named after that of PyTorch's `fully_shard` (FSDP2).
    """

    precision: _policies.Precision
    accumulate: int
    reduce: Reduce | None
    clip_norm: float | None
    skip_nonfinite: bool
    remat: _policies.RematPolicy | None
    offload: bool
    bucket_bytes: int | None
    prefetch: float | None
    reshard_after_forward: bool

    def __init__(
        self,
        *,
        precision: _policies.Precision | str = "fp32",
        accumulate: int = 1,
        reduce: Reduce | None = None,
        clip_norm: float | None = None,
        skip_nonfinite: bool = False,
        remat: _policies.RematPolicy | _policies.Remat | None = None,
        offload: bool = False,
        bucket_bytes: int | None = None,
        prefetch: float | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        if reduce not in (None, *get_args(Reduce)):
            raise ValueError(f"reduce must be 'once', 'each' or None, got {reduce!r}")
        if clip_norm is not None:
            clip_norm = as_amount("clip_norm", clip_norm, above_zero=True)
        if bucket_bytes is not None:
            bucket_bytes = as_count("bucket_bytes", bucket_bytes)
        if prefetch is not None:
            prefetch = as_amount("prefetch", prefetch)
            if prefetch > 1:
                raise ValueError(f"prefetch is a part of a layer, from 0 to 1, got {prefetch!r}")
        vars(self).update(  # past `frozen`
            precision=_policies.as_precision(precision),
            accumulate=as_count("accumulate", accumulate),
            reduce=reduce,
            clip_norm=clip_norm,
            skip_nonfinite=skip_nonfinite,
            remat=_policies.as_remat(remat),
            offload=offload,
            bucket_bytes=bucket_bytes,
            prefetch=prefetch,
            reshard_after_forward=reshard_after_forward,
        )
        for name in ("skip_nonfinite", "offload", "reshard_after_forward"):
            if not isinstance(given := getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {given!r}")

    def __repr__(self) -> str:
        """Write what is not left to its default: `Recipe(precision='bf16', accumulate=2)`."""
        default, names = Recipe(), {policy: name for name, policy in _policies.PRECISIONS.items()}
        chosen = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        chosen = {name: x for name, x in chosen.items() if x != getattr(default, name)}
        if "precision" in chosen:
            chosen["precision"] = names.get(self.precision, self.precision)
        return f"Recipe({', '.join(f'{name}={x!r}' for name, x in chosen.items())})"

    def reduction(self, kinds: Collection[Kind]) -> Reduce:
        """Return when gradients are summed over devices, where these kinds are partitioned.

        The default is "once" for several microbatches where gradients stay whole (stages 0 and 1),
        else "each". `kinds` are `Layout.kinds`, here and below; a ValueError refuses a choice that
        is for other stages.
        """
        if self.reduce == "once" and "parameter" in kinds:
            raise ValueError(
                "reduce='once' needs a whole gradient on each device, and stage 3 never holds one; "
                "use reduce='each', or stage 1 or 2"
            )
        if self.reduce is None:
            return "once" if self.accumulate > 1 and "gradient" not in kinds else "each"
        return self.reduce

    def gather_dtype(self, kinds: Collection[Kind]) -> Any:
        """Return the one-byte dtype of gathers, or None; set below stage 3, a ValueError."""
        if (dtype := self.precision.gather) is not None:
            told = f"Precision(gather={dtype.name!r}) is of weights that are gathered for the loss"
            _check_gathered(told, kinds)
        return dtype

    def keeps_gathered(self, kinds: Collection[Kind]) -> bool:
        """Return whether gathered weights are kept for later; below stage 3 a ValueError if so."""
        if not self.reshard_after_forward:
            told = "reshard_after_forward=False keeps what the forward pass has gathered of weights"
            _check_gathered(told, kinds)
        return not self.reshard_after_forward

    def lookahead(self, kinds: Collection[Kind], platform: str) -> float:
        """Return how much of the next layer is gathered while one computes.

        Where parameters are partitioned by default half a layer, which costs less time and memory
        than a whole one (docs/benchmarks.md); on a CPU, where all wait, nothing. A
        ValueError where they are not, and `prefetch` is set.
        """
        if self.prefetch:
            told = f"prefetch={self.prefetch} is of weights that are gathered layer by layer"
            _check_gathered(told, kinds)
        default = 0 if "parameter" not in kinds or platform == "cpu" else 0.5
        return default if self.prefetch is None else self.prefetch

    def fits(self, kinds: Collection[Kind]) -> bool:
        """Return whether none of the choices above is refused where these kinds are partitioned."""
        if "parameter" in kinds:
            return self.reduce != "once"
        return self.reshard_after_forward and not self.prefetch and self.precision.gather is None

    @property
    def skips(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self.skip_nonfinite or self.precision.loss_scale is not None

    @property
    def accumulator(self) -> Any:
        """The dtype of the running sum of gradients over microbatches; None is their own."""
        return self.precision.reduce or (self.precision.master if self.accumulate > 1 else None)

    def to_dict(self) -> dict[str, Any]:
        """Return the choices as JSON values."""
        return dataclasses.asdict(self) | {"precision": self.precision.to_dict()}


def _check_gathered(told: str, kinds: Collection[Kind]) -> None:
    if "parameter" not in kinds:
        remedy = "and here each device has them whole; use stage 3, or leave it out"
        raise ValueError(f"{told}, {remedy}")


def as_recipe(recipe: Recipe | None) -> Recipe:
    """Return the recipe, or the default for None; refuse anything else."""
    return as_given(Recipe, recipe, "zerojax.Recipe(precision='bf16', accumulate=4)", Recipe())
