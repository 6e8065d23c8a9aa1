"""Fit profile a100-eager to the published rows: `python -m validate.published.fit`.

Seven constants are fitted; everything else is counted or measured elsewhere. The fitted constants are
- bytes per second of the score matrices, element-wise kernels and copies, never above the datasheet's;
- host seconds per layer, host seconds per kernel, host seconds per rank of an all-gather, and the idle time of the
  device after communication;
- copies of a message's K and V for whose time its sender computes nothing else, in a chain of KV-Runahead;
- bytes that Falcon's code moves per score element: 12 to 16 counted without ALiBi and 44 with it, but the rows of both
  models are best predicted with about 24. Llama's 28 bytes are counted.
Host seconds per kernel are fitted to Llama (40 kernels per layer; 42 with shared KV heads), Falcon 7B (38) and Falcon
1B (19) together. Rows of one family hardly determine host seconds per kernel, or Falcon's bytes: the priors are 10 us
per kernel and Llama's bytes, within a factor of two; that of the copies, which rows without chains do not determine, is
what both ends of a message would lose if they stopped for the transfer.
Counted are kernels, bytes of the element-wise kernels and of Llama's score matrix (kvrsim/kernels/elementwise.py), and
copies of K and V in the paper's pseudo-code (stacked by all ranks; concatenated with an earlier prefix; copied twice
where torch's list all-gather unpacks pieces that are then concatenated).
Measured elsewhere are matrix products by tiles and waves (profile a100-vidur: vidur's A100, the library of that time),
the link (NCCL send/recv between two A100s of a DGX, vidur) and the all-gather (NCCL on A100, NVIDIA). QK^T and PV have
the rate of those products in full waves. Each kernel takes 2 us to start, like the smallest ones that vidur timed.
Messages overlap computation, as the paper says, but take memory bandwidth and multiprocessors from their sender's
attention, which runs beside them: time in proportion to their bytes, fitted to be about what both ends would lose if
they stopped for the transfer. Messages that held the compute streams of both
ends for their whole time would explain the TTFTs as well, but not the little that a noisy network changes (Fig. 11).
A receive runs beside the projections, and its end is what the rank waits for; nothing is charged to it: with such a
charge even chunks would not be faster than TSP, as they are in the paper. No constant is fitted to the rows at 10 and
1 GB/s, or to the noisy network (docs/results/figures.md, docs/results/studies.md).

These assumptions were chosen with knowledge of the paper's figures, so the cross-validated error does not include their
effect.

KVR-S rows need a partition: each round searches partitions with the present constants, then fits the constants with
these partitions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from scipy.optimize import least_squares

from kvrsim.builder import make_scenario
from kvrsim.engine import HostRates, load_engine
from kvrsim.execution import place
from kvrsim.executors.run import run_partition
from kvrsim.io.schema import JsonObject, read, write_json
from kvrsim.kernels.attention import EagerRates
from kvrsim.kernels.elementwise import CacheCopies, ElementwiseRates
from kvrsim.kernels.profile import CalibrationProfile, KernelRates, LinkCoverage, Residual, ValidRange, load_profile
from kvrsim.program import Array
from kvrsim.published import PublishedTtft, read_rows
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import get_strategy
from planner.search.search import search
from validate.published.compare import BANDWIDTH, DATA, check_row

_ABOUT = JsonObject.read(DATA / "a100_eager.json", "profile")
_MEASURED = "a100-vidur"
_KERNEL_S = 2e-6  # seconds to start a kernel on the device
_ATTENTION_S = 2e-5  # seconds to start the ten kernels of attention
NAMES = ("hbm", "layer_s", "kernel_s", "gather_piece_s", "resume_s", "falcon_bytes", "message_copies")
START = np.log([1.57e12, 2.1e-3, 2.3e-5, 8.5e-5, 5e-4, 24.0, 6.5])

Partitions = dict[PublishedTtft, Partition]


def profile_of(log_constants: Array, residual: Residual | None) -> CalibrationProfile:
    """The profile with these constants, which are given as logarithms."""
    measured = _base_profile()
    gemm = measured.kernels.gemm
    constants = [float(value) for value in np.exp(log_constants)]
    if residual is not None:  # the profile that ships
        constants = [float(f"{value:.4g}") for value in constants]
    hbm, layer_s, kernel_s, piece_s, resume_s, falcon_bytes, message_copies = constants
    eager = EagerRates(
        flops_per_s=measured.kernels.gemm.flops_per_s,
        bytes_per_s=hbm,
        start_s=_ATTENTION_S,
        score_bytes={"falcon": falcon_bytes},
    )
    return CalibrationProfile(
        name="a100-eager",
        gpu="a100-80gb",
        description=_ABOUT.text("description"),
        not_covered=_ABOUT.text("not_covered"),
        kernels=KernelRates(
            gemm=gemm,
            attention={"eager": eager},
            elementwise=ElementwiseRates.uniform(hbm, fused=False, start_s=_KERNEL_S),
            copies=CacheCopies(keep=1.0, append=1.0, gather=2.0),
            head_on_all_tokens=True,
            repeats_rotary=True,
        ),
        host=HostRates(layer_s=layer_s, kernel_s=kernel_s, gather_piece_s=piece_s, resume_s=resume_s),
        links=replace(measured.links, sends="overlap", sends_over_bus="sender", message_copies=message_copies),
        valid=read(ValidRange, _ABOUT.child("valid")),
        operations={kind: measured.operations[kind] for kind in ("gemm", "send_recv", "all_gather")},
        residual=residual,
        provenance=_ABOUT.child("provenance").fields,
    )


@cache
def _base_profile() -> CalibrationProfile:
    """The profile with the constants that were measured elsewhere."""
    profile = load_profile(_MEASURED)
    return replace(profile, kernels=replace(profile.kernels, gemm=replace(profile.kernels.gemm, measured=())))


@cache
def _first(row: PublishedTtft) -> Scenario:
    return make_scenario(ctx=row.context_len, gpus=row.num_gpus, model=row.model, profile=profile_of(START, None))[0]


def full_bandwidth_scenario(row: PublishedTtft, profile: CalibrationProfile) -> Scenario:
    """The paper's set-up for a row at full bandwidth."""
    return replace(_first(row), profile=profile)


