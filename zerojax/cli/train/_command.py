"""`zerojax train`: prepare, train, show."""

from __future__ import annotations

from zerojax.cli.shared._command import command
from zerojax.cli.shared._errors import refusing
from zerojax.cli.train._loop import train_and_write
from zerojax.cli.train._options import TrainOptions
from zerojax.cli.train._run import TrainRun, take_up
from zerojax.cli.train._screen import TrainScreen


@command
def train(options: TrainOptions) -> None:
    """Train a GPT on the bytes of text under a ZeRO stage.

    Shows the bytes that one device holds of each kind, beside the theory and beside plain data
    parallelism; trains; evaluates on held-out text; writes metrics.jsonl and training.png to the
    folder `--out`; ends with a sample of what the model writes. Ctrl-C finishes the step and
    writes what there is.

    Without an accelerator the devices are virtual ones on the CPU: they hold, compute and exchange
    what real ones would.

    Examples: the tiny model on Python's standard library; everything partitioned, with the reason
    for each leaf; the paper's configuration C4, with each layer shared by two devices; text of
    one's own, with checkpoints; and going on from them, also on another number of devices.

    ```
    zerojax train
    zerojax train --stage 3 --precision bf16 --layout
    zerojax train --config C4 --model-axis 2
    zerojax train --data 'books/*.txt' --steps 2000 --save-every 500 --out runs/books
    zerojax train --resume --steps 4000 --out runs/books
    ```
    """
    screen = TrainScreen()
    with refusing():
        run = TrainRun(*take_up(options))
    train_and_write(run, screen)
