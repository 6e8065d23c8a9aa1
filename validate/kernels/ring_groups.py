"""A striped ring between groups of tensor parallelism, and the latter alone: LoongServe's published prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrsim.builder import make_scenario
from planner.simulate import run_simulation
from validate.published.reference import table

PROFILE, ENGINE = "a100-flash", "loongserve-2024"
ALONE, RING = "tp", "tp4+striped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Prompts of one length that are prefilled together, by both strategies; seconds."""

    context_len: int
    batch: int
    published_s: tuple[float, float]  # ALONE, RING
    predicted_s: tuple[float, float]

    @property
    def ratios(self) -> tuple[float, float]:
        """How many times as fast the ring is: published and predicted."""
        return self.published_s[0] / self.published_s[1], self.predicted_s[0] / self.predicted_s[1]

    def attention_ratio(self, short: Batch) -> float:
        """Published seconds of attention of the ring over those of tensor parallelism alone.

        Attention grows with the pairs of tokens, all else with the tokens; `short`: prompts with hardly any attention.
        """
        tokens = self.context_len * self.batch / (short.context_len * short.batch)
        alone_s, ring_s = (
            own_s - tokens * short_s for own_s, short_s in zip(self.published_s, short.published_s, strict=True)
        )
        return ring_s / alone_s


def batches() -> tuple[Batch, ...]:
    """All published ones, by length; kernels and links alone, without what the engine adds to both."""
    rows = {
        (int(row["context_len"]), int(row["batch"]), row["strategy"]): float(row["seconds"])
        for row in table("serving_prefills.csv")
        if row["engine_name"] == ENGINE
    }
    shapes = sorted({(tokens, batch) for tokens, batch, strategy in rows if strategy == RING})
    return tuple(
        Batch(
            context_len=tokens,
            batch=batch,
            published_s=(rows[tokens, batch, ALONE], rows[tokens, batch, RING]),
            predicted_s=(_predicted_s(tokens, batch, ALONE), _predicted_s(tokens, batch, RING)),
        )
        for tokens, batch in shapes
    )


def _predicted_s(tokens: int, batch: int, strategy: str) -> float:
    scenario, _ = make_scenario(
        model="llama-2-7b", profile=PROFILE, cluster="a800-nvlink", gpus=8, ctx=tokens, batch=batch, engine="none"
    )
    return run_simulation(scenario, strategy=strategy).ttft_s


_ABOUT = """\
## Rings between groups

LoongServe publishes prefills of a model of Llama 2 7B's shape on 8 A800, by tensor parallelism over all (`tp`) and by a
striped ring between two groups of four (`tp4+striped`). The prompts of a batch are packed. The *speedup* of the ring is
the time of `tp` over its own. Predictions are of the kernels and links of `a100-flash` alone; what the engine adds is
common to both.
"""
_REST = """\
*Attention* is that of `tp4+striped` over that of `tp`, published, without what grows with the tokens (from the first
row). The longer the prompts, the slower it is, though LoongServe merges results inside its kernel. A likely reason is
that this kernel starts tiles of all prompts and heads together, so that more heads on a GPU share its L2 cache worse.
kvrsim has no term for that, so it misses that `tp` is faster by 1 % at 500,000 tokens.
"""


def section(found: Sequence[Batch]) -> str:
    """Of docs/results/rings.md."""
    lines = [
        _ABOUT,
        "| tokens | prompts | `tp` s | `tp4+striped` s | attention | speedup | predicted | error |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(_line(one, found[0]) for one in found),
        "",
        _REST,
    ]
    return "\n".join(lines)


def _line(one: Batch, short: Batch) -> str:
    """Attention only of prompts that are long against the short ones."""
    attention = f"{one.attention_ratio(short):.2f}" if one.context_len >= 10 * short.context_len else ""
    times = f"{one.context_len:,} | {one.batch} | {one.published_s[0]:.2f} | {one.published_s[1]:.2f} | {attention}"
    published, predicted = one.ratios
    return f"| {times} | {published:.2f} | {predicted:.2f} | {predicted / published - 1:+.1%} |"
