"""GpuSpec, a GPU as its datasheet has it, and MemoryLimit, what a prefill may use of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from kvrsim.choices import DTYPES
from kvrsim.errors import InputError
from kvrsim.io.json_text import JsonObject
from kvrsim.io.schema import Limits, fields_to_json, read
from kvrsim.units import MAX_BYTES, format_bytes

DEFAULT_MEMORY_FRACTION = 0.9  # as vLLM's gpu_memory_utilization
_UNUSED = ("l2_bytes",)  # cluster files and profiles of kvrsim 0.1 have it
Bytes = Annotated[int, Limits(least=1, most=MAX_BYTES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """A GPU as its datasheet has it."""

    name: str  # as in gpus.json
    memory_bytes: Bytes  # device memory in all, as nvidia-smi reports it
    hbm_bytes_per_s: float  # device memory bandwidth, peak
    peak_flops: tuple[tuple[str, float], ...]  # for each dtype FLOP/s of the tensor cores, dense (no sparsity)
    num_sms: Annotated[int, Limits(least=1, most=2**20)]  # streaming multiprocessors; of a CPU its threads
    source: str  # citation
    memory_source: str | None = None  # citation of memory_bytes; None: as `source`

    @classmethod
    def read(cls, data: JsonObject) -> GpuSpec:
        """As gpus.json has one; one without a source has its file as its source."""
        peaks = data.child("peak_flops")
        peaks.only(DTYPES)
        if not peaks.fields:
            raise data.error("peak_flops", f"an object with a number for one or more of {', '.join(DTYPES)}")
        return read(
            cls,
            data.without(*_UNUSED),
            source=data.text("source", data.where),
            peak_flops=tuple((dtype, peaks.number(dtype)) for dtype in DTYPES if dtype in peaks.fields),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as `read` takes them."""
        return fields_to_json(self) | {"peak_flops": dict(self.peak_flops)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """How much of a GPU's memory a prefill may use; the rest is a reserve.

    The reserve is for what is not counted byte by byte: what the driver and ECC keep, gaps in the allocator's heap,
    other processes on the GPU.
    """

    gpu_memory_bytes: int  # of one GPU in all
    memory_fraction: float  # of it that may be used, above 0 and at most 1

    def __post_init__(self) -> None:
        fraction = self.memory_fraction
        is_number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
        if not is_number or not 0 < fraction <= 1:
            raise InputError("memory_fraction", fraction, "a number above 0 and at most 1, such as 0.9")

    @property
    def nbytes(self) -> int:
        """Bytes that may be used."""
        return int(self.gpu_memory_bytes * self.memory_fraction)

    def describe(self) -> str:
        """For people: "limit 72.0 GiB a GPU, 0.9 of its 80.0 GiB"."""
        total = format_bytes(self.gpu_memory_bytes)
        return f"limit {format_bytes(self.nbytes)} a GPU, {self.memory_fraction:g} of its {total}"

    def to_dict(self) -> dict[str, int | float]:
        """Plain JSON values."""
        return fields_to_json(self) | {"memory_limit_bytes": self.nbytes}
