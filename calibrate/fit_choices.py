"""FitChoices and Label: what a fit is told besides the rows, and what its profile says of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from calibrate.fit_attention import HeldOut
from calibrate.gemm_rows import Shape
from calibrate.measurement import Measurement
from kvrsim.profile import SendStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class FitChoices:
    """What a fit cannot see in the rows."""

    attention_kernel: str | None = None  # a preset of calibrate.flash_presets, or "eager"; None: by name, then nearest
    head_dim: int | None = None  # that attention is fitted to; None: 128 where it was measured, else the most frequent
    fused: bool = True  # whether norm, rotary embedding and activation are one kernel each; never in measured layers
    sends: SendStyle = "overlap"  # whether messages hold the compute streams
    keep_shapes: Collection[Shape] | None = None  # that keep a table; None: all, or of many the models'
    held_out: HeldOut | None = None  # attention calls to compare with
    hidden_size: tuple[int, int] | None = None  # that the profile stands for; None: what was measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """What a profile says of itself."""

    name: str
    description: str | None = None  # None: the devices measured
    not_covered: str = ""  # what the rows lack is added
    provenance: Mapping[str, str] | None = None  # more than the rows say


def provenance_of(rows: Sequence[Measurement]) -> dict[str, str]:
    """What measured rows say of where they come from."""
    kernels = {row.kernel for row in rows if row.operation == "attention"}
    listed = {
        "source": {row.source for row in rows},
        "devices": {row.device for row in rows},
        "attention kernels": kernels,
        "dtypes": {row.dtype for row in rows if row.dtype is not None},
    }
    return {name: "; ".join(sorted(values)) for name, values in listed.items() if values}
