"""The compiled train step and its state."""

from zerojax.train._loss_scale import LossScale, first_loss_scale
from zerojax.train._state import TrainState, abstract_train_state, init_train_state, unpad
from zerojax.train._step import TrainStep, make_train_step

__all__ = [
    "LossScale",
    "TrainState",
    "TrainStep",
    "abstract_train_state",
    "first_loss_scale",
    "init_train_state",
    "make_train_step",
    "unpad",
]
