"""What every way trains: the same sizes, first weights and tokens; and how a process is measured.

Needs numpy alone, so that processes of jax and of torch share it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEED, LEARNING_RATE, WEIGHT_DECAY, EPS = 0, 3e-4, 0.01, 1e-8
#: What a line of results begins with, among what libraries print.
MARK = "RESULT "


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT with a tied head, and the examples of each process."""

    layers: int = 6
    width: int = 320
    heads: int = 5
    vocab: int = 8192
    tokens: int = 256
    batch: int = 2


def weights(size: Size) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each parameter by name, in the order in which they are drawn.

    Matrices are normal with a scale of 0.02, [outputs, inputs]; norms begin as one, biases as zero.
    """
    draw, d = np.random.default_rng(SEED), size.width
    shapes = {"wte": (size.vocab, d), "wpe": (size.tokens, d)}
    for n in range(size.layers):
        shapes |= {f"blocks.{n}.ln1": (d,), f"blocks.{n}.ln2": (d,)}
        shapes |= {f"blocks.{n}.qkv": (3 * d, d), f"blocks.{n}.proj": (d, d)}
        shapes |= {f"blocks.{n}.fc": (4 * d, d), f"blocks.{n}.out": (d, 4 * d)}
    for name, shape in (shapes | {"lnf": (d,)}).items():
        if len(shape) == 1:
            yield f"{name}.weight", np.ones(shape, np.float32)
        else:
            normal = draw.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
            yield f"{name}.weight", normal
        if name not in ("wte", "wpe"):
            yield f"{name}.bias", np.zeros(shape[0], np.float32)


def examples(size: Size, step: int, rank: int) -> np.ndarray:
    """Return the tokens [B, T + 1] of one process at a step."""
    draw = np.random.default_rng([SEED, step, rank])
    return draw.integers(0, size.vocab, (size.batch, size.tokens + 1))


def serve(
    rank: int,
    size: Size,
    start: float,
    step: Callable[[np.ndarray], float],
    held: Callable[[], dict[str, int]],
) -> None:
    """Do as many steps as each line of standard input asks for, and print what they took.

    Args:
        rank: of this process.
        size: of the model.
        start: when the process began to import, of `time.perf_counter`.
        step: does one, and returns its loss when everything is done.
        held: returns the bytes of model states by kind, between two steps.
    """
    number, first = 0, None
    for line in sys.stdin:
        found: dict[str, Any] = {"loss": [], "wall": [], "cpu": [], "wire": []}
        for _ in range(int(line)):
            batch = examples(size, number, rank)
            wire, cpu, wall = _sent(), _cpu(), time.perf_counter()
            found["loss"].append(step(batch))
            found["wall"].append(time.perf_counter() - wall)
            found["cpu"].append(_cpu() - cpu)
            found["wire"].append(_sent() - wire)
            first = first or time.perf_counter() - start
            number += 1
        found |= {"first": first, "peak": _peak(), "held": held()}
        print(MARK + json.dumps(found), flush=True)
        # From here on the peak is that of steps, without what compilation has left in free lists.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def _cpu() -> float:
    """Return the seconds that all threads of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _sent() -> int:
    """Return the bytes that were sent on the loopback interface, by all processes."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def _peak() -> int:
    """Return the largest resident set since it was last reset, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
