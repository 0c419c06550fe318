"""What a model reads text as: bytes, or the tokens of a tokenizer's file."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from zerojax._extras import extra

StrPath = str | os.PathLike[str]


class Tokenizer:
    """Turn text into tokens; without a file they are its bytes.

    Args:
        path: a tokenizer.json, as the package `tokenizers` and Hugging Face's models have it.

    Attributes:
        vocab_size: the number of tokens, one more than the largest.
        reads_bytes: whether tokens are bytes.

    Raises:
        ValueError: the file can't be read.
    """

    def __init__(self, path: StrPath | None = None) -> None:
        self._inner: Any = None
        self.vocab_size, self.reads_bytes = 256, path is None
        if path is None:
            return
        with extra("tokenizers", "a tokenizer"):
            import tokenizers
        try:
            self._inner = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # which is all that the package raises
            raise ValueError(
                f"can't read the tokenizer {os.fspath(path)}: {error}; give a tokenizer.json"
            ) from error
        self.vocab_size = 1 + max(self._inner.get_vocab().values())

    def encode(self, contents: Sequence[bytes]) -> np.ndarray:
        """Return the tokens of texts, one after the other, in the least integers that hold them."""
        if self.reads_bytes:
            return np.frombuffer(b"".join(contents), np.uint8)
        texts = [content.decode(errors="replace") for content in contents]
        found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        dtype = np.min_scalar_type(self.vocab_size - 1)
        return np.concatenate([np.asarray(one.ids, dtype) for one in found])

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Count the bytes of the text that tokens stand for."""
        if self.reads_bytes:
            return tokens.size
        return len(self._inner.decode(tokens.tolist(), skip_special_tokens=False).encode())
