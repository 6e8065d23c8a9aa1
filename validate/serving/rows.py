"""The published prefills of serving engines, each with the scenario by which it is predicted."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from calibrate.prefills.fit import PrefillCase
from calibrate.prefills.rows import PrefillRow
from kvrsim.builder import make_scenario
from kvrsim.compile import for_strategy
from kvrsim.engine import SHORT_TOKENS, Engine
from kvrsim.kernels.profile import CalibrationProfile, load_profile
from kvrsim.strategies import get_strategy
from planner.candidates import partition_of
from planner.uncertainty.intervals import interval

PATH = Path(__file__).parents[1] / "data" / "serving_prefills.csv"
_PROFILES = {"a100": "a100-flash", "a800": "a100-flash", "h100": "h100-flash", "h800": "h100-flash"}
_OPERATORS = ("ring-flash-attention",)  # attention alone, not whole prefills


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingRow:
    """One published prefill."""

    engine: str  # name of the engine's record
    model: str
    cluster: str
    num_gpus: int
    strategy: str
    context_len: int  # tokens of each prompt
    batch: int  # prompts
    dtype: str
    ttft_s: float
    left_out: str  # the rule by which it is not compared; empty: it is
    source: str

    @property
    def tokens(self) -> int:
        """Of all prompts together."""
        return self.context_len * self.batch

    @property
    def setting(self) -> str:
        """What the row shares with others of its engine but for the prompts."""
        return f"{self.model} {self.strategy} on {self.num_gpus} of {self.cluster}"

    @property
    def case(self) -> str:
        """The row in words."""
        gpus = f"{self.num_gpus} GPU{'s' * (self.num_gpus > 1)} of {self.cluster}"
        batch = f" x {self.batch}" if self.batch > 1 else ""
        return f"{self.model} {self.context_len}{batch} {self.strategy} on {gpus}"

    @property
    def profile(self) -> CalibrationProfile:
        """Of the row's GPU."""
        return _profile(_PROFILES[self.cluster.partition("-")[0]])


def read_rows(*, compared: bool = True) -> tuple[ServingRow, ...]:
    """All rows of whole prefills, or those that no rule leaves out."""
    with PATH.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(line for line in file if not line.startswith("#"))
        rows = [
            ServingRow(
                engine=fields["engine_name"],
                model=fields["model"],
                cluster=fields["cluster"],
                num_gpus=int(fields["num_gpus"]),
                strategy=fields["strategy"],
                context_len=int(fields["context_len"]),
                batch=int(fields["batch"]),
                dtype=fields["dtype"],
                ttft_s=float(fields["seconds"]),
                left_out=fields["left_out"],
                source=fields["source"],
            )
            for fields in lines
            if fields["engine_name"] not in _OPERATORS
        ]
    return tuple(row for row in rows if not (compared and row.left_out))


def case_of(row: ServingRow, engine: Engine) -> PrefillCase:
    """The row with its scenario under an engine."""
    scenario, _ = make_scenario(
        ctx=row.context_len,
        gpus=row.num_gpus,
        model=row.model,
        profile=row.profile,
        cluster=row.cluster,
        batch=row.batch,
        dtype=row.dtype,
        engine=engine,
    )
    strategy = get_strategy(row.strategy)
    placed = for_strategy(scenario, strategy)
    asked = PrefillRow(
        ttft_s=row.ttft_s,
        where=str(PATH),
        model=row.model,
        num_gpus=row.num_gpus,
        strategy=row.strategy,
        context_len=row.context_len,
        batch=row.batch,
    )
    return PrefillCase(row=asked, scenario=placed, strategy=strategy, partition=partition_of(placed, strategy))


@cache
def _profile(name: str) -> CalibrationProfile:
    return load_profile(name)


# -- how far predictions under an engine are from published prefills, with their intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingError:
    """One prefill beside its prediction."""

    row: ServingRow
    predicted_s: float
    low_s: float  # of the 80 % prediction interval
    high_s: float

    @property
    def rel_error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_s / self.row.ttft_s - 1

    @property
    def inside(self) -> bool:
        """Whether the interval holds the measurement."""
        return self.low_s <= self.row.ttft_s <= self.high_s

    @property
    def is_short(self) -> bool:
        """Whether most of the time may be what the engine adds."""
        return self.row.tokens < SHORT_TOKENS


def errors_of(rows: Sequence[ServingRow], engine: Engine) -> list[ServingError]:
    """Every row predicted under one engine."""
    found = []
    for row in rows:
        case = case_of(row, engine)
        predicted_s = case.ttft_s()
        sure = interval(case.scenario, case.strategy, case.partition, predicted_s)
        found.append(ServingError(row=row, predicted_s=predicted_s, low_s=sure.low_s, high_s=sure.high_s))
    return found
