"""Compile a step of a GPT with 1.008e12 parameters for 1,024 TPUs, on a laptop, and audit it.

    scripts/trillion                     # makes an environment with the compilers first
    scripts/trillion --parameters 1e13   # ten trillion on 6,144 TPUs, 24 of them a model replica
    python scripts/trillion.py           # in your own environment, after pip install '.[aot]'

128 layers of width 25,600, vocabulary 50,304, context 2,048, one example per chip, layers
rematerialised, bf16 parameters with fp32 masters and Adam, ZeRO stage 3 on v5p:8x8x16. Ten trillion
are 87 layers of width 98,304 on v5p:16x16x24, one example per model replica.
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

#: Where they are compiled for, layers, width, and devices along the model axis.
MODELS = {"1e12": ("v5p:8x8x16", 128, 25_600, 1), "1e13": ("v5p:16x16x24", 87, 98_304, 24)}
TX = optax.adamw(1e-4)
PREFETCH = 0.3  #: of a layer: the weights of its queries, keys and values
GIB = 2**30


def main() -> None:
    """Compile, audit and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", default="1e12", choices=MODELS)
    parser.add_argument("--topology", help="other devices")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--prefetch", type=float, default=PREFETCH,
                        help="how much of the next layer is gathered ahead")  # fmt: skip
    args = parser.parse_args()
    topology, layers, width, parts = MODELS[args.parameters]
    topology, width = args.topology or topology, args.width or width
    config = gpt.Config(
        num_layers=args.layers or layers, width=width, num_heads=width // 128,
        vocab_size=50_304, context=2_048, model_axis="model" if parts > 1 else None,
    )  # fmt: skip
    console = Console()
    console = Console(width=max(console.width, 110))  # its tables are wide
    num_devices = parse_topology(topology).num_devices
    axes = {"data": num_devices} if parts == 1 else {"data": num_devices // parts, "model": parts}
    mesh = zerojax.topology_mesh(topology, axes)
    init = functools.partial(gpt.init, config)
    key = jax.random.key(0)
    specs = gpt.specs(config) if parts > 1 else None
    layout = zerojax.make_layout(jax.eval_shape(init, key), mesh, stage=3, specs=specs)
    recipe = zerojax.Recipe(precision="bf16", prefetch=args.prefetch)
    shape = (num_devices // parts, config.context + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=layout.batch)
    step = zerojax.make_train_step(functools.partial(gpt.loss, config), TX, layout, recipe)
    start = time.monotonic()
    with console.status(f"compiling {layout.num_params:,} parameters for {topology}"):
        compiled = step.lower(step.abstract_state(), batch).compile()
    seconds = time.monotonic() - start
    report = zerojax.audit(compiled, layout, recipe)
    console.print(report)
    if layout.torus_note:
        console.print(layout.torus_note, style="dim")
    peak, allocated = (size / GIB for size in (report.memory.peak, report.memory.allocated))
    console.print(
        f"{layout.num_params:.4g} parameters on {topology} ({num_devices} chips): traced and "
        f"compiled in {seconds:.0f} s, {report.volume:.3f} Psi moved per chip and step, peak "
        f"{peak:.1f} GiB in use per chip, {allocated:.1f} allocated"
    )
    report.raise_if_problems()


if __name__ == "__main__":
    main()
