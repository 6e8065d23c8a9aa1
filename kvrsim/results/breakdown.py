"""Where the time of a prefill goes: by rank and operation, against the roofline, and how each is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvrsim.io.schema import fields_to_json

if TYPE_CHECKING:
    import pandas

Basis = Literal["measured", "interpolated", "extrapolated", "fitted", "datasheet", "simulated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BreakdownRow:
    """One kind of work, or of waiting, on one rank, all layers together."""

    rank: int
    kind: str  # an operation, such as "gemm" or "recurrence", "resume" (after communication) or "wait"
    what: str  # which matrix product or kind of recurrence, or what is waited for
    seconds: float
    share: float  # of TTFT
    roofline_share: float | None  # least seconds by the datasheet over seconds; None: no work of the device
    basis: Basis  # how the seconds are known


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """All rows of all ranks; a rank's rows sum to when it has finished."""

    ttft_s: float
    rows: tuple[BreakdownRow, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """Plain JSON values."""
        return [fields_to_json(row) for row in self.rows]

    def to_frame(self) -> pandas.DataFrame:
        """One row a rank and operation."""
        import pandas

        return pandas.DataFrame(self.to_dict())