def partitions_for(
    rows: Sequence[PublishedTtft], profile: CalibrationProfile, method: str = "analytical"
) -> Partitions:
    """The partition of each row; if the strategy searches for one, it is searched with this profile."""
    partitions = {}
    for row in rows:
        strategy = get_strategy(row.strategy)
        if strategy.partition_rule == "search":
            partitions[row] = search(place(full_bandwidth_scenario(row, profile), strategy), method=method).partition
        else:
            partitions[row] = Partition.even(row.context_len, row.num_gpus)
    return partitions


def ttft_s(row: PublishedTtft, profile: CalibrationProfile, partition: Partition) -> float:
    """Predicted TTFT of a row with a given partition."""
    execution = place(full_bandwidth_scenario(row, profile), get_strategy(row.strategy))
    return run_partition(execution, partition).ttft_s


def errors(rows: Sequence[PublishedTtft], profile: CalibrationProfile, partitions: Partitions) -> Array:
    """Logarithms of predicted / reported TTFTs."""
    return np.log([ttft_s(row, profile, partitions[row]) / row.ttft_s for row in rows])


_SHIPPED = Path(__file__).parents[2] / "kvrsim" / "data"
PATH = _SHIPPED / "profiles" / "a100-eager.json"
ENGINE = _SHIPPED / "engines" / "hf-2023.json"
LEFT_OUT = DATA / "a100_eager_left_out.json"
_MOST = np.log([2.039e12, 1.0, 1.0, 1.0, 1.0, 100.0, 100.0])  # upper bounds; HBM bytes/s of the NVIDIA A100 80GB SXM
_STEPS = np.array([0.05, 0.02, 0.2, 0.05, 0.2, 0.05, 0.2])  # scales of the first step of each constant
# Priors, by index, of constants that the rows may not determine.
PRIORS = {2: np.log(1e-5), 5: np.log(28.0), 6: np.log(6.8)}
_PRIOR_SD = np.log(2.0)
_ROUNDS = 4
_LEAST_GAIN = 2e-3  # minimum relative gain of a round; a smaller gain ends the fit
_NOISE = 0.03  # relative noise of a measured TTFT

