"""A text to train on that is the same on every machine, and how far roundings may carry results."""

from __future__ import annotations

import collections
import functools
import math
import random
from pathlib import Path

SYLLABLES = (
    "ba",
    "de",
    "fi",
    "go",
    "lu",
    "mer",
    "nis",
    "ont",
    "per",
    "qua",
    "ris",
    "sto",
    "ten",
    "ul",
)


@functools.cache
def prose(num_bytes: int) -> bytes:
    """Make text of words, sentences and lines, its words as unequally frequent as a language's.

    Python promises the values of `random()` for a seed, and of nothing else.
    """
    draw = random.Random(0).random
    words = ["".join(_one_of(SYLLABLES, draw()) for _ in range(1 + n % 3)) for n in range(500)]
    lines: list[str] = []
    size = 0
    while size < num_bytes:
        # The n-th word comes 1 / n as often as the first: Zipf's law.
        sentence = [words[int(len(words) ** draw()) - 1] for _ in range(4 + int(9 * draw()))]
        lines.append(" ".join(sentence).capitalize() + ("?\n" if draw() < 0.1 else ".\n"))
        size += len(lines[-1])
    return "".join(lines).encode()[:num_bytes]


def _one_of(choices: list[str], drawn: float) -> str:
    return choices[int(len(choices) * drawn)]


def bits_per_byte(text: bytes) -> float:
    """Count what a byte costs a model that has learnt how often each occurs, and nothing else."""
    counts = collections.Counter(text)
    return -sum(n * math.log2(n / len(text)) for n in counts.values()) / len(text)


def roundings(num_steps: int, num_summands: int) -> float:
    """Bound the relative difference of fp32 results that add the same numbers in another order.

    fp32 has 24 bits, a sum's error grows as the root of the number of its summands, and each step
    adds one such error to those of the steps before.
    """
    return num_steps * num_summands**0.5 * 2.0**-24


def save_tokenizer(path: Path, text: bytes) -> Path:
    """Write a tokenizer of 300 tokens, which are learnt from a text."""
    import tokenizers  # for few tests

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text.decode()], trainer)
    made.save(str(path))
    return path
