"""Decoding from the KV cache of a prefill: equal to one process, in the memory of the prefill."""

from __future__ import annotations

import pytest

from kvrsim.errors import InputError
from kvrsim.runtime.decode import decode, difference, reference_of
from kvrsim.runtime.exchange import Exchange, make_exchange
from kvrsim.runtime.measure import _VirtualTransport, prompt_of
from kvrsim.runtime.model import ModelForward
from kvrsim.runtime.plan import Difference, check_decoding, run_strategy
from tests.kvrsim.runtime.runtime_workers import CONTEXT_LEN, model_of, run_plan

PLAN = run_plan("single", CONTEXT_LEN, batch=2, output_tokens=7)


def prefilled(name: str) -> Exchange:
    """A prefill in this process, which holds the whole KV cache."""
    forward = ModelForward(model_of(name))
    exchange = make_exchange(forward, _VirtualTransport(0, 1), PLAN)
    exchange.prefill(prompt_of(forward, PLAN, 0))
    return exchange


def compared(exchange: Exchange) -> Difference:
    """Decode, and compare with one process."""
    decoding = decode(exchange)
    assert decoding is not None
    assert {len(tokens) for tokens in decoding.tokens} == {PLAN.output_tokens}
    assert len(decoding.step_s) == PLAN.output_tokens - 1
    ids = prompt_of(exchange.forward, PLAN, 0)
    return difference(exchange, decoding, reference_of(exchange.forward.model, ids, PLAN.output_tokens))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3_next"])
def test_a_prefill_can_be_decoded_and_repeated_in_the_same_memory(name: str) -> None:
    exchange = prefilled(name)
    places = [buffer.data.data_ptr() for buffer in exchange.cache.buffers]
    first = decode(exchange)
    exchange.prefill(prompt_of(exchange.forward, PLAN, 0))
    assert compared(exchange).first_unequal is None
    second = decode(prefilled(name))
    assert first is not None
    assert second is not None
    assert first.tokens == second.tokens
    assert [buffer.data.data_ptr() for buffer in exchange.cache.buffers] == places


def test_tokens_from_a_cache_that_is_spoilt_are_not_equal() -> None:
    exchange = prefilled("llama-gqa")
    for buffer in exchange.cache.buffers:
        buffer.data[: CONTEXT_LEN // 2].zero_()
    result = compared(exchange)
    assert result.first_unequal is not None
    assert result.first_unequal > 0  # the first token comes from the prefill
    assert result.margin is not None
    assert result.margin > 0


def test_strategies_that_scatter_the_cache_refuse_to_decode() -> None:
    for name in ("ring", "striped", "zigzag", "zigzag-ring", "ulysses", "pp", "pp-s"):
        check_decoding(run_strategy(name), 1)
        with pytest.raises(
            InputError, match=r"output_tokens: got '2', accepted: 1 for .*, where each rank holds"
        ) as error:
            check_decoding(run_strategy(name), 2)
        assert "others decode: single, tsp, kvr-e, kvr-s" in str(error.value)