Errors = dict[PublishedTtft, float]  # logarithms of predicted / reported, by row


def fit(rows: Sequence[PublishedTtft]) -> Array:
    """Fit the constants and return their logarithms; rows with coarse rounding have less weight.

    Each round fits with the partitions of the constants so far. The result is that of the best round, where each round
    is evaluated with partitions searched for its constants.
    """
    weight = _weights(rows)
    best = START
    best_cost = np.inf
    for round_ in range(_ROUNDS):
        partitions = partitions_for(rows, profile_of(best, None))
        solved = solve(rows, weight, partitions, best)
        cost = _cost(rows, weight, partitions_for(rows, profile_of(solved, None)), solved)
        if cost >= best_cost * (1 - _LEAST_GAIN):
            break
        best = solved
        best_cost = cost
        constants = ", ".join(f"{name} {value:.4g}" for name, value in zip(NAMES, np.exp(best), strict=True))
        _say(f"  round {round_ + 1}: {constants}, cost {best_cost:.5f}")
    return best


def fit_once(rows: Sequence[PublishedTtft]) -> Array:
    """Fit the constants to some of the rows in one round: the best partitions hardly depend on the rows left out.

    It begins where `fit` does, not at the constants of all rows: near these, the fit may end before it has forgotten
    the rows that are left out.
    """
    return solve(rows, _weights(rows), partitions_for(rows, profile_of(START, None)), START)


def _weights(rows: Sequence[PublishedTtft]) -> Array:
    """The weight of each row: less where the printed digits are coarse."""
    return np.array([_NOISE / np.hypot(_NOISE, row.rounding_s / row.ttft_s) for row in rows])


def solve(rows: Sequence[PublishedTtft], weight: Array, partitions: Partitions, start: Array) -> Array:
    """Fit by robust least squares of the weighted errors, with rates at most the datasheet's."""
    solved = least_squares(
        lambda x: np.append(weight * errors(rows, profile_of(x, None), partitions), _prior_errors(x)),
        start,
        bounds=(np.full(len(start), -np.inf), _MOST),
        loss="soft_l1",
        f_scale=_NOISE,
        diff_step=1e-4,
        x_scale=_STEPS,
        ftol=1e-5,
        xtol=1e-4,
    )
    return np.asarray(solved.x)


def _prior_errors(constants: Array) -> Array:
    """Distances of constants from their priors, on the scale of weighted errors."""
    return np.array([_NOISE * (constants[index] - prior) / _PRIOR_SD for index, prior in PRIORS.items()])


def _cost(rows: Sequence[PublishedTtft], weight: Array, partitions: Partitions, constants: Array) -> float:
    """The value that `solve` minimises: the soft absolute value of the weighted errors."""
    weighted = weight * errors(rows, profile_of(constants, None), partitions)
    scaled = np.append(weighted, _prior_errors(constants)) / _NOISE
    return float(np.mean(np.sqrt(1.0 + scaled**2) - 1.0))


def predict(rows: Sequence[PublishedTtft], constants: Array) -> Errors:
    """Logarithms of predicted / reported, with the partitions that the planner chooses."""
    profile = profile_of(constants, None)
    return dict(zip(rows, errors(rows, profile, partitions_for(rows, profile, "auto")), strict=True))


def ape(logs: Errors) -> Array:
    """Absolute relative errors."""
    return np.abs(np.expm1(list(logs.values())))


def speedup_errors(logs: Errors) -> Array:
    """Absolute relative errors of KVR-S's speed-up over TSP."""
    tsp = {(row.model, row.context_len, row.num_gpus): error for row, error in logs.items() if row.strategy == "tsp"}
    ratios = [tsp[row.model, row.context_len, row.num_gpus] - logs[row] for row in logs if row.strategy == "kvr-s"]
    return np.abs(np.expm1(ratios))


def p80_ape(left_out: Errors) -> float:
    """80th percentile of the absolute errors; all models have the same weight, whatever their numbers of rows."""
    by_model = _by_model(left_out)
    sizes = np.concatenate(list(by_model.values()))
    weights = np.concatenate([np.full(len(own), 1 / len(own)) for own in by_model.values()])
    order = np.argsort(sizes)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(sizes[order][np.searchsorted(shares, 0.8 - 1e-9)])


