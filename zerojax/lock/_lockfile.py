"""The lock file: records of steps by name and target, as JSON that people review."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerojax.lock._record import Leaf, Moved, StepRecord

FORMAT = 1


def read_lock(path: Path) -> dict[str, StepRecord]:
    """Read the records of a lock file, by "step @ target".

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no lock file, or one of another format.
    """
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["format"] != FORMAT:
            raise ValueError(f"format {held['format']}, and this zerojax reads {FORMAT}")
        return {name: _record(step) for name, step in held["steps"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no lock file that can be read ({error}): write it anew with --accept"
        ) from error


def _record(held: dict[str, Any]) -> StepRecord:
    leaves = {
        path: Leaf(**{**leaf, "shape": tuple(leaf["shape"])})
        for path, leaf in held["leaves"].items()
    }
    moved = {key: Moved(**one) for key, one in held["moved"].items()}
    return StepRecord(**{**held, "leaves": leaves, "moved": moved})


def write_lock(path: Path, records: Mapping[str, StepRecord]) -> None:
    """Write records in the order of their names, whole or not at all; a line per leaf."""
    steps = {name: _to_dict(records[name]) for name in sorted(records)}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(_dumps({"format": FORMAT, "steps": steps}, depth=4) + "\n")
    partial.replace(path)


def _to_dict(record: StepRecord) -> dict[str, Any]:
    held = asdict(record)
    del held["theory"]
    for one in held["moved"].values():
        del one["source"]
    return held


def _dumps(value: Any, depth: int, indent: str = "") -> str:
    """Write JSON with a line per entry down to some depth."""
    if not depth or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + "  "
    lines = (f"{inner}{json.dumps(key)}: {_dumps(x, depth - 1, inner)}" for key, x in value.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
