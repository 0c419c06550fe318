"""Programs to read: what `scripts/golden` compiled, by jax version, and small ones made here."""

from __future__ import annotations

import gzip
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = {f"{p.parent.name}/{p.name[:-7]}": p for p in sorted(GOLDEN.glob("*/*.txt.gz"))}
MLP = [name for name in FILES if "/mlp." in name and "slices" not in name]
SCAN = [name for name in FILES if "/scan." in name]
MANUAL = [name for name in FILES if "/manual." in name]
#: A collective over two devices, for the body of a program made by `wrap`.
REDUCE = "f32[8]{0} all-reduce(%v), channel_id=1, replica_groups={{0,1}}, to_apply=%add"


def text_of(name: str) -> str:
    """Return the text of a program in FILES."""
    return gzip.decompress(FILES[name].read_bytes()).decode()


def wrap(*lines: str, computations: str = "") -> str:
    """Make a program of the lines of its entry computation, and other computations as text."""
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}"
    return f"HloModule test, num_partitions=2\n{computations}\n{entry}\n"
