"""Tokens of text: found in files, or made by a tokenizer, and split into training and held out."""

import dataclasses
import glob
import hashlib
import os
import sysconfig
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
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
        ValueError: the file can't be read; in `encode`, it has no tokens for some text.
    """

    def __init__(self, path: StrPath | None = None) -> None:
        self._inner: Any = None
        self._path, self.vocab_size, self.reads_bytes = path, 256, path is None
        if path is None:
            return
        with extra("tokenizers", "a tokenizer"):
            import tokenizers
        try:
            self._inner = tokenizers.Tokenizer.from_file(os.fspath(path))
        except Exception as error:  # which is all that the package raises
            told = f"can't read the tokenizer {os.fspath(path)}: {error}; give a tokenizer.json"
            raise ValueError(told) from error
        self.vocab_size = 1 + max(self._inner.get_vocab().values(), default=-1)
        if not self.vocab_size:
            raise ValueError(f"the tokenizer {os.fspath(path)} has no tokens; give one that has")
        self._inner.no_truncation()  # a file may say how a model's inputs are cut and filled up
        self._inner.no_padding()

    def encode(self, contents: Sequence[bytes]) -> np.ndarray:
        """Return the tokens of texts, one after the other, in the least integers that hold them."""
        if self.reads_bytes:
            return np.frombuffer(b"".join(contents), np.uint8)
        texts = [content.decode(errors="replace") for content in contents]
        try:
            found = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # which is all that the package raises
            told = f"the tokenizer {self._path!s} can't encode the text: {error}; give one that has"
            raise ValueError(f"{told} tokens for all text, or one for what is unknown") from error
        dtype = np.min_scalar_type(self.vocab_size - 1)
        return np.concatenate([np.empty(0, dtype), *(np.asarray(x.ids, dtype) for x in found)])

    def num_bytes(self, tokens: np.ndarray) -> int:
        if self.reads_bytes:
            return tokens.size
        return len(self._inner.decode(tokens.tolist(), skip_special_tokens=False).encode())


# Left out of the default corpus: what pip installed, tests, and tables rather than programs.
_LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "idlelib"),
    *("lib2to3", "pydoc_data", "turtledemo"),
)
_DEFAULT_MAX_BYTES = 8_000_000
_HELD_OUT = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Hold tokens: `train` and `held_out`, [n], which share no position of any file."""

    source: str
    num_files: int
    train: np.ndarray
    held_out: np.ndarray


def standard_library_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(path for path in _walk(root, leave_out=_LEFT_OUT) if path.suffix == ".py")


def find_files(inputs: Iterable[StrPath]) -> list[Path]:
    """List the files that the inputs (files, folders, globs) name, sorted, each once.

    A folder gives the text files below it: no hidden ones, none with a NUL byte. An input that
    names no file is a ValueError.
    """
    found: set[Path] = set()
    for given in inputs:
        text = os.fspath(given)  # "" would be the current folder
        path = Path(text).expanduser()
        # pathlib's glob takes no absolute pattern, and its ** finds no files before Python 3.13.
        matches = [path] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207
        files = [file for match in matches if text for file in _files_in(Path(match))]
        if not files:
            told = f"no text at {text!r}: give an existing file, a folder that holds text"
            raise ValueError(f"{told}, or a glob that matches some")
        found.update(file.resolve() for file in files)
    return sorted(found)


def _files_in(path: Path) -> list[Path]:
    if path.is_dir():  # of text no byte is 0
        return [x for x in _walk(path) if x.is_file() and np.fromfile(x, np.uint8, 8192).all()]
    return [path] if path.is_file() else []


def _walk(root: Path, leave_out: Container[str] = ()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        hidden = (".", "__pycache__")
        folders[:] = [f for f in folders if not (f.startswith(hidden) or f in leave_out)]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def load_corpus(
    inputs: Sequence[StrPath] = (), *, context: int, tokenizer: Tokenizer | None = None
) -> Corpus:
    """Read the inputs, by default Python's standard library, as tokens, and hold a part out.

    Files are put in the order of a digest of their contents, equal files once, and the last 5% of
    all tokens are held out: a fair sample that depends on the files alone. The default corpus stops
    at 8 MB. All of it is held in memory, unless it is one `.npy` file of tokens, which is mapped:
    it may be larger than memory. Each part gets at least a window of `context` + 1 tokens. Inputs
    are files, folders and globs; without a tokenizer, tokens are the bytes of text.

    Raises:
        ValueError: data is missing, unreadable, empty or too short; one line, with the remedy.
    """
    if isinstance(inputs, str | os.PathLike):
        raise ValueError(f"inputs is one path, {os.fspath(inputs)!r}; give a list of paths")
    if context < 1:
        raise ValueError(f"context is {context}; give at least 1")
    source = ", ".join(os.fspath(given) for given in inputs)
    source = source or f"the standard library of Python {sysconfig.get_python_version()}"
    if len(inputs) > 1 and any(os.fspath(given).endswith(".npy") for given in inputs):
        raise ValueError(f"{source}: a .npy file of tokens is all the data; give it alone, or text")
    tokenizer = tokenizer or Tokenizer()
    try:
        if source.endswith(".npy") and len(inputs) == 1:
            tokens, num_files = _mapped(source, tokenizer), 1
        else:
            files = find_files(inputs) if inputs else standard_library_files()
            contents = _read(files, None if inputs else _DEFAULT_MAX_BYTES)
            tokens, num_files = tokenizer.encode(contents), len(contents)
    except OSError as error:
        told = f"can't read {error.filename or source}: {error.strerror}"
        raise ValueError(f"{told}; give files that can be read") from error
    if not tokens.size:
        raise ValueError(f"no text in {source}; give files with text")
    least = context + 1
    num_held_out = max(round(tokens.size * _HELD_OUT), least)
    if tokens.size - num_held_out < least:
        raise ValueError(
            f"{source}: {tokens.size} tokens are too short; training and held-out text need "
            f"{least} each for a window of context {context}; give more text or a smaller context"
        )
    train, rest = np.split(tokens, [tokens.size - num_held_out])
    return Corpus(source=source, num_files=num_files, train=train, held_out=rest)


def _mapped(path: str, tokenizer: Tokenizer) -> np.ndarray:
    try:  # numpy.load would read an archive, a .npz, too
        tokens = np.lib.format.open_memmap(Path(path).expanduser(), mode="r")
    except OSError:
        raise
    except Exception as error:  # a header may bring any: tokenize's, overflows
        raise ValueError(f"{path} is no .npy file of tokens; write one with numpy.save") from error
    kind = tokens.dtype.str[1:] if tokenizer.reads_bytes else tokens.dtype.kind
    if tokens.ndim != 1 or kind not in ("u1", "u", "i"):
        wanted = "bytes, or the tokenizer with its tokens" if tokenizer.reads_bytes else "integers"
        raise ValueError(f"{path} holds {tokens.dtype}{list(tokens.shape)}; give {wanted}, [n]")
    return tokens


def _read(files: Iterable[Path], most: int | None) -> list[bytes]:
    """Read the files, equal ones once, in the order of their digests, up to so many bytes."""
    contents = (path.read_bytes() for path in files)
    by_digest = {hashlib.sha256(content).digest(): content for content in contents}
    kept, left = [], sum(map(len, by_digest.values())) if most is None else most
    for _, content in sorted(by_digest.items()):
        if content := content[:left]:
            kept.append(content)
            left -= len(content)
    return kept
