"""A breakdown contains every second of every rank exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given

import kvrsim
from kvrsim.executors.run import run_partition
from kvrsim.scenario import Partition
from kvrsim.strategies import STRATEGIES
from planner.uncertainty.basis import breakdown
from tests.building import Draws, any_partition, any_scenario, draws, examples, executed


@pytest.mark.parametrize("name", ["tsp", "kvr-e"])
@given(rng=draws())
@examples(25)
def test_a_ranks_rows_sum_to_its_finish(name: str, rng: Draws) -> None:
    scenario = any_scenario(rng, num_gpus=(2, 4))
    strategy = STRATEGIES[name]
    cut = Partition(chunk_lens=any_partition(rng, scenario.request.new_tokens, scenario.cluster.num_gpus))
    run = run_partition(executed(scenario, strategy), cut, timeline=True)
    assert run.timeline is not None
    result = breakdown(executed(scenario, strategy), cut, run.finish_s, run.timeline)
    assert result.ttft_s == run.ttft_s
    for rank, end_s in enumerate(run.finish_s):
        rows = [row for row in result.rows if row.rank == rank]
        assert sum(row.seconds for row in rows) == pytest.approx(end_s, rel=1e-4)  # products are priced one by one
        assert all(row.seconds > 0 for row in rows)
        assert all(row.share == pytest.approx(row.seconds / result.ttft_s) for row in rows)


def test_nothing_measured_beats_the_roofline() -> None:
    for profile in ("a100-eager", "a100-flash", "h100-flash"):
        cluster = "h100-nvlink" if profile.startswith("h100") else None
        run = kvrsim.simulate(strategy="kvr-e", ctx="8k", gpus=4, profile=profile, cluster=cluster, breakdown=True)
        assert run.breakdown is not None
        shares = [row.roofline_share for row in run.breakdown.rows if row.roofline_share is not None]
        assert shares
        assert max(shares) <= 1 + 1e-9
        assert {row.basis for row in run.breakdown.rows if row.kind == "wait"} <= {"simulated"}


def test_bases_say_what_was_measured() -> None:
    def bases(model: str, ctx: str) -> dict[tuple[str, str], str]:
        run = kvrsim.simulate(strategy="single", gpus=1, ctx=ctx, model=model, profile="a100-vidur", breakdown=True)
        assert run.breakdown is not None
        return {(row.kind, row.what): row.basis for row in run.breakdown.rows}

    near, far = bases("llama-2-7b", "3k"), bases("llama-2-7b", "64k")
    assert near["gemm", "4096→22016"] == "measured"
    assert near["attention", "flash"] == "interpolated"
    assert far["gemm", "4096→22016"] == far["attention", "flash"] == "extrapolated"
    assert bases("mistral-7b", "3k")["gemm", "4096→28672"] == "measured"  # the shape of Llama 3 8B
    assert bases("qwen2.5-7b", "3k")["gemm", "18944→3584"] == "interpolated"
