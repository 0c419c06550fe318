"""`Bar`: what a plan, a report or a description holds on one device, to be drawn."""

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from zerojax._display import decimal, duration
from zerojax.audit import AuditReport
from zerojax.layout import Description
from zerojax.planner import Plan

#: Where gradients take the buffers of weights that are done, they are not told from activations.
TOGETHER = "gradients and activations, partly in weights' buffers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of parts, one on top of the other.

    Attributes:
        parts: bytes, or elements per parameter, by name.
        label: what stands above it; empty for the size of its parts.
        theory: the height of a dashed line; None for none.
        fits: False writes the label in red.
    """

    parts: Mapping[str, float]
    label: str = ""
    theory: float | None = None
    fits: bool = True

    @property
    def top(self) -> float:
        """The height of all parts together, or of the line where that is higher."""
        return max(sum(self.parts.values()), self.theory or 0)

    def within(self, available: float) -> "Bar":
        """Return the same bar, which fits only where its parts do."""
        fits = self.fits and sum(self.parts.values()) <= available
        return dataclasses.replace(self, fits=fits)


#: Kinds of model states, from the bottom of a bar on.
KINDS = ("parameters", "masters", "optimizer", "gradients")
#: What has bytes by kind.
Holding: TypeAlias = Plan | AuditReport | Description | Bar


def bytes_of(held: Holding) -> Bar:
    """Return the bytes of one device by kind, up to its peak, of what is `held`.

    Raises:
        TypeError: it is no plan, audit report or description.
    """
    if isinstance(held, Bar):
        return held
    if isinstance(held, Description):
        parts = {kind: held.bytes[kind] for kind in KINDS}
        return _bar(parts, held.theory["total"])
    if isinstance(held, AuditReport):
        memory = held.memory
        parts = {name: getattr(memory, name) for name in ("parameters", "masters", "optimizer")}
        parts["gradients kept"] = memory.gradients
        parts["batch and the rest"] = memory.batch + memory.other + memory.outputs
        parts["gradients, activations"] = memory.temporaries
        return _bar(parts, memory.theory["total"])
    if not isinstance(held, Plan):
        raise TypeError(
            f"a plan, an audit report or a description is drawn, got {type(held).__name__}; of a "
            "layout, layout.describe(tx)"
        )
    size = held.bytes
    parts = {"parameters": size.parameters, "masters": size.masters}
    parts["optimizer"] = size.optimizer - size.masters
    if size.total < size.states:
        parts[TOGETHER] = size.total - sum(parts.values())
    else:
        parts |= {"gradients": size.gradients, "activations and buffers": size.activations}
    return _bar(parts, size.theory, host=size.host, fits=held.fits)


def _bar(parts: Mapping[str, float], theory: float, *, host: int = 0, fits: bool = True) -> Bar:
    label = f"{decimal(sum(parts.values()))}\nhost {decimal(host)}" if host else ""
    return Bar(parts=parts, label=label, theory=theory, fits=fits)


def volume_of(held: Holding) -> Bar | None:
    """Return what a device moves in a step by mesh axis; None where that is not known."""
    if isinstance(held, Plan):
        parts = {f"along {' x '.join(axes)}": moved for axes, moved in held.volume_by_axes.items()}
        return Bar(parts=parts, label=f"{held.volume:.3f}\n≥ {duration(held.step_time)}")
    if isinstance(held, AuditReport):
        by_axis = held.volume_by_axis
        parts = {f"along {axes}": moved.seen for axes, moved in by_axis.items()}
        theory = sum(moved.theory or 0 for moved in by_axis.values())
        return Bar(parts=parts, label=f"{sum(parts.values()):.3f}", theory=theory)
    return None
