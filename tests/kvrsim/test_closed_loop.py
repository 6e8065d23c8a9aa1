"""The waiting-time model of closed-loop users."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.closed_loop import ClosedLoop

LOOPS = st.builds(
    ClosedLoop,
    users=st.integers(1, 64),
    tpot_s=st.floats(0, 0.1),
    output_tokens=st.floats(0, 10_000),
    prompt_tokens=st.none() | st.floats(1, 1e6),
    wait_steps=st.sampled_from([0.0, 0.5, 5.5]),
)
SECONDS = st.floats(1e-4, 100)


@given(loop=LOOPS, seconds=SECONDS)
def test_the_prefill_of_a_mean_is_the_prefill_that_gives_it(loop: ClosedLoop, seconds: float) -> None:
    again = loop.prefill_s(loop.mean_ttft_s(seconds))
    assert again == pytest.approx(seconds, rel=1e-6)


@given(loop=LOOPS, seconds=SECONDS)
def test_more_users_wait_longer_and_longer_answers_collide_less(loop: ClosedLoop, seconds: float) -> None:
    more = replace(loop, users=loop.users + 1)
    longer = replace(loop, output_tokens=2 * loop.output_tokens)
    assert more.mean_ttft_s(seconds) > loop.mean_ttft_s(seconds) >= longer.mean_ttft_s(seconds) >= seconds


def test_the_formula_with_its_published_constants() -> None:
    prefill_s, users, tpot_s, tokens = 0.2, 8, 0.01, 900
    collisions = 0.9 * (users - 1) * prefill_s / (prefill_s + tokens * tpot_s) / 2
    expected = prefill_s * (1 + (users - 1) / 20 + collisions) + 5.5 * tpot_s
    loop = ClosedLoop(users=users, tpot_s=tpot_s, output_tokens=tokens, wait_steps=5.5)
    assert loop.mean_ttft_s(prefill_s) == pytest.approx(expected, rel=1e-12)


@given(loop=LOOPS, seconds=SECONDS, tokens=st.floats(1, 1e6))
def test_short_prompts_share_steps(loop: ClosedLoop, seconds: float, tokens: float) -> None:
    short, longer, long = (replace(loop, prompt_tokens=one).mean_ttft_s(seconds) for one in (tokens, 2 * tokens, None))
    assert short <= longer <= long
    assert (short < longer < long) or loop.users == 1


def test_a_mean_below_the_wait_for_decode_steps_says_nothing() -> None:
    loop = ClosedLoop(users=4, tpot_s=0.1, wait_steps=5.5)
    assert loop.prefill_s(0.5) is None
