"""`Plan`: what a step will hold, move and take; it prints as tables."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from zerojax import _display
from zerojax._types import Axes
from zerojax.hardware import Hardware
from zerojax.planner._setting import hosts_inputs
from zerojax.planner._time import NAMES, StepTime
from zerojax.planner._workload import MODEL
from zerojax.recipe import Recipe, Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedBytes:
    """Count bytes on one device."""

    parameters: int  # as the step holds them between steps
    gradients: int  # as the stage partitions them; they live while the step runs
    optimizer: int  # optimizer states with the masters, as the paper's K counts them
    masters: int  # the masters' part of it
    total: int  # the peak of the step
    host: int  # what the host keeps for the device
    theory: int  # model states by the stage's formula, whole / N for what it partitions

    @property
    def states(self) -> int:
        """Add parameters, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def activations(self) -> int:
        """Count what the peak has beyond the model states: activations, gathered weights, buffers.

        0 where a gradient takes the buffer of a weight that is no longer needed, so that the states
        are never all there at once.
        """
        return max(self.total - self.states, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan(_display.Shown):
    """A planned training step.

    Attributes:
        stage: 0 to 3.
        num_params: Psi.
        num_devices: all devices.
        num_shards: N; fewer than the devices that the model axis leaves are hybrid sharding.
        wide_optimizer: whether gradients and optimizer states are partitioned over all of these.
        model_axis: devices of model parallelism.
        hardware: the device.
        recipe: how the step is computed.
        count: examples in a device's microbatch; 0 where there is no loss.
        bytes: of one device: `parameters`, `gradients`, `optimizer` (the `masters` in it), `total`
            (the peak), `host` (what the host keeps), `theory` (states by the stage's formula).
        volume_by_axes: elements that a device moves per step, over Psi, by mesh axes.
        flops: of products, per device and step.
        time: seconds of a step: `step` (at least); `compute`, `memory`, `fast` and `slow` links and
            `host` by themselves, the longest of which is `bound_by`; `busy` computing; `exposed`,
            the links' without work beside it; `waiting` for the host's update.
    """

    stage: int
    num_params: int
    num_devices: int
    num_shards: int
    wide_optimizer: bool
    model_axis: int
    hardware: Hardware
    recipe: Recipe
    count: int
    bytes: PlannedBytes
    volume_by_axes: dict[Axes, float]
    flops: float
    time: StepTime

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        axes = {",".join(names): moved for names, moved in self.volume_by_axes.items()}
        return dataclasses.asdict(self) | {
            "hardware": self.hardware.name,
            "recipe": self.recipe.to_dict(),
            "volume_by_axes": axes,
        }

    @property
    def remat(self) -> Remat | None:
        """What is computed again in the backward pass; None is as the model has it."""
        return self.recipe.remat and self.recipe.remat.recompute

    @property
    def offload(self) -> tuple[str, ...]:
        """What the host keeps: "activations", "optimizer" (masters go with it), both or none."""
        hosted = {"activations": hosts_inputs(self.recipe), "optimizer": self.recipe.offload}
        return tuple(name for name, is_hosted in hosted.items() if is_hosted)

    @property
    def partitions_activations(self) -> bool:
        """Whether checkpoints are cut over the model axis (Pa)."""
        return self.recipe.remat is not None and self.recipe.remat.partition is not None

    @property
    def step_time(self) -> float:
        """Seconds of a step, at least."""
        return self.time.step

    @property
    def volume(self) -> float:
        """Elements that a device moves per step, over the parameters."""
        return sum(self.volume_by_axes.values())

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory, and the rest within its host's."""
        return self.fits_within(self.hardware.memory)

    def fits_within(self, limit: float) -> bool:
        """Return whether the peak is within so many bytes, and the rest in the host's memory."""
        return self.bytes.total <= limit and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether the host has room for what it keeps for the device."""
        return self.bytes.host <= self.hardware.host_memory

    @property
    def title(self) -> str:
        what = f"ZeRO stage {self.stage}, {self.num_params:,} parameters"
        return f"{what}, {self.num_devices:,} x {self.hardware.name}, {self.ways}"

    @property
    def num_groups(self) -> int:
        """Groups of shards that hold the same."""
        return self.num_devices // (self.num_shards * self.model_axis)

    @property
    def ways(self) -> str:
        """How devices are shared out and the step is computed, in words."""
        groups = f" in each of {self.num_groups:,} groups" if self.num_groups > 1 else ""
        wide = ", optimizer states over all" if self.wide_optimizer else ""
        parts = [f"N = {self.num_shards:,}{groups}{wide}"]
        if self.model_axis > 1:
            parts.append(f"model axis {self.model_axis}")
        if self.recipe.accumulate > 1:
            parts.append(f"{self.recipe.accumulate} microbatches")
        if policy := self.recipe.remat:
            kept = f" keeping {' and '.join(policy.keep)}" if policy.keep else ""
            parts.append(f"remat={policy.recompute!r}{kept}")
        if not self.recipe.reshard_after_forward:
            parts.append("gathered weights kept")
        if self.partitions_activations:
            parts.append("checkpoints partitioned")
        if self.offload:
            parts.append(f"{' and '.join(self.offload)} on the host")
        return ", ".join(parts)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures rest on."""
        found = ["time: latency is left out; links run beside work as far as in compiled programs"]
        if not self.count:
            found.append("activations and products are not counted: give loss_fn and batch")
        if self.model_axis > 1:
            kept = "is cut too" if self.partitions_activations else "stays whole"
            found.append(
                "model parallelism cuts what lies within layers, as Megatron-LM does; what they "
                f"hand on {kept}"
            )
            if not any(MODEL in axes for axes in self.volume_by_axes):
                found.append("what model parallelism moves is not known: scan over the layers")
        if "optimizer" in self.offload:
            found.append(
                "the update waits for its traffic with the host, whose work is not counted; a step "
                "refuses to offload what mixes elements or leaves, as Muon does"
            )
        return tuple(found)

    @property
    def _summary(self) -> str:
        host = "" if self.fits_host else " the host"
        fits = "" if self.fits else f"does not fit{host}: "
        least = f"at least {_display.duration(self.step_time)} a step"
        return f"{self.title}; {fits}peak {_display.decimal(self.bytes.total)}, {least}"

    def _parts(self) -> Iterator[Text | Table]:
        yield self._bytes_table()
        yield self._time_table()
        if moved := [f"{v:.4f} along {' x '.join(k)}" for k, v in self.volume_by_axes.items()]:
            told = "moves per device and step, in elements per parameter"
            yield Text(f"{told}: {', '.join(moved)}")
        if self.count:
            yield Text(f"examples in a device's microbatch: {self.count:,}")
        yield from map(Text, self.assumptions)

    def _bytes_table(self) -> Table:
        kinds = _display.DECIMAL, _display.BINARY
        units = [_display.unit_for(self.bytes.total, units) for units in kinds]
        names = (f">{unit.name}" for unit in units)
        table = _display.make_table("one device holds", *names, ">of its memory", "")
        memory = self.hardware.memory

        def add(name: str, size: int, of: int = memory, style: str = "") -> None:
            counts = (unit.number(size) for unit in units)
            bar = _display.make_bar(size, of)
            table.add_row(name, *counts, f"{size / of:.1%}", bar, style=style)

        add("parameters", self.bytes.parameters)
        add("optimizer states and masters", self.bytes.optimizer)
        add("gradients", self.bytes.gradients)
        add("activations and buffers", self.bytes.activations)
        table.add_section()
        fits = self.bytes.total <= memory
        add("peak", self.bytes.total, style="bold green" if fits else "bold red")
        add("the device", memory)
        if self.bytes.host:
            style = "" if self.fits_host else "bold red"
            add("on the host", self.bytes.host, self.hardware.host_memory, style)
        return table

    def _time_table(self) -> Table:
        table = _display.make_table("a step", ">ms", "")
        one, tera = self.hardware, self.flops / 1e12
        work = f"{tera:,.0f}" if tera >= 100 else f"{tera:.3g}"
        rates = {
            "compute": f"{work} TFLOP at {one.flops / 1e12:,.0f} TFLOP/s",
            "memory": f"at {one.hbm_bandwidth / 1e9:,.0f} GB/s",
            "fast": f"at {one.link_bandwidth / 1e9:,.0f} GB/s",
            "slow": f"at {one.slow_bandwidth / 1e9:,.1f} GB/s a device",
            "host": f"at {one.host_bandwidth / 1e9:,.0f} GB/s",
        }
        for part, rate in rates.items():
            if seconds := getattr(self.time, part):
                style = "bold" if NAMES[part] == self.time.bound_by else ""
                table.add_row(NAMES[part], f"{1e3 * seconds:,.3f}", rate, style=style)
        table.add_section()
        table.add_row("computes", f"{1e3 * self.time.busy:,.3f}", "products and memory, in turn")
        table.add_row("waits", f"{1e3 * self.time.exposed:,.3f}", "for links, with no work beside")
        step = f"{1e3 * self.step_time:,.3f}"
        table.add_row("step", step, f"bound by {self.time.bound_by}", style="bold")
        return table
