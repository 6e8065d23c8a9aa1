"""Attention over 8 GPUs as ring-flash-attention runs it: published times beside predicted ones, part by part.

`python -m validate.kernels.rings` rewrites docs/results/rings.md, with ring_groups.py's part. All it needs ships with
kvrsim.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from kvrsim.builder import make_scenario
from kvrsim.engine.host import NO_HOST
from kvrsim.errors import KvrsimError
from kvrsim.executors.batch import run_batch
from kvrsim.io.files import write_atomically
from kvrsim.profile.profile import CalibrationProfile, load_profile
from kvrsim.profile.rates.attention import FlashRates
from kvrsim.profile.rates.elementwise import ElementwiseRates
from kvrsim.program import Program
from kvrsim.scenario import Scenario
from kvrsim.units import scale
from validate.kernels.ring_calls import GPUS, TOKENS, VARIANTS, Variant, tokens
from validate.kernels.ring_groups import batches, section
from validate.published.reference import table

PAGE = Path(__file__).parents[2] / "docs" / "results" / "rings.md"
PROFILE = "a100-flash"
_LOOPS = (4, 12)  # of the packings: the later ones take what they take in a benchmark that loops
PARTS = ("kernels and messages", "merging", "launches", "multiprocessors")  # of a call, in the order of the page


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One variant, published and predicted; seconds of one call."""

    variant: Variant
    published_s: float
    alone_s: float  # published: one GPU's tokens on one GPU
    parts_s: tuple[float, ...]  # with each of PARTS counted in turn

    @property
    def published_ratio(self) -> float:
        """Over the kernel alone, times the GPUs."""
        return self.published_s / (GPUS * self.alone_s)

    @property
    def ratios(self) -> tuple[float, ...]:
        """Predicted, likewise, after each part."""
        return tuple(part_s / (GPUS * self.alone_s) for part_s in self.parts_s)

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.parts_s[-1] / self.published_s - 1


def call_s(scenario: Scenario, variant: Variant) -> float:
    """Seconds of one call among many, the mean over the packings."""
    layers = tuple(variant.ops(scenario, packing) for packing in variant.packings)
    finish_s = []
    for loops in _LOOPS:
        program = Program(
            strategy=variant.strategy,
            prologue=((),) * GPUS,
            layers=layers,
            layer_kind_index=tuple(range(len(layers))) * loops,
            epilogue=((),) * GPUS,
        )
        finish_s.append(float(run_batch(program, scenario.cluster).max()))
    return (finish_s[1] - finish_s[0]) / (_LOOPS[1] - _LOOPS[0]) / len(layers)


@cache
def library(counted: Sequence[str] = PARTS, *, packed: bool = False, fused_merge: bool = False) -> Scenario:
    """A100s with the library's attention kernel; `counted`: some of PARTS.

    The attention kernel is the profile's without the append to a cache, times one factor: alone on one GPU it takes
    what the library publishes. One launch is that of all packed sequences, so for those none is counted.
    """
    profile = load_profile(PROFILE)
    flash, elementwise = profile.kernels.attention["flash"], profile.kernels.elementwise
    assert isinstance(flash, FlashRates)
    flash = replace(flash, append_bytes_per_s=math.inf)
    (costs,) = _scenario(_with(profile, flash, elementwise)).layer_costs()
    alone_s = float(costs.attention_s(tokens(), 0.0 * tokens())[0])
    flash = scale(flash, published_s("single", packed=False) / alone_s)
    elementwise = replace(elementwise, fused_merge=fused_merge)
    if "merging" not in counted:
        elementwise = ElementwiseRates.uniform(math.inf, fused=True, fused_merge=True)
    if packed or "launches" not in counted:
        flash, elementwise = replace(flash, launch_s=0.0), replace(elementwise, start_s=0.0)
    if "multiprocessors" not in counted:
        profile = replace(profile, links=replace(profile.links, message_sms=0))
    return _scenario(_with(profile, flash, elementwise))


def _with(profile: CalibrationProfile, flash: FlashRates, elementwise: ElementwiseRates) -> CalibrationProfile:
    """With other kernels, and a host that is never late."""
    kernels = replace(profile.kernels, attention={"flash": flash}, elementwise=elementwise)
    return replace(profile, kernels=kernels, host=NO_HOST)


def _scenario(profile: CalibrationProfile) -> Scenario:
    """The benchmark's layer, which no serving engine runs."""
    ctx = GPUS * TOKENS
    scenario, _ = make_scenario(model="llama-3-8b", profile=profile, cluster="a100-nvlink", gpus=GPUS, ctx=ctx)
    return replace(scenario, engine=None)


def published_s(strategy: str, *, packed: bool) -> float:
    """Seconds of a call, as the library's README has it."""
    (found,) = (
        float(row["seconds"])
        for row in table("serving_prefills.csv")
        if (row["engine_name"], row["strategy"], "varlen" in row["notes"]) == ("ring-flash-attention", strategy, packed)
    )
    return found


