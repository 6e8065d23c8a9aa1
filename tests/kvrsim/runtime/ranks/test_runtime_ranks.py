"""Several ranks give what one gives, to rounding; what they may not do is found out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tests.kvrsim.runtime.ranks.part_workers as part_workers
import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.errors import InputError
from kvrsim.runtime.exchange import exchange_of
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks import Launch, launch
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_models import KINDS, variants

ROOT = Path(__file__).resolve().parents[4]

TOLERANCE = 1e-5


def on(num_ranks: int, timeout_s: float = 20, deadline_s: float = 55) -> Launch:
    return Launch(num_ranks=num_ranks, timeout_s=timeout_s, deadline_s=deadline_s)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_together_give_what_one_gives(num_ranks: int) -> None:
    *others, last = launch(workers.exactness, how=on(num_ranks))
    assert others == [last] * (num_ranks - 1)
    assert len(last) == sum(len(workers.plans_of_model(num_ranks, *variant)) for variant in variants())
    assert [found for found in last if not workers.within(found[2], TOLERANCE)] == []
    assert all(difference.logits_scale > 1 for _, _, difference in last)  # so that the tolerance means something


@pytest.mark.parametrize(("num_ranks", "kernel"), [(2, "flash"), (4, "eager")])
def test_every_kind_of_layer_gives_what_one_rank_gives(num_ranks: int, kernel: str) -> None:
    found = launch(workers.exactness_of_kinds, [kernel], how=on(num_ranks))[-1]
    assert len(found) == 5 * len(KINDS)
    assert [one for one in found if not workers.exact(one[2])] == []
    assert all(difference.logits_scale > 1 for _, _, difference in found)


def test_query_blocks_give_what_one_rank_gives() -> None:
    """Any number on each rank and layer, of prompts one and two."""
    found = launch(workers.exactness_in_blocks, ["llama-gqa", "falcon-mqa"], ["eager", "sdpa"], how=on(3))[-1]
    assert len(found) == 2 * 2 * 3
    assert [one for one in found if not workers.exact(one[2])] == []


@pytest.mark.parametrize("how", ["prefix", "positions"])
@pytest.mark.parametrize(("name", "kernel"), [
    ("llama-gqa", "flash"), ("falcon-grouped", "sdpa"), ("qwen3", "eager"), ("gemma3", "sdpa"),
    ("deepseek_v3", "flash"), ("qwen3_next", "sdpa"),
])  # fmt: skip
def test_what_is_spoilt_is_noticed(name: str, kernel: str, how: str) -> None:
    (difference,) = launch(workers.spoilt, name, kernel, how, how=on(2))[-1]
    assert difference.logits > 0.05
    assert not workers.within(difference, TOLERANCE)


def test_ranks_need_their_part_of_the_model_alone() -> None:
    (tensor, layers), (pipeline, first) = launch(part_workers.parts_alone, how=on(2))[-1]
    assert (tensor.strategy, layers - {None}) == ("tp", {0, 1, 2})
    assert (pipeline.strategy, first - {None}) == ("pp", {0, 1})


def test_messages_by_way_of_host_memory_are_the_same() -> None:
    found = launch(workers.staged, how=on(2))[-1]
    assert [difference for difference in found if not workers.within(difference, TOLERANCE)] == []


@pytest.mark.slow
def test_under_torchrun_each_process_is_one_rank(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import tests.kvrsim.runtime.runtime_workers as workers\n"
        "from kvrsim.runtime.ranks import Launch, launch\n"
        "found = launch(workers.rank_of, how=Launch(num_ranks=2, timeout_s=20))\n"
        "assert found == [(0, 2), (1, 2)], found\n"
        "print('agreed', flush=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("agreed") == 2


@pytest.mark.parametrize(
    ("strategy", "chunk_lens", "settings", "named"),
    [
        ("single", (4, 4), {}, "one chunk"),
        ("kvr", (4, 4), {"receives_ahead": 0}, "at least 1 layer"),
        ("kvr", (4, 4), {"batch": 0}, "at least 1 prompt"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    strategy: str, chunk_lens: tuple[int, ...], settings: dict[str, int], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        RunPlan(strategy=strategy, partition=Partition(chunk_lens=chunk_lens), **settings)  # type: ignore[arg-type]


def test_a_plan_must_fit_the_ranks_and_the_kernel() -> None:
    tsp = RunPlan(strategy="tsp", partition=Partition(chunk_lens=(4, 4)))
    with pytest.raises(InputError, match="a chunk a rank"):
        exchange_of("tsp").place_of(tsp, 0, 3)
    with pytest.raises(InputError, match="a chunk a rank"):
        exchange_of("kvr").place_of(workers.kvr(4, 4), 0, 1)
    assert [exchange_of("kvr").place_of(workers.kvr(4, 4), rank, 3) for rank in range(3)] == [None, 0, 1]
    flash = workers.Geometry.of(workers.model_of("llama-gqa", "flash"))
    with pytest.raises(InputError, match="dense TSP"):
        exchange_of("tsp").check(tsp, flash)
