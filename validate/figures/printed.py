"""What the paper's text and captions print about its figures; its TTFTs are in validate.published.reference."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from validate.published.reference import DATA

_FILE = DATA / "kv_runahead_icml2024_figures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedPartition:
    """A partition that the paper prints."""

    place: str  # where in the paper
    model: str
    context_len: int  # tokens
    num_gpus: int
    method: str  # how the paper found it
    shares: tuple[float, ...]  # of the context, one a rank
    printed_as: str  # digit by digit


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyNetwork:
    """What the paper prints of TTFT on a noisy network."""

    place: str  # where in the paper
    model: str
    context_lens: tuple[int, ...]  # tokens
    num_gpus: tuple[int, ...]
    shares: Mapping[str, float]  # by strategy: noisy TTFT over quiet, less one, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """What the paper claims of the figures that are drawn here."""

    citation: str
    partitions: tuple[PrintedPartition, ...]
    kvr_p_above_kvr_s: tuple[float, ...]  # share of TTFT, the worst case of each panel of Fig. 10
    kvr_s_above_no_communication: float  # share of TTFT(p), at most, Fig. 8 d
    noisy_network: NoisyNetwork  # Fig. 11


def read_printed() -> Printed:
    """The claims, from their data file."""
    data = json.loads(_FILE.read_text())
    partitions = [PrintedPartition(**{**entry, "shares": tuple(entry["shares"])}) for entry in data["partitions"]]
    noisy = data["noisy_network"]
    return Printed(
        citation=data["citation"],
        partitions=tuple(partitions),
        kvr_p_above_kvr_s=tuple(float(entry["share"]) for entry in data["kvr_p_above_kvr_s"]),
        kvr_s_above_no_communication=float(data["kvr_s_above_no_communication"]["share"]),
        noisy_network=NoisyNetwork(
            place=str(noisy["place"]),
            model=str(noisy["model"]),
            context_lens=tuple(noisy["context_lens"]),
            num_gpus=tuple(noisy["num_gpus"]),
            shares={name: float(share) for name, share in noisy["shares"].items()},
        ),
    )