def comparisons() -> tuple[Comparison, ...]:
    """Of all variants."""
    return tuple(
        Comparison(
            variant=variant,
            published_s=published_s(variant.strategy, packed=variant.packed),
            alone_s=published_s("single", packed=variant.packed),
            parts_s=tuple(
                call_s(library(PARTS[: number + 1], packed=variant.packed), variant) for number in range(len(PARTS))
            ),
        )
        for variant in VARIANTS
    )


_ABOUT = """\
# Rings as they run

Regenerated by `python -m validate.kernels.rings`.
[ring-flash-attention](https://github.com/zhuzilin/ring-flash-attention) publishes how often per second its attention
runs on 8 A100 joined by NVLink: one layer of Llama 3.1 8B, causal, forward, 8192 tokens a GPU. The *ratio* is the time
of a call over 8 times that of the kernel on one GPU with the same tokens (2.678 ms, packed 1.879 ms): 8 GPUs have 64
times the attention of one to do, so an ideal call has the ratio 1.

Predicted is what kvrsim's strategies `ring`, `striped` and `zigzag-ring` do in attention, run by the batch executor in
a loop, as the benchmark runs. The attention kernel is that of `a100-flash` without the append to a cache, times one
factor, so that it takes 2.678 ms alone. Merging reaches 0.777 of the datasheet's memory bandwidth, as PyTorch's kernels
do in `a100-eager`. Links are those of `a100-flash`. Nothing is fitted to the times on 8 GPUs.
"""
_PARTS = """\
The same ratios, part by part; each column adds one part:

- *kernels and messages*: the attention kernels of all rounds, and the part of the messages that they do not hide. A
  causal square has half of the elements of a whole block but takes more than half of its time, so a balanced ring may
  have a ratio below 1.
- *merging*: the result of each block is merged with that of the blocks before it, in fp32, by nine kernels. They move
  38 bytes per element of the output, 46 if the block has results for a part of the queries. Casts to fp32 and back are
  counted too (`kvrsim/cost/merges.py`). TorchScript compiles this function and could fuse it into one kernel that moves
  10 bytes; with that, all parts together would give {} (ring), {} (striped) and {} (zigzag ring).
- *launches*: of the kernels, on the device. One launch is that of all packed sequences, so none is counted for those.
- *multiprocessors*: NCCL's send and receive hold {held} of the {sms} while messages are in flight
  (`links.message_sms`: twice the 12 links, rounded up to a power of two; `ncclTopoComputeP2pChannels` in NCCL).
"""
_REST = """\
*All-gather* is the library's `llama3_flash_attn_varlen_func`: one call for each half of the heads, with K and V of the
second half gathered beside the first call, and copies around both. kvrsim's `tsp` gathers everything, then makes one
call. *Packed* sequences are those of the library's benchmark: four packings in turn. A ring splits each sequence over
all GPUs; the all-gather splits their concatenation.

Not counted: the README does not say which A100 was used. On those of 40 GB, whose memory has 1.31 times less bandwidth,
merging takes 1.31 times as long. GPUs of one machine differ, and the slowest sets the pace. Half of the blocks of
`striped` are one token shorter than whole tiles.
"""


def page(found: Sequence[Comparison]) -> str:
    """docs/results/rings.md."""
    fused = [call_s(library(fused_merge=True), one.variant) / (GPUS * one.alone_s) for one in found[:3]]
    lines = [
        _ABOUT,
        "| attention | published ms | ratio | predicted ms | ratio | error |",
        "|---|---:|---:|---:|---:|---:|",
        *map(_line, found),
        "",
        _PARTS.format(
            *(f"{ratio:.2f}" for ratio in fused),
            held=load_profile(PROFILE).links.message_sms,
            sms=library().cluster.gpu.num_sms,
        ),
        f"| attention | {' | '.join((PARTS[0], *(f'+ {part}' for part in PARTS[1:])))} | published |",
        "|---|---:|---:|---:|---:|---:|",
        *map(_parts_line, found),
        "",
        _REST,
    ]
    return "\n".join(lines)


def _line(one: Comparison) -> str:
    published = f"{1e3 * one.published_s:.2f} | {one.published_ratio:.2f}"
    return (
        f"| {one.variant.title} | {published} | {1e3 * one.parts_s[-1]:.2f} | {one.ratios[-1]:.2f} | {one.error:+.1%} |"
    )


def _parts_line(one: Comparison) -> str:
    ratios = " | ".join(f"{ratio:.2f}" for ratio in one.ratios)
    return f"| {one.variant.title} | {ratios} | {one.published_ratio:.2f} |"


def main() -> int:
    """Rewrite the page."""
    try:
        text = f"{page(comparisons())}\n{section(batches())}"
        write_atomically(PAGE, text.encode(), argument="page")
    except KvrsimError as error:
        print(f"validate.kernels.rings: error: {error}", file=sys.stderr)
        return error.exit_code
    print(PAGE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
