"""Run the ways of a stage in turn, and write what was found; see benchmarks/peers.

All processes of a group live at the same time and wait while another way does its steps, so that a
round compares what ran within seconds. `ddp` and `zerojax0` are in every group.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import report
from work import MARK

JSON = ROOT / "benchmarks/peers.json"
#: What partitions the same, by stage.
GROUPS = {
    "0": ["jit0"],
    "1": ["zerojax1", "jit1", "zero1", "deepspeed1"],
    "2": ["zerojax2", "jit2", "fsdp2-kept", "deepspeed2"],
    "3": ["zerojax3", "jit3", "fsdp2", "deepspeed3"],
}
EVERYWHERE = ["ddp", "zerojax0"]
#: Large pages for large temporaries: XLA allocates those of a step anew each time.
ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "JAX_PLATFORMS": "cpu",
    "NPROC": "1",  # threads of XLA; torch's OMP_NUM_THREADS
    "PYTHONPATH": str(ROOT),
}
FIRST = 5  #: steps before the rounds; their losses are compared
Measured = dict[str, Any]


class Processes:
    """The processes of one way, which wait for orders."""

    def __init__(self, way: str, count: int, precision: str, logs: Path) -> None:
        is_jax = way.startswith(("zerojax", "jit"))
        python = sys.executable if is_jax else ROOT / ".venv-peers/bin/python"
        program = ROOT / "benchmarks" / ("jax_ways.py" if is_jax else "torch_ways.py")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.logs = [logs / f"{way}.{rank}.txt" for rank in range(count)]
        self.started = [
            subprocess.Popen(
                list(map(str, (python, program, way, rank, count, port, precision))),
                env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log.open("w"),
                text=True,
                start_new_session=True,
            )
            for rank, log in enumerate(self.logs)
        ]

    def do(self, steps: int) -> list[Measured]:
        """Do some steps, and return what each process found."""
        for one in self.started:
            assert one.stdin is not None
            one.stdin.write(f"{steps}\n")
            one.stdin.flush()
        return [self._result(rank) for rank in range(len(self.started))]

    def _result(self, rank: int) -> Measured:
        for line in self.started[rank].stdout or ():
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"process {rank} ended: {self.logs[rank].read_text()[-2000:]}")

    def hurry(self, nice: int) -> None:
        """Set the priority of the processes: Linux shares the cores between sessions."""
        for one in self.started:
            Path(f"/proc/{one.pid}/autogroup").write_text(str(nice))

    def end(self) -> None:
        for one in self.started:
            one.kill()
            one.wait()


@contextlib.contextmanager
def living(
    ways: Sequence[str], count: int, precision: str
) -> Iterator[tuple[dict[str, Processes], Measured]]:
    """Start ways one after the other; give them, and what their first steps found."""
    alive: dict[str, Processes] = {}
    found: Measured = {}
    with tempfile.TemporaryDirectory() as logs:
        try:
            for way in ways:
                alive[way] = Processes(way, count, precision, Path(logs))
                try:
                    found[way] = begun(alive[way].do(FIRST))
                    print(f"  {way}: first step after {found[way]['first']:.1f} s", flush=True)
                except RuntimeError as error:
                    print(f"  {way} failed: {error}", flush=True)
                    alive.pop(way).end()
            yield alive, found
        finally:
            for processes in alive.values():
                processes.end()


def begun(ranks: list[Measured]) -> Measured:
    """Summarize the first steps of a way: losses are means over processes."""
    losses = [statistics.mean(each) for each in zip(*(r["loss"] for r in ranks), strict=True)]
    held = {kind: max(r["held"][kind] for r in ranks) for kind in ranks[0]["held"]}
    return {
        "losses": losses,
        "first": max(r["first"] for r in ranks),
        "held": held,
        "peak_first": max(r["peak"] for r in ranks),
        "rounds": [],
    }


def measured(ranks: list[Measured]) -> Measured:
    """Summarize a round; its first step, which warms caches up, is left out."""
    return {
        "wall": max(statistics.median(r["wall"][1:]) for r in ranks),
        "cpu": statistics.mean(statistics.median(r["cpu"][1:]) for r in ranks),
        "wire": statistics.median(ranks[0]["wire"][1:]),
        "peak": max(r["peak"] for r in ranks),
    }


def compare(ways: Sequence[str], count: int, precision: str, args: argparse.Namespace) -> Measured:
    """Return what each way of a group took, in rounds that alternate, of all starts together."""
    every: Measured = {}
    for _ in range(args.starts):
        with living(ways, count, precision) as (alive, found):
            for processes in alive.values() if args.nice else ():
                processes.hurry(args.nice)
            for number in range(args.rounds):
                for way in sorted(alive, key=list(ways).index, reverse=bool(number % 2)):
                    found[way]["rounds"].append(measured(alive[way].do(1 + args.steps)))
        for way, one in found.items():
            one["rounds"] = every.get(way, {"rounds": []})["rounds"] + one["rounds"]
        every |= found
    return every


def about() -> Measured:
    """Describe machine and versions, as docs/benchmarks.md asks."""
    commit = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    names = ("jax", "jaxlib")
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    cpu = next(x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x)
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "commit": subprocess.run(
            commit, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{cpu.split(': ')[1]}, {os.cpu_count()} cores",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions, "torch 2.13.0"]),
    }


def main() -> None:
    """Run what was asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--starts", type=int, default=1, help="each with its rounds, of new processes"
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of a way in a round")
    parser.add_argument("--processes", type=int, nargs="+", default=[2])
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16"])
    parser.add_argument(
        "--nice", type=int, default=0, help="of the rounds, where others compute: -15, as root"
    )
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--write", action="store_true", help="run nothing, write page and plot")
    args = parser.parse_args()
    recorded = json.loads(JSON.read_text()) if JSON.exists() else {}
    runs = [(count, precision) for count in args.processes for precision in args.precision]
    for count, precision in [] if args.write else runs:
        load = f"{os.getloadavg()[0]:.1f} before"
        run = {"about": about() | {"starts": args.starts}, "groups": {}}
        for group in args.groups:
            print(f"{count} processes, {precision}, stage {group}", flush=True)
            ways = [*EVERYWHERE, *GROUPS[group]]
            run["groups"][group] = compare(ways, count, precision, args)
        load += f" and {os.getloadavg()[0]:.1f} after"
        run["about"]["load"] = f"{load}, rounds at nice {args.nice}" if args.nice else load
        recorded[f"{count} processes, {precision}"] = run
        JSON.write_text(json.dumps(recorded, indent=1) + "\n")
    for text in report.write(recorded):
        print(text)


if __name__ == "__main__":
    main()
