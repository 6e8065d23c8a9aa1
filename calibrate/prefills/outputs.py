"""Output: what is read from one file that a benchmark wrote, and OutputFormat: how one tool's files are read."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from calibrate.prefills.rows import PrefillRow
from kvrsim.io.schema import JsonObject
from kvrsim.units import MAX_TOKENS

MOST_LENGTHS = 24  # prompt lengths of one run that are told apart; more are put into groups of as many requests

# In the name of a file, such as latency_in2048_out1_bs1_tp4.json.
_IN_NAME = {
    "context_len": re.compile(r"(?<![a-z])(?:in|input|isl|ctx|prompt)(?:[-_]?len)?[-_]?([0-9]{1,8})(k?)(?![0-9])"),
    "output_len": re.compile(r"(?<![a-z])(?:out|output|osl)(?:[-_]?len)?[-_]?([0-9]{1,8})(k?)(?![0-9])"),
    "batch": re.compile(r"(?<![a-z])(?:bs|batch)(?:[-_]?size)?[-_]?([0-9]{1,6})()(?![0-9])"),
    "num_gpus": re.compile(r"(?<![a-z])tp[-_]?([0-9]{1,4})()(?![0-9])"),
}
_ROW_SIZES = ("context_len", "batch", "num_gpus")
_UNITS_S = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_QUANTISED = re.compile(r"awq|gptq|gguf|bnb|fp8|fp4|int[48]|w[48]a")


@dataclass(slots=True)
class Output:
    """What is being read from one file."""

    path: Path
    rows: list[PrefillRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    requests: list[tuple[int, float]] = field(default_factory=list)  # prompt tokens and seconds of single requests

    def add(self, row: PrefillRow) -> None:
        """One row; what it does not say is taken from the name of the file."""
        named: dict[str, Any] = {key: value for key, value in in_name(self.path).items() if key in _ROW_SIZES}
        self.rows.append(replace(row, **{key: value for key, value in named.items() if getattr(row, key) is None}))

    def note(self, text: str) -> None:
        """A line for people about this file."""
        self.notes.append(f"{self.path.name}: {text}")


def add_requests(output: Output, requests: Sequence[tuple[int, float]], where: str, model: str | None = None) -> None:
    """One row a prompt length, the median of its requests; of very many lengths one a group of neighbours."""
    ordered = sorted(requests)
    lengths = sorted({length for length, _ in ordered})
    if len(lengths) <= MOST_LENGTHS:
        groups = [[pair for pair in ordered if pair[0] == length] for length in lengths]
    else:
        size = -(-len(ordered) // MOST_LENGTHS)
        groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        output.note(f"{len(lengths)} prompt lengths, put into {len(groups)} groups of up to {size} requests")
    for group in groups:
        output.add(
            PrefillRow(
                ttft_s=statistics.median(seconds for _, seconds in group),
                where=where,
                context_len=round(statistics.median(length for length, _ in group)),
                batch=1,
                likely_model=model,
            )
        )


def in_name(path: Path) -> dict[str, int]:
    """What the name of a file says of its run: context_len, output_len, batch, num_gpus."""
    found = {}
    for key, pattern in _IN_NAME.items():
        match = pattern.search(path.stem.lower())
        if match and 1 <= int(match[1]) * (1024 if match[2] else 1) <= MAX_TOKENS:
            found[key] = int(match[1]) * (1024 if match[2] else 1)
    return found


def seconds_of(metric: JsonObject, *statistics_: str) -> float:
    """The first of these statistics that a metric with a unit has, in seconds."""
    unit = metric.text("unit", "ms")
    if unit not in _UNITS_S:
        raise metric.error("unit", ", ".join(_UNITS_S))
    return metric.number(metric.first_of(*statistics_)) * _UNITS_S[unit]


def known_model(name: object) -> str | None:
    """The built-in model that a Hugging Face name means, such as meta-llama/Llama-2-70b-chat-hf.

    None where there is none, or where the name says that the weights are quantised.
    """
    from kvrsim.model.load import builtin_models

    if not isinstance(name, str):
        return None
    if _QUANTISED.search(name.lower()):
        return None
    plain = re.sub(r"[^a-z0-9.]+", "-", name.rpartition("/")[2].lower())
    plain = re.sub(r"^(?:meta-)?(llama-[0-9])(?:\.[0-9])?", r"\1", plain)  # 3, 3.1 and 3.3 have the same layers
    shapes = [model for model in builtin_models() if plain == model or plain.startswith(f"{model}-")]
    return max(shapes, key=len, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFormat:
    """One kind of output, and how it is read."""

    title: str  # the tool that writes it
    keys: tuple[str, ...]  # that tell it from the others; each is there
    read: Callable[[JsonObject, Output], None]
