"""Hand out shuffled windows of text in batches, for one process of many, resumable to the step."""

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from zerojax._extras import extra

#: Tokens of a part.
_PART = 4096


class BatchIterator(Iterator[np.ndarray]):
    """Yield this process's rows of each batch, int32 [B / process_count, context + 1].

    `get_state` is small, fit for JSON and the same in every process; `set_state` continues from it.
    """

    def __init__(self, batches: Any, identity: dict[str, int]) -> None:
        self._batches, self._identity = batches, identity

    def __next__(self) -> np.ndarray:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator stands and what it iterates over."""
        return {**self._identity, **self._batches.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken, with any number of processes.

        Raises:
            ValueError: `state` was taken over other tokens, windows, batches or another order.
        """
        for name, ours in self._identity.items():
            if state.get(name) != ours:
                raise ValueError(
                    f"data state: {name} was {state.get(name)} and is {ours} now, so the same "
                    "batches can't follow; continue with what was used, or start from its weights"
                )
        self._batches.set_state({"next_index": state["next_index"]})


def make_batches(
    tokens: np.ndarray,
    *,
    context: int,
    batch_size: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
    num_epochs: int | None = None,
    vocab_size: int | None = None,
) -> BatchIterator:
    """Iterate over integer tokens [n] in shuffled batches; `batch_size` counts all processes' rows.

    Each epoch has its own order, fixed by the seed, and leaves out what fills no batch. At a step,
    the rows of all processes are the same windows however many processes there are.
    num_epochs=None never ends.

    Raises:
        ImportError: the extra `cli` is not installed; the message has the pip line.
        ValueError: the tokens fill no batch, the processes do not divide it, or no such process;
            from the iterator, where a token is not below `vocab_size`.
    """
    if batch_size < 1 or process_count < 1 or batch_size % process_count:
        told = f"a batch of {batch_size} rows does not split evenly over {process_count} processes;"
        raise ValueError(f"{told} give a multiple of {max(process_count, 1)}")
    if not 0 <= process_index < process_count:
        told = f"process_index is {process_index}; of {process_count} processes,"
        raise ValueError(f"{told} give 0 to {process_count - 1}")
    num_windows = max((tokens.size - 1) // context, 0) if context > 0 else 0
    num_batches = num_windows // batch_size
    if not num_batches:
        raise ValueError(
            f"{tokens.size} tokens make {num_windows} windows of context {context}, fewer than a "
            f"batch of {batch_size}; give more text, a smaller batch or a smaller context"
        )

    with extra("cli", "zerojax.data.make_batches"):
        import grain  # takes a second or two, which importing zerojax should not

    def window(index: int) -> np.ndarray:
        """Return context + 1 tokens; neighbours share one, so each is predicted once."""
        found = tokens[index * context : (index + 1) * context + 1]
        limit = vocab_size or 2**31
        if (wrong := found[(found < 0) | (found >= limit)]).size:
            told = f"the data have token {wrong[0]}, the vocabulary {limit} tokens; give"
            raise ValueError(f"{told} the tokenizer that the data were made with")
        return found.astype(np.int32)

    dataset = grain.MapDataset.range(num_windows).map(window)
    dataset = dataset.shuffle(seed)[: num_batches * batch_size]
    dataset = dataset[process_index::process_count].repeat(num_epochs)
    dataset = dataset.batch(batch_size // process_count, drop_remainder=True)
    # Threads would only take turns; without them Ctrl-C ends at once.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    seen = tokens  # of what may be larger than memory 256 parts and the end tell enough
    if isinstance(tokens, np.memmap) and tokens.size > 512 * _PART:
        rows = tokens[: tokens.size // _PART * _PART].reshape(-1, _PART)
        seen = np.append(rows[:: len(rows) // 256], tokens[-_PART:])
    digest = zlib.crc32(np.ascontiguousarray(seen).data)
    identity = {"num_tokens": tokens.size, "text_digest": digest, "context": context}
    identity |= {"batch_size": batch_size, "seed": seed}
    return BatchIterator(iter(dataset.to_iter_dataset(options)), identity)
