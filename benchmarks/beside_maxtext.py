"""Compile a model of MaxText with MaxText's own step and with zerojax's, for absent hardware.

Needs both in an environment of Python 3.12:

    pip install "maxtext[tpu]==0.2.5" ".[cli,aot]"
    python benchmarks/beside_maxtext.py h100:1x8 [--ways maxtext zerojax] [--keep FOLDER]

All ways compile the loss of MaxText's model with its optimizer and its clipping: the same layers,
dtypes, rematerialisation and tokens. `maxtext` is its `train_step` with `ici_fsdp_parallelism=8`,
`maxtext-options` the same with the compiler options that zerojax sets; `zerojax` is
`make_train_step` at stage 3, `zerojax-0` the same without a layer ahead.
"""

import argparse
import os
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"  # MaxText takes its batch of them
)

import jax
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from jax.sharding import AxisType, Mesh
from maxtext.configs import pyconfig
from maxtext.optimizers import optimizers
from maxtext.trainers.pre_train import train
from maxtext.trainers.pre_train.train_compile import get_shaped_inputs, jit_and_compile
from maxtext.utils import maxtext_utils as utils
from maxtext.utils import model_creation_utils, sharding

import zerojax
from zerojax.audit import Program, schedule_of
from zerojax.collectives import compiler_options
from zerojax.hlo import parse_collectives, parse_module, sum_moved

CONFIG = (
    "base_emb_dim=2048 base_mlp_dim=8192 base_num_query_heads=16 base_num_kv_heads=16 head_dim=128 "
    "base_num_decoder_layers=8 vocab_size=8192 max_target_length=1024 per_device_batch_size=4 "
    "dataset_type=synthetic attention=dot_product enable_checkpointing=false run_name=compare "
    "skip_jax_distributed_system=true ici_fsdp_parallelism=8 hardware="
)
WAYS = ("maxtext", "maxtext-options", "zerojax", "zerojax-0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("topology", help="v6e:2x4, h100:1x8, ...; of 8 devices")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--keep", type=Path, help="folder to write the compiled programs' text to")
    args = parser.parse_args()
    devices = list(zerojax.topology_mesh(args.topology, {"data": 8}).devices.flat)
    hardware = "tpu" if devices[0].platform == "tpu" else "gpu"
    config = initialized(hardware)
    axes = config.mesh_axes
    grid = np.asarray(utils.create_device_mesh(config, devices))
    model = Model(config, Mesh(grid, axes, (AxisType.Auto,) * len(axes)))
    print(f"{args.topology:16}volume, Psi  peak, MiB  blocking  exposed  step, ms")
    for way in args.ways:
        program = Program.of(model.compiled(way))
        if args.keep:
            path = args.keep / f"{way}-{args.topology.replace(':', '-')}.hlo"
            path.write_text(program.text)
        print(f"{way:16}{row(program, model.num_params, devices)}", flush=True)


def initialized(hardware: str, *more: str) -> Any:
    return pyconfig.initialize(["train_compile", *(CONFIG + hardware).split(), *more])


def row(program: Program, num_params: int, devices: list[Any]) -> str:
    module = parse_module(program.text)
    records = parse_collectives(module).records
    schedule = schedule_of(program, module, records, devices)
    assert schedule is not None
    return (
        f"{sum_moved(records) / num_params:11.3f}{program.peak / 2**20:11,.0f}"
        f"{schedule.blocking_share:10.1%}{schedule.exposed_share:9.1%}"
        f"{1e3 * schedule.step_seconds:10.2f}"
    )


class Model:
    """MaxText's model of a configuration, to be trained on the devices of a mesh."""

    def __init__(self, config: Any, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        _, self.model = model_creation_utils.create_nnx_abstract_model(config, mesh)
        self.graph, self.params, rest = nnx.split(self.model, nnx.Param, ...)
        self.rest = jax.tree.map(_value, rest)  # counters and keys of a dropout that is off
        pure = nnx.to_pure_dict(self.params)
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pure)
        self.num_params = sum(x.size for x in jax.tree.leaves(self.shapes))
        self.layout = zerojax.make_layout(self.shapes, mesh, stage=3, axis="fsdp")

    def compiled(self, way: str) -> jax.stages.Compiled:
        if way == "maxtext":
            return self.by_maxtext({})
        if way == "maxtext-options":
            return self.by_maxtext(compiler_options(self.layout))
        return self.by_zerojax(None if way == "zerojax" else 0)

    def by_maxtext(self, options: dict[str, Any]) -> jax.stages.Compiled:
        config = self.config
        if options:
            flags = " ".join(f"--{name}={value}" for name, value in options.items())
            config = initialized(config.hardware, f"compile_xla_flags={flags}")
        args, kwargs, placed, _, model = get_shaped_inputs(self.mesh, config)
        params, placed = sharding.maybe_update_params_sharding_with_opt(config, placed)
        batch = sharding.get_input_data_sharding(config, self.mesh)
        function, *rest = utils.get_functional_train_with_signature(
            train.train_step, batch, placed, model, config, params
        )
        rules = logical_axis_rules(config.logical_axis_rules)
        return jit_and_compile(function, args, kwargs, self.mesh, *rest, config, rules)

    def by_zerojax(self, prefetch: int | None) -> jax.stages.Compiled:
        schedule = utils.create_learning_rate_schedule(self.config)
        tx = optimizers.get_optimizer(self.config, schedule, self.model, mesh=self.mesh)
        recipe = zerojax.Recipe(
            clip_norm=self.config.gradient_clipping_threshold, prefetch=prefetch
        )
        step = zerojax.make_train_step(self.loss, tx, self.layout, recipe)
        batch = utils.get_shaped_batch(self.config, batch_sharding=self.layout.batch)
        with logical_axis_rules(self.config.logical_axis_rules):
            return step.lower(step.abstract_state(), batch).compile()

    def loss(self, values: Any, batch: Any) -> jax.Array:
        nnx.replace_by_pure_dict(self.params, values)
        model = nnx.merge(self.graph, self.params, self.rest, copy=True)
        return train.loss_fn(model, self.config, dict(batch), None, None)[0]


def _value(x: Any) -> jax.Array:
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.numpy.broadcast_to(jax.random.key(0), x.shape)
    return jax.numpy.zeros(x.shape, x.dtype)


if __name__ == "__main__":
    main()
