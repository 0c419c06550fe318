"""A GPT as five numbers: what it counts, keeps and computes, where no model is at hand to trace.

b sequences of s tokens, width h, a heads, L layers, t devices along the model axis, which cuts a
layer as Megatron-LM does: attention by heads, the feed-forward part by its 4h.

Sources: "Reducing Activation Recomputation in Large Transformer Models" arXiv 2205.05198 (bytes),
"Efficient Large-Scale Language Model Training" arXiv 2104.04473 (FLOPs).
"""

from __future__ import annotations

import dataclasses

from zerojax.planner._arguments import as_count
from zerojax.recipe import Remat, as_remat

_LOGIT_BYTES = 4 + 2  # fp32 for the loss, 16 bits out of the product


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Count the bytes of activations per device, at the most that a step needs."""

    kept: float  # what every layer keeps from the forward to the backward pass, on the device
    working: float  # what the layer whose gradient is computed has beside it
    logits: float  # in fp32 and in 16 bits
    host: float = 0.0  # what is kept in the host's memory instead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """Describe a GPT: pre-LN, a feed-forward part of 4h, learned positions, a tied head.

    Attributes:
        num_layers: L.
        width: h.
        num_heads: a; it divides the width.
        context: C, the tokens of a sequence.
        vocab_size: V.

    Raises:
        ValueError: a count is not whole and positive, or the heads do not divide the width.
    """

    num_layers: int
    width: int
    num_heads: int
    context: int = 1024
    vocab_size: int = 50257

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            # A frozen instance's own counts, 1e3 made 1000.
            count = as_count(f"Transformer: {field.name}", getattr(self, field.name))
            object.__setattr__(self, field.name, count)
        if self.width % self.num_heads:
            raise ValueError(
                f"Transformer: num_heads={self.num_heads} does not divide width={self.width}; "
                "each head takes an equal part of the width"
            )

    @property
    def num_params(self) -> int:
        """Count the parameters: L (12 h^2 + 13 h) + (V + C + 2) h; the tied head counts once."""
        ends = (self.vocab_size + self.context + 2) * self.width
        return self.num_layers * self.layer_params + ends

    @property
    def layer_params(self) -> int:
        """Count one layer's parameters: 12 h^2 + 13 h."""
        return 12 * self.width**2 + 13 * self.width

    def activation_bytes(
        self,
        batch: int,
        *,
        remat: Remat = "full",
        model_axis: int = 1,
        partitioned: bool = False,
        offloaded: bool = False,
    ) -> ActivationBytes:
        """Return the bytes of activations per device, by Megatron's formulas.

        Of b*s*h elements a layer keeps `none` (34 + 5as/h) b*s*h bytes, of which a model axis of t
        leaves 10 whole (norms, dropouts and residuals); `dots` the outputs of its products; `full`
        2, its input.

        Assumed: 16 bits and dropout as in arXiv 2205.05198, one checkpoint per layer, scores that
        are written out (no flash attention), a model axis that cuts layers and vocabulary. What JAX
        keeps of a model without remat is about twice that, norms and softmax in fp32 (the package's
        GPT: 172 bytes per b*s*h where the formula says 74); trace the model where that matters.

        Args:
            batch: b, sequences in a device's microbatch; with a model axis, in that of its group.
            remat, model_axis: what is computed again; t, devices along the model axis.
            partitioned, offloaded: Pa and +cpu: checkpoints in t parts, in the host's memory.

        Raises:
            ValueError: no such `remat`, or one without checkpoints to partition or offload.
        """
        as_remat(remat)  # refuses an unknown one
        if remat == "none" and (partitioned or offloaded):
            raise ValueError(
                "remat='none' keeps no checkpoints to partition or offload; say remat='full' or "
                "'dots'"
            )
        s, t = self.context, as_count("model_axis", model_axis)
        bsh = as_count("batch", batch) * s * self.width
        whole = bsh * (10 + (24 + 5 * self.num_heads * s / self.width) / t)
        # Under "dots", outputs of the products whose value the derivative reads: q, k, v and the
        # 4h, cut by the model axis, and the attention's, which is not.
        kept = {"none": whole, "dots": bsh * (2 + (6 + 8) / t), "full": 0.0}[remat]
        cut = t if partitioned else 1
        checkpoints = 0.0 if remat == "none" else 2 * bsh * self.num_layers / cut
        return ActivationBytes(
            kept=self.num_layers * kept + (0.0 if offloaded else checkpoints),
            working=whole - kept,
            logits=_LOGIT_BYTES * bsh / self.width * self.vocab_size / t,
            host=checkpoints if offloaded else 0.0,
        )

    def flops_per_token(self, *, remat: Remat = "none") -> float:
        """Return the FLOPs that a step computes per token: about 6 Psi + 12 L h s.

        A forward pass multiplies a token by 12 L h^2 + V h weights and by s keys and values in each
        layer (all of them: masked scores are computed too); the backward pass computes twice that.
        Recomputation adds the layers' forward pass (`full`) or its scores (`dots`). Biases, norms
        and the look-up of words count nothing, for which 6 Psi would count 0.1%.

        Source: arXiv 2104.04473, section 3 and appendix: 96 L h^2 (1 + s/6h + V/16Lh) for `full`.
        """
        as_remat(remat)  # refuses an unknown one
        weights = 2 * 12 * self.num_layers * self.width**2
        scores = 4 * self.num_layers * self.width * self.context
        again = {"none": 0, "dots": scores, "full": weights + scores}
        head = 2 * self.vocab_size * self.width
        return float(3 * (weights + scores + head) + again[remat])
