"""Statements of a plan: what fits, what is best, what ties, what is bounded, what is extrapolated."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

import kvrsim
from kvrsim.arguments import ScenarioArgs, options_of
from kvrsim.errors import InputError
from kvrsim.execution import Execution
from kvrsim.executors.access import execution_of
from kvrsim.executors.run import ttft_s
from kvrsim.model.mixers import Attention
from kvrsim.model.spec import ModelSpec
from kvrsim.strategies import STRATEGIES, get_strategy
from planner.candidates import Candidate
from validate.statements.arithmetic import MemoryLoad, sizes_of
from validate.statements.claims import Claim, Options, arguments_of, with_change
from validate.statements.questions import LARGE

NEAR = 1.02  # factor within which two TTFTs count as equal
_EQUAL = 1e-6  # relative difference of a TTFT that is simulated again
_EXECUTORS = 1e-3  # relative difference of the two executors
_MOST_RANKS = 8  # GPUs up to which the event executor and random descents simulate
_LAYOUTS = 2  # layouts outside the plan that are simulated
_MISFITS = 6  # strategies outside the plan whose memory is simulated
_PIECES = (2, 8, 32)  # pieces per GPU of a pipeline that is simulated for its memory
_PROFILES = Path(kvrsim.__file__).parent / "data" / "profiles"
_CHECKED = 2**19  # tokens of the longest published prefills of dense models with flash attention
_CHECKED_OTHERS = 2**17  # the same of mixtures, latent attention and recurrences without windows
_LEAST_TABLE = 2**14  # tokens: shorter tables of kernels say less about long contexts
Entry = Mapping[str, Any]  # an entry of `strategies` in the answer's JSON


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A question, its plan, and random numbers for the checks."""

    options: Options
    plan: kvrsim.Plan
    rng: Generator

    @classmethod
    def ask(cls, options: Options, rng: Generator) -> PlannedCase:
        """Plan; raises KvrsimError where the question is refused."""
        return cls(options=options, plan=kvrsim.plan(**arguments_of(options)), rng=rng)

    @cached_property
    def said(self) -> dict[str, Any]:
        """The answer as `kvrsim plan --json` prints it."""
        return self.plan.to_dict()

    @cached_property
    def scenario(self) -> kvrsim.Scenario:
        """The question as the simulator sees it."""
        of_scenario = options_of(ScenarioArgs)
        options = {name: value for name, value in self.options.items() if name in of_scenario}
        return kvrsim.make_scenario(**arguments_of(options))[0]

    @property
    def best(self) -> Entry | None:
        """The entry of the best strategy; None where nothing fits."""
        if self.said["best"] is None:
            return None
        return self.entries[self.said["best"]["strategy"]]

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The entries of `strategies` by name."""
        return {entry["strategy"]: entry for entry in self.said["strategies"]}

    @property
    def limit_bytes(self) -> float:
        """Bytes of a GPU that the prefill may use."""
        fraction = float(self.options.get("memory_fraction", 0.9))
        return float(self.said["cluster"]["gpu"]["memory_bytes"]) * fraction

    @property
    def num_gpus(self) -> int:
        """GPUs of the question."""
        return int(self.said["num_gpus"])

    @property
    def names_not_tried(self) -> set[str]:
        """Names that the answer says were not tried."""
        groups = self.said.get("not_tried") or []
        return {name for group in groups for name in group["strategies"]}

    def simulate(self, strategy: str | kvrsim.Strategy, **more: Any) -> kvrsim.SimResult:
        """Simulate a strategy for this question."""
        options = {key: value for key, value in arguments_of(self.options).items() if key not in _OF_PLANS}
        return kvrsim.simulate(**options | {"strategy": strategy} | more)

    def simulate_entry(self, entry: Entry, **more: Any) -> kvrsim.SimResult:
        """Simulate an entry's strategy with its partition and, for a pipeline, with its stages."""
        strategy: str | kvrsim.Strategy = entry["strategy"]
        if entry.get("layers"):
            named = get_strategy(entry["strategy"])
            strategy = replace(named, name=f"{named.name}-stages", stage_layers=tuple(entry["layers"]))
        return self.simulate(strategy, partition=list(entry["partition"]), **more)

    def load(self) -> MemoryLoad | None:
        """Own arithmetic of the memory; None where the model's layers are not plain."""
        sizes, question = sizes_of(self.options["model"]), self.said["question"]
        if sizes is None or question["prefix_placement"] != "all":
            return None
        weight_bytes = 2.0
        if question["dtype"] == "fp8":
            weight_bytes = 1.0
        if sizes.is_quantised:
            weight_bytes = 0.5
        return MemoryLoad(
            sizes=sizes,
            context_len=question["context_len"],
            batch=question["batch"],
            weight_bytes=weight_bytes,
            element_bytes=2,
        )


