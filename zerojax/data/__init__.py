"""Read text as tokens and hand it out in batches: a held-out part, a resumable iterator."""

from ._batches import BatchIterator, make_batches
from ._corpus import Corpus, Tokenizer, load_corpus

__all__ = ["BatchIterator", "Corpus", "Tokenizer", "load_corpus", "make_batches"]
