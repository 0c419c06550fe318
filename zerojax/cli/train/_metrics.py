"""metrics.jsonl: one line per step and per evaluation, also read back for the plot."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Metrics:
    """The metrics of a run, in memory and on disk; a line is on disk when `add` returns.

    Args:
        path: the file.
        first_step: lines up to this step are kept, as a resumed run needs; others are dropped.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.lines = _read(path, first_step)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(map(_as_json, self.lines)))
        partial.replace(path)
        self._file = path.open("a")

    def add(self, **values: Any) -> None:
        """Add one line."""
        self.lines.append(values)
        self._file.write(_as_json(values))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of the lines that have a metric."""
        found = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]


def _as_json(values: dict[str, Any]) -> str:
    """Write a line; numbers that JSON does not know become null."""
    known = {
        name: None if isinstance(x, float) and not math.isfinite(x) else x
        for name, x in values.items()
    }
    return json.dumps(known) + "\n"


def _read(path: Path, first_step: int) -> list[dict[str, Any]]:
    """Read the lines up to a step; a last line that a crash cut short is dropped."""
    if not first_step or not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if isinstance(line, dict) and line.get("step", math.inf) <= first_step:
            lines.append(line)
    return lines
