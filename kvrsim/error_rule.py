"""The rule for the error of a predicted TTFT: standard deviations of its logarithm from shares of TTFT.

The values are in data/error_rule.json. `python -m calibrate.engines` fits them to measured prefills whose model type
was left out of the fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated

from kvrsim.io.schema import JsonObject, Keys, RelativeError, Share, Whole, read, write_json
from kvrsim.layout import LAYOUT_KINDS

FILE = Path(__file__).parent / "data" / "error_rule.json"
OTHER_ENGINE = "other"  # key of `engine` for the engines without a value of their own
KERNEL_KINDS = ("dense", "mixture")

_Layouts = Annotated[Mapping[str, RelativeError], Keys(tuple(LAYOUT_KINDS))]
_Kernels = Annotated[Mapping[str, RelativeError], Keys(KERNEL_KINDS)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftShares:
    """What the rule needs to know of a prediction."""

    engine: str  # name of the engine's record, without a version
    engine_share: float  # share of TTFT that the engine adds to kernels and links
    is_mixture: bool  # whether the model has routed experts
    is_sibling: bool  # whether the kernels' rates are scaled from another GPU
    is_unknown_engine: bool  # whether no prefill of the engine was measured
    is_short: bool  # whether all prompts together have less than SHORT_TOKENS tokens
    new_layouts: Sequence[str] = ()  # ways, of LAYOUT_KINDS, to divide a prefill that no measured prefill has


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorScores:
    """How the intervals of the rule fared on measured prefills that were left out of all fits."""

    num_rows: Whole
    coverage: Share  # share of the prefills inside their 80 % intervals
    interval_score: RelativeError  # mean of width + 10 x miss, of log TTFT


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorRule:
    """Standard deviations of the logarithm of TTFT, one for each cause."""

    floor: RelativeError  # of every TTFT: runs, clocks, and what no other cause explains
    engine: Mapping[str, RelativeError]  # of the seconds that an engine adds, by engine
    unknown_engine: RelativeError  # of the same seconds, in addition, if the engine was not measured
    kernels: _Kernels  # of the seconds of kernels and links
    sibling: RelativeError  # of the same seconds, in addition, on a GPU whose rates are scaled from another GPU
    short: RelativeError  # of TTFT below SHORT_TOKENS tokens, where the front end of the engine takes most of the time
    layouts: _Layouts  # of TTFT, for each way to divide a prefill over GPUs that no measured prefill has
    calibrated: RelativeError  # of every TTFT after `kvrsim calibrate prefills` with `calibrated_rows` prefills
    calibrated_rows: Whole
    scores: Mapping[str, ErrorScores] = field(default_factory=dict)  # by the group of prefills; "all": all of them
    provenance: Mapping[str, str] = field(default_factory=dict)  # by field: rows, method, or why it was set by hand

    def log_sds(self, shares: TtftShares) -> dict[str, float]:
        """The standard deviation of log TTFT from each cause; the causes are independent."""
        kernels_share = 1 - shares.engine_share
        causes = {
            "engine": self.engine.get(shares.engine, self.engine[OTHER_ENGINE]) * shares.engine_share,
            "kernels": self.kernels["mixture" if shares.is_mixture else "dense"] * kernels_share,
            "unexplained": self.floor,
        }
        if shares.is_unknown_engine:
            causes["engine, not measured"] = self.unknown_engine * shares.engine_share
        if shares.is_sibling:
            causes["GPU, not measured"] = self.sibling * kernels_share
        if shares.is_short:
            causes["short prompt"] = self.short
        for kind in shares.new_layouts:
            causes[f"{LAYOUT_KINDS[kind]}, not measured"] = self.layouts[kind]
        return causes

    def write(self, path: Path = FILE) -> None:
        """Write the rule as JSON; the file appears whole or not at all."""
        write_json(path, self)


@cache
def error_rule() -> ErrorRule:
    """The rule that ships with kvrsim."""
    return read(ErrorRule, JsonObject.read(FILE, "error rule"))
