"""Policies: dtypes, the scale of an fp16 loss, and what the backward pass computes again."""

import dataclasses
import math
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp

from zerojax._arguments import as_count

#: The dtypes of one byte that weights may be gathered in.
_GATHERS = ("int8", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Scale the loss so that small gradients do not become zero in fp16.

    A step whose gradients are not finite changes nothing but the scale, which it halves; after
    `growth_interval` finite steps in a row the scale is doubled. Scales are powers of two from 1 to
    2**24, so that scaling rounds nothing. A loss that is itself in fp16 takes scales up to 2**15;
    return it in fp32.

    Attributes:
        initial: the scale of the first step.
        growth_interval: finite steps in a row after which the scale grows.

    Raises:
        ValueError: a scale that is no power of two, or an interval that is no number of steps.

    Source: arXiv 1710.03740, section 3.2, for scaling; that the scale follows what overflows is
    common practice (NVIDIA Apex, DeepSpeed).
    """

    factor: ClassVar[float] = 2.0
    smallest: ClassVar[float] = 1.0
    largest: ClassVar[float] = 2.0**24

    initial: float = 2.0**15
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        given = self.initial
        is_number = isinstance(given, int | float) and self.smallest <= given <= self.largest
        if isinstance(given, bool) or not is_number or math.frexp(given)[0] != 0.5:
            told = "DynamicLossScale.initial needs a power of two from 1 to 2**24, so that scaling"
            raise ValueError(f"{told} rounds nothing, got {given!r}; write 2.0**n")
        as_count("DynamicLossScale.growth_interval", self.growth_interval)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Choose the dtypes of mixed-precision training (arXiv 1910.02054, section 3.1).

    >>> precision = zerojax.Precision(params="bfloat16", master="float32")  # what "bf16" is
    >>> recipe = zerojax.Recipe(precision=precision)

    Attributes:
        params: dtype of the parameters that the loss reads and that gathers move; None keeps the
            dtype that the model was initialised with.
        master: dtype of the partitioned copy that the optimizer updates; None keeps no copy and
            updates the parameters themselves.
        reduce: dtype in which gradients are summed over devices; None is the gradients' own dtype.
        gather: "int8" or "float8_e4m3fn": weights that are partitioned (stage 3) are gathered for
            the loss in one byte an element and an fp32 scale per 128 of them, and decoded where
            they arrive; None gathers them as they are. A weight of a block whose largest magnitude
            is s is then off by at most s / 254 in int8, and by at most 1/16 of itself, or
            s / 458752 if it is tiny, in fp8, before it is rounded to its own dtype. Gradients are
            those at the decoded weights. Evaluation reads the weights as they are stored.
        loss_scale: how the loss is scaled, for parameters in fp16 with fp32 masters; None does not.

    Raises:
        ValueError: a dtype that is not floating; a `gather` that is none of the two.

    Source: quantised gathers are qwZ of ZeRO++, arXiv 2306.10209, section 3.1.
    """

    params: Any = None
    master: Any = None
    reduce: Any = None
    gather: Any = None
    loss_scale: DynamicLossScale | None = None

    def __post_init__(self) -> None:
        for name in ("params", "master", "reduce"):
            given = getattr(self, name)
            if given is None:
                continue
            try:
                dtype = jnp.dtype(given)
            except TypeError:
                raise ValueError(f"Precision.{name} needs a dtype or None, got {given!r}") from None
            if not jnp.issubdtype(dtype, jnp.floating):
                raise ValueError(f"Precision.{name} needs a floating dtype, got {dtype}")
            object.__setattr__(self, name, dtype)
        if self.gather is not None:
            if str(self.gather) not in _GATHERS and self.gather not in map(jnp.dtype, _GATHERS):
                told = f"Precision.gather needs one of {', '.join(_GATHERS)}, or None, got"
                raise ValueError(f"{told} {self.gather!r}")
            object.__setattr__(self, "gather", jnp.dtype(self.gather))
        if not isinstance(self.loss_scale, DynamicLossScale | None):
            raise ValueError(
                f"Precision.loss_scale needs a DynamicLossScale or None, got {self.loss_scale!r}; "
                "write Precision(loss_scale=DynamicLossScale(initial=...))"
            )

    @property
    def updated(self) -> Any:
        """The dtype of what the optimizer updates: masters or parameters; None is their own."""
        return self.params if self.master is None else self.master

    def to_dict(self) -> dict[str, Any]:
        held = dataclasses.asdict(self)
        return {name: x.name if isinstance(x, jnp.dtype) else x for name, x in held.items()}


#: What precisions are called: the paper's mixed precision is "fp16", today's is "bf16".
PRECISIONS: MappingProxyType[str, Precision] = MappingProxyType(
    {
        "fp32": Precision(),
        "bf16": Precision(params="bfloat16", master="float32"),
        "fp16": Precision(params="float16", master="float32", loss_scale=DynamicLossScale()),
    }
)


def as_precision(precision: Precision | str) -> Precision:
    found = PRECISIONS.get(precision) if isinstance(precision, str) else precision
    if not isinstance(found, Precision):
        told = f"precision must be one of {', '.join(PRECISIONS)}, or a Precision"
        raise ValueError(f"{told}, got {precision!r}")
    return found


#: What the backward pass computes again: nothing; all but products; each layer from its input.
Remat = Literal["none", "dots", "full"]
#: The name under which a policy finds a layer's input, the paper's activation checkpoint.
LAYER_INPUT = "layer_input"
#: The memory of the host that a device reads and writes by itself, as JAX names it.
HOST_MEMORY = "pinned_host"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematPolicy:
    """Choose which values of a layer its backward pass finds in memory, and which it recomputes.

    Attributes:
        recompute: "full" keeps a layer's input only; "dots" also the results of products with
            weights (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`); "none" keeps all
            that the backward pass reads.
        keep: names (`jax.ad_checkpoint.checkpoint_name`) of values that are kept as well.
        offload: names of values that are kept in the host's memory; "layer_input" is every layer's
            input (the paper's Pa+cpu).
        partition: mesh axis over which layer inputs are cut between layers, and gathered just
            before a layer is computed again (the paper's Pa).

    Raises:
        ValueError: an unknown `recompute`; a name both kept and offloaded; "none" with anything
            else, since it keeps everything where it is.

    Source: arXiv 1910.02054, section 6.1.
    """

    recompute: Remat = "full"
    keep: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    partition: str | None = None

    def __post_init__(self) -> None:
        if self.recompute not in get_args(Remat):
            told = f"a remat policy is a RematPolicy or one of {', '.join(get_args(Remat))}, got"
            raise ValueError(f"{told} {self.recompute!r}")
        for field in ("keep", "offload"):
            names = getattr(self, field)
            if not isinstance(names, tuple | list) or not all(isinstance(x, str) for x in names):
                raise ValueError(f"RematPolicy: {field} must be a tuple of names, got {names!r}")
            object.__setattr__(self, field, tuple(names))
        if not isinstance(self.partition, str | None):
            told = "RematPolicy: partition must name one mesh axis or be None, got"
            raise ValueError(f"{told} {self.partition!r}")
        if twice := set(self.keep) & set(self.offload):
            raise ValueError(f"RematPolicy: both kept and offloaded: {', '.join(sorted(twice))}")
        if self.recompute == "none" and (self.keep or self.offload or self.partition):
            raise ValueError(
                "RematPolicy: recompute='none' keeps every value where it is, so that nothing can "
                "be named, offloaded or partitioned; give 'full' or 'dots'"
            )


def as_remat(policy: RematPolicy | Remat | None) -> RematPolicy | None:
    if policy is None or isinstance(policy, RematPolicy):
        return policy
    return RematPolicy(recompute=policy)