_OF_PLANS = ("strategies", "rate", "percentile", "slo", "search_budget", "method", "stride")  # options of plan alone


def check_fits(case: PlannedCase) -> Iterator[Claim]:
    """`fits` and `peak_bytes` of each strategy: the limit, and own arithmetic of the least and the most memory."""
    load = case.load()
    for name, entry in case.entries.items():
        peak = max(entry["peak_bytes"])
        yield Claim(
            kind="fits",
            said=f"{name} {'fits' if entry['fits'] else 'does not fit'}",
            found=f"peak {peak / 1e9:.2f} GB, limit {case.limit_bytes / 1e9:.2f} GB",
            holds=entry["fits"] == (peak <= case.limit_bytes),
        )
        if load is None:
            continue
        together = sum(entry["peak_bytes"])
        yield Claim(
            kind="fits",
            said=f"the GPUs of {name} need {together / 1e9:.1f} GB together",
            found=f"weights and cache alone are {load.least_bytes / 1e9:.1f} GB",
            holds=together >= 0.999 * load.least_bytes,
        )
        if load.sizes.is_dense and case.said["attention"] == "flash" and entry["layout"]["data"] == 1:
            most = _most_bytes(case, load, entry)
            yield Claim(
                kind="fits",
                said=f"a GPU of {name} needs {peak / 1e9:.2f} GB",
                found=f"at most {most / 1e9:.2f} GB",
                holds=peak <= most,
            )
    yield from _left_out(case)


def _most_bytes(case: PlannedCase, load: MemoryLoad, entry: Entry) -> float:
    layers = entry.get("layers") or [load.sizes.num_layers]
    longest = max(entry["partition"]) * load.batch
    return load.most_bytes(tensor=entry["layout"]["tensor"], stage_layers=max(layers), longest=longest)


def _left_out(case: PlannedCase) -> Iterator[Claim]:
    """Strategies that the answer leaves out because they cannot fit, with short pieces and even chunks."""
    if case.best is None:
        return
    left_out = [name for name in case.said["not_compared"] if name not in case.names_not_tried]
    for name in case.rng.permutation(left_out)[:_MISFITS].tolist():
        peak = _least_peak(case, name)
        if peak is not None:
            yield Claim(
                kind="fits",
                said=f"{name} cannot fit",
                found=f"it needs {peak / 1e9:.2f} GB of {case.limit_bytes / 1e9:.2f} GB",
                holds=peak > case.limit_bytes,
            )


def check_nothing_fits(case: PlannedCase) -> Iterator[Claim]:
    """ "Nothing fits": layouts that could fit by own arithmetic; the nearest strategy, and remedies."""
    if case.best is not None:
        return
    names = [name for name in layout_names(case.num_gpus, case.rng) if name not in case.names_not_tried]
    tried = 0
    for name in names:
        if tried == _MISFITS or not _could_fit(case, name):
            continue
        peak = _least_peak(case, name)
        if peak is None:
            continue
        tried += 1
        yield Claim(
            kind="nothing fits",
            said="nothing fits",
            found=f"{name} needs {peak / 1e9:.2f} GB of {case.limit_bytes / 1e9:.2f} GB",
            holds=peak > case.limit_bytes,
        )
    yield from _shortfall(case)


