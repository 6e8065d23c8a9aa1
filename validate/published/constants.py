"""Profile a100-eager as a function of its fitted constants, and the paper's rows predicted with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from kvrsim.builder import make_scenario
from kvrsim.engine.host import HostRates
from kvrsim.executors.run import run_partition
from kvrsim.partition import Partition
from kvrsim.profile.profile import (
    CacheCopies,
    CalibrationProfile,
    KernelRates,
    Residual,
    ValidRange,
    load_profile,
)
from kvrsim.profile.rates.attention import EagerRates
from kvrsim.profile.rates.elementwise import ElementwiseRates
from kvrsim.program import Array
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.search.search import search
from validate.published.reference import Row

_MEASURED = "a100-vidur"
_KERNEL_S = 2e-6  # to start a kernel, on the device
_ATTENTION_S = 2e-5  # to start its ten kernels
NAMES = ("hbm", "layer_s", "kernel_s", "gather_piece_s", "resume_s", "falcon_bytes")
START = np.log([1.57e12, 2.1e-3, 2.3e-5, 8.5e-5, 5e-4, 24.0])

Partitions = dict[Row, Partition]


def profile_of(log_constants: Array, residual: Residual | None) -> CalibrationProfile:
    """The profile with these constants, given as logarithms."""
    measured = _measured()
    gemm = measured.kernels.gemm
    constants = map(float, np.exp(log_constants))
    hbm, layer_s, kernel_s, piece_s, resume_s, falcon_bytes = (
        (float(f"{value:.4g}") for value in constants) if residual else constants
    )
    eager = EagerRates(
        flops_per_s=measured.kernels.gemm.flops_per_s,
        bytes_per_s=hbm,
        start_s=_ATTENTION_S,
        score_bytes={"falcon": falcon_bytes},
    )
    return CalibrationProfile(
        name="a100-eager",
        gpu="a100-80gb",
        description=(
            "fitted to the TTFTs that KV-Runahead (ICML 2024) prints for 8 x A100 over NVLink:"
            " Hugging Face models of 2023, PyTorch 2.0, eager attention, FP16."
        ),
        not_covered="For serving engines (flash attention, small launch overhead) use a *-flash profile.",
        kernels=KernelRates(
            gemm=gemm,
            attention={"eager": eager},
            elementwise=ElementwiseRates.uniform(hbm, fused=False, start_s=_KERNEL_S),
            copies=CacheCopies(keep=1.0, append=1.0, gather=2.0),
            head_on_all_tokens=True,
            repeats_rotary=True,
        ),
        host=HostRates(layer_s=layer_s, kernel_s=kernel_s, gather_piece_s=piece_s, resume_s=resume_s),
        links=replace(measured.links, sends="rendezvous", sends_over_bus="overlap"),
        valid=ValidRange(
            context_len=(1024, 16384),
            num_gpus=(1, 8),
            hidden_size=(2048, 6656),
            head_dim=(64, 128),
            dtypes=("fp16", "bf16"),
        ),
        operations={kind: measured.operations[kind] for kind in ("gemm", "send_recv", "all_gather")},
        residual=residual,
        provenance={
            "device": "8 x NVIDIA A100 (80 GB taken, since 12k on one GPU would not fit 40), NVLink",
            "software": "PyTorch 2.0, NCCL 2.14, Hugging Face transformers of 2023, eager attention, FP16",
            "source": "KV-Runahead, arXiv:2405.05329, tables 2 to 4: rows at 300 GB/s and on one GPU",
            "measured": f"gemm, links: as profile {_MEASURED}",
            "command": "python -m validate.published.fit",
            "fitted": "bytes_per_s of attention and elementwise (one), layer_s, kernel_s, gather_piece_s, resume_s,"
            " score_bytes of falcon",
        },
    )


@cache
def _measured() -> CalibrationProfile:
    """What is measured elsewhere."""
    profile = load_profile(_MEASURED)
    return replace(profile, kernels=replace(profile.kernels, gemm=replace(profile.kernels.gemm, measured=())))


@cache
def _first(row: Row) -> Scenario:
    return make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=profile_of(START, None))[0]


def scenario_of(row: Row, profile: CalibrationProfile) -> Scenario:
    """The paper's set-up for a row at full bandwidth."""
    return replace(_first(row), profile=profile)


def partitions_for(rows: Sequence[Row], profile: CalibrationProfile, method: str = "analytical") -> Partitions:
    """The partition of each row, searched with this profile where the strategy says so."""
    found = {}
    for row in rows:
        scenario, strategy = scenario_of(row, profile), get_strategy(row.strategy)
        if strategy.partition_rule == "search":
            found[row] = search(scenario, strategy, method=method).partition
        else:
            found[row] = Partition.even(row.context_len, row.num_gpus)
    return found


def ttft_s(row: Row, profile: CalibrationProfile, partition: Partition) -> float:
    """Predicted TTFT of a row with a given partition."""
    scenario = scenario_of(row, profile)
    return run_partition(scenario, get_strategy(row.strategy), partition).ttft_s


def errors(rows: Sequence[Row], profile: CalibrationProfile, partitions: Partitions) -> Array:
    """Logarithms of predicted over reported."""
    return np.log([ttft_s(row, profile, partitions[row]) / row.ttft_s for row in rows])