def coverage(left_out: Errors) -> float:
    """Mean over models of the share of a model's rows within the 80th percentile of the other models' errors."""
    inside = []
    for model, own in _by_model(left_out).items():
        others = {row: error for row, error in left_out.items() if row.model != model}
        inside.append(np.mean(own <= p80_ape(others)))
    return float(np.mean(inside))


def _by_model(logs: Errors) -> dict[str, Array]:
    models = dict.fromkeys(row.model for row in logs)
    return {model: ape({row: error for row, error in logs.items() if row.model == model}) for model in models}


def family(row: PublishedTtft) -> str:
    """Family of models with one architecture, such as "llama"."""
    return row.model.split("-")[0]


def _fit_and_predict(name: str, rows: Sequence[PublishedTtft], test: Sequence[PublishedTtft]) -> Errors:
    """Predict the rows of a test by a fit to all others."""
    logs = predict(test, fit_once([row for row in rows if row not in test]))
    _say(f"{name}: mean absolute error {ape(logs).mean():.1%}")
    return logs


def main() -> None:
    """Fit, cross-validate leaving one model out at a time, and write the profile."""
    rows = [row for row in read_rows() if row.used_for_calibration]
    models = sorted({row.model for row in rows})
    families = sorted({family(row) for row in rows})
    tests = {f"without {model}": [row for row in rows if row.model == model] for model in models}
    tests |= {f"no {one}": [row for row in rows if family(row) == one] for one in families}
    tests["up to 4k, on longer"] = [row for row in rows if row.context_len > 4096]
    tests["up to 4 GPUs, on 8"] = [row for row in rows if row.num_gpus > 4]
    constants = fit(rows)
    tasks = [delayed(_fit_and_predict)(name, rows, test) for name, test in tests.items()]
    *left_out, longer, more_gpus = Parallel(n_jobs=-1)(tasks)
    crossed = {row: error for logs in left_out[: len(models)] for row, error in logs.items()}
    others = {row: error for logs in left_out[len(models) :] for row, error in logs.items()}
    own = predict(rows, constants)
    figures = {
        "mape": ape(own).mean(),
        "median_ape": np.median(ape(own)),
        "cross_validated_mape": ape(crossed).mean(),
        "cross_validated_median_ape": np.median(ape(crossed)),
        "cross_validated_speedup_mape": speedup_errors(crossed).mean(),
        "other_family_mape": ape(others).mean(),
        "p80_ape": p80_ape(crossed),
        "coverage": coverage(crossed),
        "longer_mape": ape(longer).mean(),
        "more_gpus_mape": ape(more_gpus).mean(),
    }
    shares: Any = {key: round(float(value), 4) for key, value in figures.items()}
    residual = Residual(**shares, num_rows=len(rows), layouts=("context",))
    profile = profile_of(constants, residual)
    profile.write(PATH)
    profile = replace(profile, residual=replace(residual, links=link_coverage()))
    profile.write(PATH)
    write_engine(profile)
    left_out_errors = {row.case: round(float(np.expm1(error)), 4) for row, error in crossed.items()}
    write_json(LEFT_OUT, {"source": "python -m validate.published.fit", "rel_error": left_out_errors})
    _say(f"{PATH.name}: {residual}")


def link_coverage() -> tuple[LinkCoverage, ...]:
    """The coverage of the shipped profile on links that it was not fitted to."""
    inside: dict[str, list[bool]] = {link: [] for link in BANDWIDTH}
    for row in read_rows():
        if row.link in inside:
            inside[row.link].append(check_row(row)["inside"])
    return tuple(
        LinkCoverage(bytes_per_s=BANDWIDTH[link], coverage=float(np.mean(each)), num_rows=len(each))
        for link, each in inside.items()
    )


def write_engine(profile: CalibrationProfile) -> None:
    """Write the profile's host costs to the record of the engine hf-2023."""
    replace(load_engine(ENGINE.stem), host=profile.host).write(ENGINE)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    from validate.published import fit as this_module  # processes import its functions by name, not those of __main__

    this_module.main()
