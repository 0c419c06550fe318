"""Compile a step of a GPT with 1.008e12 parameters for 1,024 TPUs, on a laptop, and audit it.

    scripts/trillion                # makes an environment with the compilers first
    python scripts/trillion.py      # in an environment of your own, after pip install '.[aot]'

128 layers of width 25,600, vocabulary 50,304, context 2,048, one example per chip, layers
rematerialised, bf16 parameters with fp32 masters and Adam, ZeRO stage 3 on v5p:8x8x16.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import zerojax
from zerojax.aot import parse_topology
from zerojax.models import gpt

RECIPE = zerojax.Recipe(precision="bf16")
TX = optax.adamw(1e-4)
GIB = 2**30


def main() -> None:
    """Compile, audit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="v5p:8x8x16", help="1,024 devices or others")
    parser.add_argument("--layers", type=int, default=128)
    parser.add_argument("--width", type=int, default=25_600)
    args = parser.parse_args()
    config = gpt.Config(
        num_layers=args.layers, width=args.width, num_heads=args.width // 128,
        vocab_size=50_304, context=2_048,
    )  # fmt: skip
    console = Console()
    console = Console(width=max(console.width, 110))  # its tables are wide
    num_devices = parse_topology(args.topology).num_devices
    mesh = zerojax.topology_mesh(args.topology, {"data": num_devices})
    init = functools.partial(gpt.init, config)
    key = jax.random.key(0)
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=3)
    shape = (num_devices, config.context + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    step = zerojax.make_train_step(functools.partial(gpt.loss, config), TX, layout, RECIPE)
    start = time.monotonic()
    with console.status(f"compiling {layout.num_params:,} parameters for {args.topology}"):
        compiled = step.lower(step.abstract_state(), batch).compile()
    seconds = time.monotonic() - start
    report = zerojax.audit(compiled, layout, RECIPE)
    console.print(report)
    if layout.torus_note:
        console.print(layout.torus_note, style="dim")
    console.print(
        f"{layout.num_params:.4g} parameters on {args.topology} ({num_devices} chips): traced and "
        f"compiled in {seconds:.0f} s, {report.volume:.3f} Psi moved per chip and step, peak "
        f"{report.memory.peak / GIB:.1f} GiB per chip"
    )
    report.raise_if_problems()


if __name__ == "__main__":
    main()
