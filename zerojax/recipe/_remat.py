"""What the backward pass computes again, keeps, partitions or fetches from the host."""

import dataclasses
from typing import Literal, get_args

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
            raise ValueError(
                f"RematPolicy: recompute must be one of {', '.join(get_args(Remat))}, got "
                f"{self.recompute!r}"
            )
        for field in ("keep", "offload"):
            names = getattr(self, field)
            is_several = isinstance(names, tuple | list)
            if not is_several or not all(isinstance(name, str) for name in names):
                raise ValueError(f"RematPolicy: {field} must be a tuple of names, got {names!r}")
            object.__setattr__(self, field, tuple(names))
        if not isinstance(self.partition, str | None):
            raise ValueError(
                f"RematPolicy: partition must name one mesh axis or be None, got {self.partition!r}"
            )
        twice = set(self.keep) & set(self.offload)
        if twice:
            raise ValueError(f"RematPolicy: both kept and offloaded: {', '.join(sorted(twice))}")
        if self.recompute == "none" and (self.keep or self.offload or self.partition):
            raise ValueError(
                "RematPolicy: recompute='none' keeps every value where it is, so that nothing can "
                "be named, offloaded or partitioned; give 'full' or 'dots'"
            )


def as_remat(policy: RematPolicy | Remat | None) -> RematPolicy | None:
    """Return the policy of a name; None leaves the model as it is."""
    if policy is None or isinstance(policy, RematPolicy):
        return policy
    if policy not in get_args(Remat):
        raise ValueError(
            f"remat must be one of {', '.join(get_args(Remat))}, a RematPolicy, or None for what "
            f"the model does by itself, got {policy!r}"
        )
    return RematPolicy(recompute=policy)
