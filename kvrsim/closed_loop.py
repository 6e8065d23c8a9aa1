"""Convert the time of one prefill to the mean TTFT of closed-loop users, and back.

Benchmarks of engines keep C requests in flight: each user sends the next prompt when the previous answer is complete.
The mean TTFT of such a run at light load is

    mean = T (1 + s (C - 1) / 2 x (0.1 + 0.9 T / (T + output_tokens x TPOT))) + wait_steps x TPOT
    s = prompt_tokens / (prompt_tokens + 1000)

where T is the time to prefill one prompt on an idle engine. The C prompts of the first of ten waves arrive together,
and each waits for half of the others; in the other nine waves a prompt waits for half of each prefill that runs at that
moment. Short prompts that wait are computed in one step: s is the share of T that one more prompt adds to a step. An
engine that also decodes finishes the running step first. If prompts also wait for memory, the mean is larger.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_WAVE = 0.1  # share of the requests that arrive together; benchmarks send ten prompts per user
OUTPUT_TOKENS = 1024  # default output tokens per request, as in public benchmarks
HALF_STEP = 0.5  # mean wait in decode steps, because a prompt arrives during a step
STEP_TOKENS = 1000  # tokens that take as long as the constant part of a step


@dataclass(frozen=True, kw_only=True, slots=True)
class ClosedLoop:
    """Users that each wait for their answer before they send the next prompt."""

    users: int  # requests in flight, 1 or more
    tpot_s: float  # seconds per output token while all users decode
    output_tokens: float = OUTPUT_TOKENS  # mean output tokens per request
    prompt_tokens: float | None = None  # mean per request; None: each prompt is long enough to fill its own steps
    # Decode steps before a prefill starts; 5.5 if the engine checks for new prompts only in every tenth step (SGLang's
    # --scheduler-recv-interval 10).
    wait_steps: float = HALF_STEP

    def mean_ttft_s(self, prefill_s: float) -> float:
        """Mean TTFT of all requests, from the seconds of one prefill on an idle engine."""
        decode_s = self.output_tokens * self.tpot_s
        in_prefill = prefill_s / (prefill_s + decode_s) if prefill_s else 0.0  # share of a user's time spent in prefill
        queue = self._others * (FIRST_WAVE + (1 - FIRST_WAVE) * in_prefill)
        return prefill_s * (1 + queue) + self.wait_steps * self.tpot_s

    def prefill_s(self, mean_ttft_s: float) -> float | None:
        """Seconds of one prefill, from the mean TTFT; None if `wait_steps` take as long as the mean TTFT."""
        decode_s = self.output_tokens * self.tpot_s
        rest_s = mean_ttft_s - self.wait_steps * self.tpot_s
        if rest_s <= 0:
            return None
        first = 1 + self._others * FIRST_WAVE
        later = self._others * (1 - FIRST_WAVE)
        # rest = T (first + later T / (T + decode)), a quadratic equation for T
        half = (first * decode_s - rest_s) / 2
        root = math.sqrt(half**2 + (first + later) * rest_s * decode_s)
        return rest_s * decode_s / (half + root) if half > 0 else (root - half) / (first + later)

    @property
    def _others(self) -> float:
        """Mean number of other users' prefills that a prompt waits for."""
        share = 1.0 if self.prompt_tokens is None else self.prompt_tokens / (self.prompt_tokens + STEP_TOKENS)
        return share * (self.users - 1) / 2
