"""What ranks run that have their part of a model alone; started processes import this file by its name."""

from __future__ import annotations

from typing import Any

from kvrsim.runtime.job import Job, ModelChoice, run_job
from kvrsim.runtime.plan import RunPlan
from kvrsim.scenario import Partition
from tests.kvrsim.runtime.runtime_models import CONFIGS
from tests.kvrsim.runtime.runtime_workers import CONTEXT_LEN


def parts_alone(transport: Any) -> list[tuple[RunPlan, set[int | None]]]:
    """Jobs of which each rank needs its part of the model alone; and the layers of which rank 0 has marks."""
    found, whole = [], Partition(chunk_lens=(CONTEXT_LEN,))
    for plan in (RunPlan(strategy="tp", partition=whole), RunPlan(strategy="pp", partition=Partition.even(23, 3))):
        choice = ModelChoice(config=CONFIGS["llama-gqa"], dtype="fp32", attention="sdpa")
        (timeline,) = run_job(
            transport, Job(model=choice, plans=(plan,), repeats=1, check_logits=False)
        ).bench.timelines
        found.append((plan, {span.layer for span in timeline.of(0, "compute")}))
    return found
