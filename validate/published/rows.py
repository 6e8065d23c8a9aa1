"""The paper's TTFTs, row by row, as the data file cites them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

DATA = Path(__file__).parents[1] / "data"
Link = Literal["none", "300GB/s", "10GB/s", "1GB/s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One printed TTFT."""

    source: str  # which publication
    table: str  # which of its tables
    model: str
    context_len: int  # tokens
    num_gpus: int
    strategy: str  # "kvr" where the publication does not name the partition
    link: Link  # as the publication names it; "none" for one GPU
    ttft_s: float
    used_for_calibration: bool
    blind_until: str  # until this date nothing was fitted to the row or chosen by it; "": never blind
    profile: str  # calibration profile for the machine and software

    @property
    def rounding_s(self) -> float:
        """Half a unit of the last printed digit: milliseconds below 4k over NVLink, but for Llama 30B; else 10 ms."""
        fine = self.link == "300GB/s" and self.context_len < 4096 and self.model != "llama-30b"
        return 0.0005 if fine else 0.005

    def is_inside(self, low_s: float, high_s: float) -> bool:
        """Whether the printed value, allowing for its rounding, lies in an interval."""
        return low_s <= self.ttft_s + self.rounding_s and self.ttft_s - self.rounding_s <= high_s

    @property
    def case(self) -> str:
        """The row in words."""
        link = "" if self.link == "none" else f" at {self.link}"
        return (
            f"{self.model} {self.context_len} {self.strategy} on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}{link}"
        )


def read_rows() -> tuple[Row, ...]:
    """All rows that the paper prints."""
    return tuple(_row(fields) for fields in table("kv_runahead_icml2024.csv"))


def table(name: str) -> list[dict[str, str]]:
    """The rows of a file in validate/data, by column; lines that begin with # are its citations."""
    lines = [line for line in (DATA / name).read_text("utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def _row(fields: dict[str, str]) -> Row:
    link = next(known for known in get_args(Link) if known == fields["link"])
    return Row(
        source=fields["source"],
        table=fields["table"],
        model=fields["model"],
        context_len=int(fields["context_len"]),
        num_gpus=int(fields["num_gpus"]),
        strategy=fields["strategy"],
        link=link,
        ttft_s=float(fields["ttft_s"]),
        used_for_calibration=fields["used_for_calibration"] == "true",
        blind_until=fields["blind_until"],
        profile=fields.get("profile") or "a100-eager",
    )
