"""What a microbatch asks of a device, where there is no loss to trace.

A description of a transformer goes by Megatron-LM's formulas; bare shapes and a number of tokens by
what matrices keep; without tokens nothing is counted, which is said.
"""

from __future__ import annotations

import math

from zerojax._tree import num_elements
from zerojax.planner._demand import Conditions, Demand
from zerojax.planner.formulas import ActivationBytes, Transformer
from zerojax.planner.traced import Peak, Work
from zerojax.recipe import Remat


class DescribedGpt(Demand):
    """A GPT by its numbers, with Megatron-LM's formulas (arXiv 2205.05198).

    Args:
        gpt: the numbers.
        remat: what is computed again.
        num_tokens: tokens of a sequence.
        is_implied: whether all that was given is the number of parameters.
    """

    def __init__(self, gpt: Transformer, remat: Remat, num_tokens: int, is_implied: bool) -> None:
        which = f"a GPT of {gpt.num_layers} x {gpt.width}"
        which += " that the number of parameters implies" if is_implied else ""
        source = f"Megatron-LM's formulas for {which}, remat={remat!r}"
        super().__init__("sequence", source, remat)
        self.gpt, self.num_tokens = gpt, num_tokens
        self.again: Remat = remat

    def _peak(self, given: Conditions, count: float) -> Peak:
        """Add checkpoints, and one layer or the logits, to parameters and gradients."""
        one = self._activations(given)
        kept = count * (one.kept + 2 * one.host / self.gpt.num_layers)  # two layers stay here
        ends = self.gpt.vocab_size * self.gpt.width
        beside = {
            "a layer's gradient": count * one.working + self._buffers(given, self.gpt.layer_params),
            "the logits": count * one.logits + self._buffers(given, ends),
        }
        at = max(beside, key=lambda name: beside[name])
        alive = (("activation checkpoints", kept), (at, beside[at]))
        return Peak(given.held + kept + beside[at], at, alive)

    def _checkpoints(self, given: Conditions, count: float) -> float:
        return count * self._activations(given).host

    def _work(self, given: Conditions, count: float) -> Work:
        """Count products by the formula; weights are read three times, activations twice."""
        each = self.gpt.flops_per_token(num_tokens=self.num_tokens, remat=self.again)
        flops = count * self.num_tokens * each / given.sharing.model_axis
        one = self._activations(given)
        two_layers = 2 * one.host / self.gpt.num_layers
        again = 1 if self.again == "full" else 0
        moved = 2 * (one.kept + two_layers + one.host + one.logits)
        moved += 2 * (1 + again) * self.gpt.num_layers * one.working
        return given.work(flops, (3 + again) * given.gathered + count * moved)

    def _model_elements(self, given: Conditions, count: float) -> float:
        """Count 12 b*s*h a layer: six all-reduces, each of twice b*s*h.

        Two in the forward pass, two where it is recomputed, two in the backward pass. Source: ZeRO,
        section 8.
        """
        return 12 * count * self.num_tokens * self.gpt.width * self.gpt.num_layers

    def _activations(self, given: Conditions) -> ActivationBytes:
        """Count those of one sequence."""
        return self.gpt.activation_bytes(
            1,
            num_tokens=self.num_tokens,
            remat=self.again,
            model_axis=given.sharing.model_axis,
            partitioned=given.sharing.partitions,
            offloaded=given.sharing.offloads,
        )

    def _buffers(self, given: Conditions, elements: int) -> float:
        """Count gathered weights, this part's and the next one's, and one whole gradient."""
        part = given.gathered * min(1.0, elements / max(given.layout.num_params, 1))
        return _gathered_and_gradient(given, part)


class Matrices(Demand):
    """Bare shapes: each matrix keeps its input and its output for every token.

    Args:
        recomputes: whether it keeps its input alone.
        item_bytes: bytes of an activation's element.
    """

    def __init__(self, *, recomputes: bool, item_bytes: int) -> None:
        kept = "its input" if recomputes else "its input and its output"
        source = f"the shapes alone: each matrix keeps {kept} for every token"
        super().__init__("token", source, "full" if recomputes else "none")
        self.recomputes, self.item_bytes = recomputes, item_bytes

    def _peak(self, given: Conditions, count: float) -> Peak:
        """Add what matrices keep, two layers of it where the rest is on the host, to the states."""
        pairs = zip(given.leaves, given.layout.leaves, strict=True)
        layers = ((leaf, num_elements(x.shape[: x.stacked])) for leaf, x in pairs)
        largest = max((leaf.gathered / max(number, 1) for leaf, number in layers), default=0.0)
        beside = _gathered_and_gradient(given, largest)
        kept = self._checkpoints(given, count)
        if given.sharing.offloads:
            stacks = (num_elements(x.shape[:-2]) for x in given.layout.leaves)
            kept *= min(1.0, 2 / max(stacks, default=1))
        alive = (("activations", kept), ("gathered weights and a gradient", beside))
        return Peak(given.held + kept + beside, "a layer's gradient", alive)

    def _checkpoints(self, given: Conditions, count: float) -> float:
        """Count rows, or rows and columns, of all matrices."""
        elements = 0
        for leaf in given.layout.leaves:
            if len(leaf.shape) >= 2:
                *layers, rows, columns = leaf.shape
                kept = rows if self.recomputes else rows + columns
                elements += math.prod(layers) * kept
        cut = given.sharing.model_axis if given.sharing.partitions or not self.recomputes else 1
        return count * elements * self.item_bytes / cut

    def _work(self, given: Conditions, count: float) -> Work:
        """Count 6 FLOPs per weight and token, 8 with recomputation."""
        weights = sum(num_elements(x.shape) for x in given.layout.leaves if len(x.shape) >= 2)
        flops = (8 if self.recomputes else 6) * weights * count / given.sharing.model_axis
        read = (4 if self.recomputes else 3) * given.gathered
        return given.work(flops, read + 2 * self._checkpoints(given, count))

    def _model_elements(self, given: Conditions, count: float) -> float:
        """Count an all-reduce of every other matrix's output, three times: forward, again, back."""
        matrices = (x.shape for x in given.layout.leaves if len(x.shape) >= 2)
        return 3 * count * sum(num_elements(shape[:-2]) * shape[-1] for shape in matrices)


class Unknown(Demand):
    """No tokens: parameters and gradients are all that is counted."""

    def __init__(self) -> None:
        source = (
            "nothing: activations and products are not counted; give loss_fn and batch, a "
            "transformer, or tokens_per_device"
        )
        super().__init__("token", source, None)

    def _peak(self, given: Conditions, count: float) -> Peak:
        return Peak(given.held, "model states alone", ())

    def _checkpoints(self, given: Conditions, count: float) -> float:
        return 0.0

    def _work(self, given: Conditions, count: float) -> Work:
        """Read every weight three times, as one token would."""
        return given.work(0.0, 3 * given.gathered)

    def _model_elements(self, given: Conditions, count: float) -> float:
        return 0.0


def _gathered_and_gradient(given: Conditions, part: float) -> float:
    """Count two gathered parts of the weights, this one and the next, and one whole gradient."""
    gathered = 2 * part if any(leaf.is_gathered for leaf in given.leaves) else 0.0
    return gathered + (part if given.layout.partitions("optimizer") else 0.0)
