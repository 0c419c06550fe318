"""The compiled train step and its state."""

from zerojax.train._make import make_train_step
from zerojax.train._state import TrainState, unpad
from zerojax.train._step import TrainStep
from zerojax.train._update import first_loss_scale
