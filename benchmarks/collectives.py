"""Time collectives of jax alone between two processes on CPUs, one of which may come late.

    python benchmarks/collectives.py     # 40 MB of fp32; rows of docs/benchmarks.md

Shows what gloo costs under XLA, without zerojax: a reduce-scatter is slow, and slows the late
process down, whose core polls for what the early one has sent.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import time

if sys.argv[1:] == ["--help"]:
    print(__doc__)
    sys.exit()
if len(sys.argv) > 1:
    os.sched_setaffinity(0, {int(sys.argv[1]) % (os.cpu_count() or 1)})

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SIZE, ROUNDS, LATE = 10_000_000, 7, 0.15
OPS = {
    "all-reduce": (lambda x: jax.lax.psum(x, "data"), P(), P()),
    "32 all-reduces": (lambda x: [jax.lax.psum(y, "data") for y in jnp.split(x, 32)], P(), P()),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), P(), P("data")),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), P("data"), P()),
    "32 all-gathers": (
        lambda x: [jax.lax.all_gather(y, "data") for y in jnp.split(x, 32)], P("data"), P(),
    ),
}  # fmt: skip


def compute(seconds: float) -> None:
    """Compute for so many seconds of this thread."""
    numbers, start = np.ones(1 << 16), time.thread_time()
    while time.thread_time() - start < seconds:
        np.sqrt(numbers)


def main(rank: int, port: int) -> None:
    """Print a row per collective on process 0: waiting included, and the CPU of the process."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    for name, (op, before, after) in OPS.items():
        shard_map = jax.shard_map(op, mesh=mesh, in_specs=before, out_specs=after, check_vma=False)
        run, sharding = jax.jit(shard_map), NamedSharding(mesh, before)
        x = jax.make_array_from_callback(
            (SIZE,), sharding, lambda index: np.ones(SIZE, np.float32)[index]
        )
        for late in (0.0, LATE):
            found = []
            for _ in range(ROUNDS):
                jax.block_until_ready(run(x))
                wall, cpu = time.perf_counter(), time.process_time()
                compute(late * rank)
                jax.block_until_ready(run(x))
                found.append((time.perf_counter() - wall, time.process_time() - cpu))
            ms = [1e3 * statistics.median(each) for each in zip(*found, strict=True)]
            if rank == 0:
                print(
                    f"{name}, other {late} s late: {ms[0]:.0f} ms, CPU {ms[1]:.0f} ms", flush=True
                )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(*map(int, sys.argv[1:]))
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        print(f"load {os.getloadavg()[0]:.1f}", flush=True)
        both = [subprocess.Popen([sys.executable, __file__, str(r), str(port)]) for r in (0, 1)]
        sys.exit(max(one.wait() for one in both))