def _shortfall(case: PlannedCase) -> Iterator[Claim]:
    """The nearest strategy, the missing bytes, and each remedy, planned with the change."""
    nearest, shortfall = case.said["nearest"], case.said["shortfall"]
    peaks = {name: max(entry["peak_bytes"]) for name, entry in case.entries.items()}
    least = min(peaks, key=lambda name: peaks[name])
    yield Claim(
        kind="nothing fits",
        said=f"{nearest['strategy']} is nearest, {shortfall['over_bytes']} bytes too much",
        found=f"{least} needs {peaks[least] - case.limit_bytes:.0f} bytes too much",
        holds=nearest["strategy"] == shortfall["strategy"]
        and peaks[nearest["strategy"]] == peaks[least]
        and abs(shortfall["over_bytes"] - (peaks[least] - case.limit_bytes)) < 2,
    )
    for remedy in shortfall["would_fit"]:
        change = remedy["change"]
        changed = with_change({**case.options, "strategies": remedy["strategy"]}, shlex.split(change))
        try:
            again = kvrsim.plan(**arguments_of(changed))
        except InputError as error:
            yield Claim(kind="nothing fits", said=f"would fit: {change}", found=str(error), holds=False)
            continue
        found = "it fits" if again.feasible else again.misfit
        yield Claim(kind="nothing fits", said=f"would fit: {change}", found=found, holds=again.feasible)


def _could_fit(case: PlannedCase, name: str) -> bool:
    """Whether weights and cache of all GPUs together leave room for a strategy, by own arithmetic."""
    load = case.load()
    if load is None:
        return True
    gpus = 1 if name == "single" else case.num_gpus
    return load.least_bytes <= gpus * case.limit_bytes


def _least_peak(case: PlannedCase, name: str) -> int | None:
    """The least peak of a GPU over even partitions of a strategy; None where it does not run here."""
    peaks = []
    with suppress(InputError):
        strategy = get_strategy(name)
        for partition in _even_partitions(case, strategy):
            execution = execution_of(case.scenario, strategy)
            memory = Candidate(execution=execution, partition=partition).memory
            peaks.append(max(rank.total for rank in memory))
    return min(peaks, default=None)


