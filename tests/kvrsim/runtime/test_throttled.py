"""Two ranks over a link that the kernel throttles, where this machine lets us make one."""

from __future__ import annotations

from pathlib import Path

import pytest

from validate.machine.confirmation_tc import PAYLOAD, on_both, why_not

pytestmark = pytest.mark.slow

BITS_PER_S = 100e6
CONTEXT, LAYERS, TOKEN_BYTES = 512, 8, 2 * 512 * 4
CONFIG = Path(__file__).parents[3] / "validate" / "models" / "small-llama.json"
REASON = why_not()


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "tokens_sent"), [("kvr-e", CONTEXT // 2), ("tsp", CONTEXT // 2)])
def test_messages_take_as_long_as_the_link_lets_them(strategy: str, tokens_sent: int) -> None:
    arguments = ["run", "--strategy", strategy, "--gpus", "2", "--ctx", str(CONTEXT), "--model", str(CONFIG)]
    found = on_both(BITS_PER_S, [*arguments, "--repeats", "2", "--check"])
    least_s = LAYERS * tokens_sent * TOKEN_BYTES * 8 / (BITS_PER_S * PAYLOAD)
    assert 0.9 * least_s < min(found["samples_s"]) < 4 * least_s  # computing takes a third of it, if alone
    assert found["max_logit_error"] < 1e-4
