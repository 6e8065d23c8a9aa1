"""Virtual ranks compute the same values as real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from kvrsim.runtime.exchange.chain import Chain
from kvrsim.runtime.plan import Job, ModelChoice, Report, RunPlan
from kvrsim.runtime.virtual import _VirtualTransport, run_virtual
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_models import CONFIGS, KINDS

CONTEXT_LEN = 23


def plans_of(batch: int, *, special: bool) -> tuple[RunPlan, ...]:
    def plan(strategy: Any, *chunks: int, **settings: Any) -> RunPlan:
        return RunPlan(strategy=strategy, partition=Partition(chunk_lens=chunks), batch=batch, **settings)

    return (
        plan("single", CONTEXT_LEN),
        plan("kvr", 12, 11),
        plan("kvr", 9, 7, 1, 6),
        plan("tsp", 12, 11),
        plan("tsp", 11, 1, 11),
        *([] if special else [plan("kvr", 9, 14, query_blocks=((2, 3, 1), (3, 64, 2)))]),
    )


def virtual(name: str, kernel: str, batch: int = 1) -> Report:
    model = ModelChoice(config=(CONFIGS | KINDS)[name], dtype="fp32", attention=kernel, init_std=0.2, seed=1)  # type: ignore[arg-type]
    job = Job(
        model=model,
        plans=plans_of(batch, special=name in ("falcon-alibi", "gpt_oss", "deepseek_v3")),
        repeats=2,
        warmups=1,
    )
    return run_virtual(_VirtualTransport(0, 1), job)


@pytest.mark.parametrize(
    ("name", "kernel", "batch"),
    [
        ("llama-gqa", "eager", 1), ("llama-mha", "flash", 1), ("falcon-grouped", "sdpa", 1),
        ("falcon-alibi", "sdpa", 1), ("gemma3", "sdpa", 2), ("gpt_oss", "eager", 1), ("deepseek_v3", "flash", 1),
        ("qwen3_next", "sdpa", 2),
    ],
)  # fmt: skip
def test_logits_are_one_processs(name: str, kernel: str, batch: int) -> None:
    for timing in virtual(name, kernel, batch).timings:
        assert timing.difference is not None
        assert timing.difference.logits <= 1e-5 * max(1.0, timing.difference.logits_scale), timing.plan.label
        assert timing.difference.kv_cache <= 1e-4
        assert timing.difference.logits_scale > 1  # small logits would pass any tolerance


def test_every_part_of_every_layer_is_measured_on_every_rank() -> None:
    report = virtual("llama-gqa", "sdpa")
    for timing in report.timings:
        assert len(timing.parts) == 2
        for ranks in timing.parts:
            assert len(ranks) == len(timing.plan.partition.chunk_lens)
            for rank, parts in enumerate(ranks):
                append = "assemble" if timing.plan.strategy == "tsp" else "append"
                inside = {(layer, part) for layer in range(3) for part in ("qkv", append, "attention", "output+mlp")}
                ends = {(None, "embedding")} | ({(None, "head")} if rank == len(ranks) - 1 else set())
                assert set(parts) == inside | ends
                assert all(seconds >= 0 for seconds in parts.values())
    assert report.conditions["attention"] == "sdpa"


def test_a_rank_that_had_no_prefix_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Chain.run

    def spoilt(self: Chain, ids: Any) -> Any:
        for layer in range(3 if self.rank else 0):
            self.buffer(layer).data.zero_()
        return real(self, ids)

    monkeypatch.setattr(Chain, "run", spoilt)
    kvr = virtual("llama-gqa", "sdpa").timings[1]
    assert kvr.difference is not None
    assert kvr.difference.logits > 0.1