def _even_partitions(case: PlannedCase, strategy: kvrsim.Strategy) -> Iterator[kvrsim.Partition]:
    """Even chunks of a strategy's ranks; pieces of a pipeline, from long to short."""
    execution = execution_of(case.scenario, strategy)
    tokens = execution.request.new_tokens
    ranks = execution.cluster.num_gpus
    if not strategy.is_pipeline:
        yield kvrsim.Partition.even(tokens, ranks)
        return
    for per_gpu in _PIECES:
        yield kvrsim.Partition.even(tokens, max(1, min(per_gpu * case.num_gpus, tokens // 64)))


def layout_names(num_gpus: int, rng: Generator) -> list[str]:
    """Names of layouts over all GPUs, in random order: every split into tensor, pipeline, context and data ranks."""
    powers = [2**exponent for exponent in range(num_gpus.bit_length()) if num_gpus % 2**exponent == 0]
    names = [name for name, strategy in STRATEGIES.items() if strategy.partition_rule != "table"]
    for tensor in powers:
        for stages in powers:
            if num_gpus % (tensor * stages):
                continue
            rest = num_gpus // (tensor * stages)
            head = f"tp{tensor}+" * (tensor > 1)
            if rest == 1:
                names += [f"{head}pp{stages}".removesuffix("+pp1") + end for end in ("", f"+ep{tensor}")]
                continue
            middle = f"pp{stages}+" * (stages > 1)
            for part in (f"cp{rest}", f"cp{rest}-i", f"dp{rest}"):
                layout = f"{head}{middle}{part}"
                names += [layout, f"{layout}+ep{tensor * rest}"]
            if stages == 1 and tensor > 1:
                names += [f"{head}{name}" for name in ("kvr-s", "kvr-e", "ring", "zigzag", "ulysses", "zigzag-ring")]
    return [names[place] for place in rng.permutation(len(names))]


def check_best(case: PlannedCase) -> Iterator[Claim]:
    """TTFTs simulated again, the order, and layouts that the answer does not have."""
    best = case.best
    if best is None:
        return
    fitting = [entry for entry in case.entries.values() if entry["fits"]]
    fastest_s = min(entry["ttft_s"] for entry in fitting)
    if "engine" not in case.options:
        yield Claim(
            kind="best",
            said=f"{best['strategy']} is best, {best['ttft_s']:.6g} s",
            found=f"the fastest that fits takes {fastest_s:.6g} s",
            holds=best["fits"] and best["ttft_s"] <= NEAR * fastest_s,
        )
    for entry in (best, fitting[int(case.rng.integers(len(fitting)))]):
        again_s = case.simulate_entry(entry).ttft_s
        yield Claim(
            kind="best",
            said=f"{entry['strategy']} takes {entry['ttft_s']:.9g} s",
            found=f"simulated again: {again_s:.9g} s",
            holds=math.isclose(again_s, entry["ttft_s"], rel_tol=_EQUAL),
        )
    if case.num_gpus <= _MOST_RANKS and len(best["partition"]) <= _MOST_RANKS:
        event_s = case.simulate_entry(best, executor="event").ttft_s
        yield Claim(
            kind="best",
            said=f"{best['strategy']} takes {best['ttft_s']:.9g} s",
            found=f"event by event: {event_s:.9g} s",
            holds=math.isclose(event_s, best["ttft_s"], rel_tol=_EXECUTORS),
        )
    yield from _others(case, best)


def _others(case: PlannedCase, best: Entry) -> Iterator[Claim]:
    """Layouts that the answer neither compares nor names as not tried: none may be faster than the best."""
    if case.num_gpus > LARGE:
        return
    outside = case.entries.keys() | case.names_not_tried | set(case.said["not_compared"])
    names = [name for name in layout_names(case.num_gpus, case.rng) if name not in outside and "-s" not in name]
    simulated = 0
    for name in names:
        if simulated == _LAYOUTS:
            return
        try:
            result = case.simulate(name)
        except InputError:
            continue
        simulated += 1
        if "engine" in case.options and not launches(case, name, result.partition):
            continue
        yield Claim(
            kind="best",
            said=f"{best['strategy']} is best, {best['ttft_s']:.6g} s",
            found=f"{name} takes {result.ttft_s:.6g} s and {'fits' if result.fits else 'does not fit'}",
            holds=not result.fits or result.ttft_s >= best["ttft_s"] / NEAR,
        )


def launches(case: PlannedCase, strategy: str, partition: Sequence[int]) -> bool:
    """Whether the question's engine launches a strategy."""
    from planner.deploy import deployment_of

    engine = case.options["engine"].partition("@")[0]
    try:
        execution = execution_of(case.scenario, get_strategy(strategy))
        deployment_of(Candidate.of(execution, partition), engine, model=case.options["model"])
    except InputError:
        return False
    return True


_ROUNDS, _DRAWS = 6, 128  # rounds of a random descent, and partitions of a round


def check_bound(case: PlannedCase) -> Iterator[Claim]:
    """Lower bounds: a random descent from the answer's partition finds nothing faster."""
    bounds = case.said["bounds"]
    if case.best is None or bounds is None or case.num_gpus > _MOST_RANKS:
        return
    named = {}
    if bounds["lower_bound_s"] is not None and case.num_gpus > 1:
        named["kvr-s"] = bounds["lower_bound_s"]
    if bounds.get("best"):
        named[bounds["best"]["strategy"]] = bounds["best"]["lower_bound_s"]
    for name, lower_s in named.items():
        execution = execution_of(case.scenario, get_strategy(name))
        ranks = execution.cluster.num_gpus
        if ranks < 2 or execution.request.new_tokens < 8 * ranks:
            continue
        found_s = _descent_s(case, execution, case.entries.get(name))
        yield Claim(
            kind="bound",
            said=f"no partition of {name} is faster than {lower_s:.6g} s",
            found=f"the fastest of {_ROUNDS * _DRAWS} takes {found_s:.6g} s",
            holds=found_s >= lower_s * (1 - 1e-9),
        )


def _descent_s(case: PlannedCase, execution: Execution, entry: Entry | None) -> float:
    """The least TTFT of a random descent that starts at the answer's partition, or at even chunks."""
    ranks = execution.cluster.num_gpus
    tokens = execution.request.new_tokens
    if entry is None:
        start = np.full(ranks, tokens / ranks)
    else:
        start = np.array(entry["partition"], dtype=float)
    best_s, width = math.inf, 0.5
    for _ in range(_ROUNDS):
        factors = np.exp(width * case.rng.standard_normal((_DRAWS, ranks)))
        factors[0] = 1.0
        shares = start * factors
        partitions = np.maximum(1, np.floor(tokens * shares / shares.sum(axis=1, keepdims=True)))
        partitions[:, 0] += tokens - partitions.sum(axis=1)
        partitions = partitions[partitions[:, 0] >= 1]
        seconds = np.asarray(ttft_s(execution, partitions.astype(np.int64))).ravel()
        place = int(seconds.argmin())
        if seconds[place] < best_s:
            best_s = float(seconds[place])
            start = partitions[place]
        width /= 3
    return best_s


def check_tie(case: PlannedCase) -> Iterator[Claim]:
    """Names in `ties`: they fit, and their distance is at most what both intervals allow if no error is shared."""
    best = case.best
    if best is None:
        return
    for name in case.said["best"]["ties"]:
        entry = case.entries.get(name)
        if entry is None:
            yield Claim(kind="tie", said=f"{name} ties", found="it is not in strategies", holds=False)
            continue
        faster, slower = sorted((best, entry), key=lambda one: one["ttft_s"])
        above = math.log(faster["ttft_high_s"] / faster["ttft_s"])
        below = math.log(slower["ttft_s"] / slower["ttft_low_s"])
        apart = math.log(slower["ttft_s"] / faster["ttft_s"])
        yield Claim(
            kind="tie",
            said=f"{name} ties with {best['strategy']}",
            found=f"{math.expm1(apart):.1%} apart; the intervals allow {math.expm1(math.hypot(above, below)):.1%}",
            holds=entry["fits"] and apart <= max(math.hypot(above, below), math.log(NEAR)),
        )


def _compared_tokens(model: ModelSpec) -> int:
    """Tokens of the longest whole prefills of such a model that were compared; 0: none, or further off when longer."""
    kinds = model.layer_kinds
    mixers = [kind.mixer for kind in kinds if kind.mixer is not None]
    has_experts = any(kind.num_experts for kind in kinds)
    if not has_experts and all(isinstance(mixer, Attention) for mixer in mixers):
        return _CHECKED
    for mixer in mixers:
        limits = ("sliding_window", "attention_chunk", "indexer")
        if any(getattr(mixer, limit, None) is not None for limit in limits):
            return 0
    return _CHECKED_OTHERS


def check_extrapolated(case: PlannedCase) -> Iterator[Claim]:
    """The note on extrapolation appears exactly where the question is outside the profile's range.

    Models with flash attention were compared with whole prefills longer than the kernels that were measured.
    """
    name = case.said["profile"]
    if not (_PROFILES / f"{name}.json").exists():
        return
    valid = json.loads((_PROFILES / f"{name}.json").read_text("utf-8"))["valid"]
    question = case.said["question"]
    contexts = valid["context_len"]
    if question["attention"] == "flash" and contexts[1] >= _LEAST_TABLE:
        contexts = [contexts[0], max(contexts[1], _compared_tokens(case.scenario.model))]
    values = {"context": (question["context_len"], contexts), "GPUs": (case.num_gpus, valid["num_gpus"])}
    for what, (value, (low, high)) in values.items():
        outside = not low <= value <= high
        noted = any(note.startswith(f"extrapolated: {what} {value} ") for note in case.said["warnings"])
        yield Claim(
            kind="extrapolated",
            said=f"{what} {value} is {'' if noted else 'not '}extrapolated",
            found=f"{name} was measured from {low} to {high}",
            holds=outside == noted,
        )
