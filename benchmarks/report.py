"""The table and the plot of what benchmarks/peers recorded, in docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, PLOT = ROOT / "docs/benchmarks.md", ROOT / "docs/pictures/peers.png"
BEGIN, END = "<!-- written by benchmarks/peers -->\n", "<!-- end -->"
#: How far losses may lie apart.
SAME = {"fp32": 1e-5, "bf16": 1e-2}
#: How ways are called in the plot; a digit behind a name is the stage.
NAMES = {"ddp": "torch DDP", "fsdp2": "torch FSDP2", "fsdp2-kept": "torch FSDP2, weights kept"}
NAMES |= {"zero": "torch ZeRO", "jit": "jit by hand", "deepspeed": "DeepSpeed"}
Group = dict[str, Any]

CAPTION = """
**{what}**, on {machine}, load {load}; {versions}; commit {commit}, {date}. Medians of
{rounds} rounds, {starts} starts of the processes; in parentheses the least and the largest. The
first five losses of all ways lie within {far:.1e} (aim: {same:.0e}).
"""
WAYS = """way | step / ddp | s a step | CPU s a step | parameters, MB | gradients, MB
optimizer and masters, MB | peak RSS, MB | sent, MB | s to the first step"""
BESIDE = """stage | zerojax / jit by hand (aim 1.03) | zerojax / fastest peer (aim 1.0)
over its stage 0 (aim 1.10) | peak RSS / least of the peers (aim 1.0)"""


def ratios(group: Group, way: str, base: str, what: str = "wall") -> list[float]:
    """Return what a way took over what another one took in the same round."""
    pairs = zip(group[way]["rounds"], group[base]["rounds"], strict=True)
    return [mine[what] / other[what] for mine, other in pairs]


def spread(values: list[float]) -> str:
    """Write a median with the least and the largest."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def median(group: Group, way: str, what: str) -> float:
    return statistics.median(one[what] for one in group[way]["rounds"])


def mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def rows(run: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each way; those of every group are shown once."""
    shown = set()
    for group in run["groups"].values():
        for way, found in group.items():
            if way in shown:
                continue
            shown.add(way)
            held = found["held"]
            yield [
                way,
                spread(ratios(group, way, "ddp")),
                f"{median(group, way, 'wall'):.3f}",
                f"{median(group, way, 'cpu'):.3f}",
                *(mb(held[kind]) if kind in held else "" for kind in ("params", "grads", "opt")),
                mb(median(group, way, "peak")),
                mb(median(group, way, "wire")),
                f"{found['first']:.1f}",
            ]


def beside(run: dict[str, Any]) -> Iterator[list[str]]:
    """Yield, per stage, zerojax over plain jit, over the fastest peer, and over its stage 0."""
    for stage, group in run["groups"].items():
        ours, hand = f"zerojax{stage}", f"jit{stage}"
        peers = [way for way in group if not way.startswith(("zerojax", "jit"))]
        if stage != "0":
            peers.remove("ddp")
        fastest = min(peers, key=lambda way: statistics.median(ratios(group, way, ours)))
        least = min(peers, key=lambda way: median(group, way, "peak"))
        yield [
            stage,
            spread(ratios(group, ours, hand)),
            f"{spread(ratios(group, ours, fastest))}, {fastest}",
            spread(ratios(group, ours, "zerojax0")),
            f"{median(group, ours, 'peak') / median(group, least, 'peak'):.2f}, {least}",
        ]


def table(headings: str, body: Iterator[list[str]]) -> str:
    names = headings.replace("\n", " | ").split(" | ")
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *body]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def apart(run: dict[str, Any]) -> float:
    """Return how far the first losses of any two ways lie apart."""
    every = [found["losses"] for group in run["groups"].values() for found in group.values()]
    return max(max(step) - min(step) for step in zip(*every, strict=True))


def text(recorded: dict[str, Any]) -> str:
    """Write the section of all runs."""
    parts = []
    for what, run in recorded.items():
        groups = [*run["groups"].values()]
        of, rounds = run["about"], len(groups[0]["ddp"]["rounds"])
        parts += [
            CAPTION.format(what=what, rounds=rounds, far=apart(run), same=SAME[what[-4:]], **of),
            table(WAYS, rows(run)),
            table(BESIDE, beside(run)),
        ]
    return "\n".join(parts)


def replaced(page: str, section: str) -> str:
    """Return a page with a new section between the marks."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + section + END + rest.split(END, 1)[1]


def named(way: str) -> str:
    """Write a way out: "jit3" as "jit by hand, stage 3"."""
    tool, stage = (way, "") if way in NAMES else (way[:-1], f", stage {way[-1]}")
    return NAMES.get(tool, tool) + stage


def plot(recorded: dict[str, Any], path: Path) -> None:
    """Draw the step of each way over DDP's, and its peak."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), sharey=True, layout="constrained")
    run = next(iter(recorded.values()))
    found = list(rows(run))
    names, shown = [row[0] for row in found], range(len(found))
    colours = ["C0" if name.startswith("zerojax") else "0.65" for name in names]
    values: list[tuple[str, Callable[[list[str]], float]]] = [
        ("time of a step / torch DDP", lambda row: float(row[1].split()[0])),
        ("peak resident memory, MB", lambda row: float(row[7])),
    ]
    for axis, (title, value) in zip(axes, values, strict=True):
        axis.barh(shown, [value(row) for row in found], color=colours)
        axis.set_xlabel(title)
    axes[0].set_yticks(shown, [named(name) for name in names])
    axes[0].invert_yaxis()
    axes[0].axvline(1, color="black", linewidth=0.8)
    figure.suptitle(next(iter(recorded)))
    figure.savefig(path, dpi=110)


def write(recorded: dict[str, Any]) -> Iterator[str]:
    """Write page and plot, and yield what was written."""
    section = text(recorded)
    PAGE.write_text(replaced(PAGE.read_text(), section))
    plot(recorded, PLOT)
    yield section
