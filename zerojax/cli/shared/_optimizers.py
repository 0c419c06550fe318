"""The optimizers that the command line names, as optax makes them."""

import dataclasses
from collections.abc import Callable, Container
from typing import Any, Literal

import jax
import optax

import zerojax
from zerojax._types import PyTree

#: Width of the model that the base rates were chosen for.
BASE_WIDTH = 128
#: Leaves that weight decay applies to; biases and norms are left alone.
DECAYED = ("embed", "positions", "kernel")


@dataclasses.dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that the command line names."""

    # from schedule and weight decay to the transformation
    make: Callable[[optax.Schedule, float], optax.GradientTransformation]
    # the learning rate that suits a model of `BASE_WIDTH`; wider ones want one that is smaller in
    # proportion (arXiv 2203.03466, table 3)
    rate: float

    def schedule(self, rate: float | None, warmup: int, steps: int, width: int) -> Any:
        """Make the schedule: a linear warmup, then half a cosine down to a tenth of the peak.

        `rate` is the peak; None is what suits a model of that width.
        """
        if rate is None:
            rate = self.rate * BASE_WIDTH / width
        if not warmup < steps:
            raise ValueError(
                f"--warmup {warmup} leaves none of --steps {steps}; give a smaller warmup"
            )
        return optax.warmup_cosine_decay_schedule(
            init_value=rate / (warmup + 1),  # not 0, which would waste the first step
            peak_value=rate,
            warmup_steps=warmup,
            decay_steps=steps,
            end_value=rate / 10,
        )

    def unscheduled(self, width: int) -> optax.GradientTransformation:
        """Make one for a step that is planned or compiled, where the rates change no byte."""
        return self.make(self.schedule(None, 100, 1000, width), 0.1)


def _decayed(params: PyTree, names: Container[str] = DECAYED) -> PyTree:
    """Mark the leaves whose last key is one of the names; a lone leaf has none."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: bool(path) and path[-1].key in names, params
    )


def _adamw(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return optax.adamw(rate, b2=0.98, weight_decay=decay, mask=_decayed)


def _adamw_8bit(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    return zerojax.quantized(_adamw(rate, decay))


def _adafactor(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    # optax adds adafactor's decay after the learning rate, so it would not follow the schedule.
    return optax.chain(
        optax.adafactor(learning_rate=None, multiply_by_parameter_scale=False),
        optax.add_decayed_weights(-decay, mask=_decayed),
        optax.scale_by_schedule(rate),
    )


def _muon(rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    # The last two dims of kernels are orthogonalised as one matrix per layer.
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
    return optax.contrib.muon(
        rate,
        weight_decay=decay,
        weight_decay_mask=_decayed,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(
            lambda is_kernel: matrix if is_kernel else None, _decayed(params, ("kernel",))
        ),
        consistent_rms=0.2,  # updates as large as Adam's, so that one rate suits both of its halves
    )


Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "muon"]
OPTIMIZERS: dict[Optimizer, NamedOptimizer] = {
    "adamw": NamedOptimizer(_adamw, 3e-3),
    "adamw_8bit": NamedOptimizer(_adamw_8bit, 3e-3),
    "adafactor": NamedOptimizer(_adafactor, 3e-3),
    "muon": NamedOptimizer(_muon, 3e-3),
}
