"""TTFTs that the KV-Runahead paper prints, and those of a question."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from kvrsim.results.question import Question

DATA = Path(__file__).parent / "data" / "kv_runahead_icml2024.csv"
PaperLink = Literal["none", "300GB/s", "10GB/s", "1GB/s"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTtft:
    """One TTFT that the paper prints."""

    source: str  # name of the publication
    table: str  # table of the publication
    model: str
    context_len: int  # tokens
    num_gpus: int
    strategy: str  # name of the strategy; "kvr" where the publication does not name the partition
    link: PaperLink  # bandwidth as the publication prints it; "none" for one GPU
    ttft_s: float
    used_for_calibration: bool
    blind_until: str  # no fit or choice used the row before this date; "": rows used from the start
    profile: str  # calibration profile of the machine and software

    @property
    def rounding_s(self) -> float:
        """Half of the last printed digit: 1 ms below 4k tokens over NVLink (not for Llama 30B), otherwise 10 ms."""
        fine = self.link == "300GB/s" and self.context_len < 4096 and self.model != "llama-30b"
        return 0.0005 if fine else 0.005

    def is_inside(self, low_s: float, high_s: float) -> bool:
        """Whether the printed value, considering its rounding, lies in an interval."""
        return low_s <= self.ttft_s + self.rounding_s and self.ttft_s - self.rounding_s <= high_s

    @property
    def case(self) -> str:
        """Description of the row."""
        link = "" if self.link == "none" else f" at {self.link}"
        return (
            f"{self.model} {self.context_len} {self.strategy} on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}{link}"
        )


def read_rows() -> tuple[PublishedTtft, ...]:
    """All rows that the paper prints."""
    return tuple(_row(fields) for fields in read_table(DATA))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, by column; lines that begin with # are citations."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def _row(fields: dict[str, str]) -> PublishedTtft:
    link = next(one for one in get_args(PaperLink) if one == fields["link"])
    texts = {name: fields[name] for name in ("source", "table", "model", "strategy", "blind_until")}
    return PublishedTtft(
        **texts,
        context_len=int(fields["context_len"]),
        num_gpus=int(fields["num_gpus"]),
        link=link,
        ttft_s=float(fields["ttft_s"]),
        used_for_calibration=fields["used_for_calibration"] == "true",
        profile=fields.get("profile") or "a100-eager",
    )


def measured_in_paper(question: Question) -> dict[str, float]:
    """The TTFTs in seconds that the paper measured for a question over NVLink, by strategy; empty if it did not ask it.

    The paper's rows on slower links are left out: it does not say how its GPUs were connected there.
    """
    if (question.batch, question.cached_prefix, question.engine) != (1, 0, "none"):
        return {}
    if (question.dtype, question.attention) != ("fp16", "eager"):
        return {}
    if question.cluster.topology != "switch" or question.cluster.link.profile != question.profile:  # other links
        return {}
    if dict(question.options).get("noise") is not None:
        return {}
    return {
        row.strategy: row.ttft_s
        for row in read_rows()
        if row.link == "300GB/s"
        and (row.model, row.profile) == (question.model, question.profile)
        and (row.context_len, row.num_gpus) == (question.context_len, question.num_gpus)
    }
