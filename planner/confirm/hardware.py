"""Hardware: how a candidate runs on this machine. It translates values of the simulator into those of the runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvrsim.choices import RankBackend
from kvrsim.errors import ABSENT, InputError
from kvrsim.execution import place
from kvrsim.io.files import is_first_rank
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import Gather
from kvrsim.memory import memory_of
from kvrsim.model.load import checkpoint_files, config_path, read_text_part
from kvrsim.runtime import host
from kvrsim.runtime.plan import ModelChoice, OnProgress, RankSettings, RunPlan, run_strategy
from kvrsim.scenario import Scenario
from kvrsim.strategies import STRATEGIES
from kvrsim.units import format_bytes, format_count
from planner.candidates import Candidate

Mode = Literal["ranks", "virtual"]

CALIBRATE = "kvrsim calibrate all makes one"
NO_REFERENCE = "logits are not compared: a single process's prefill does not fit in memory"
_MESSAGE_TIMEOUT_S = 60.0  # the least timeout of a message
_TIMEOUT_FACTOR = 6.0  # ratio of timeouts to predicted durations
_START_S = 120.0  # time limit in which processes start and build their models, seconds
_LEAST_READ_BYTES_PER_S = 1e8  # assumed least rate at which weights are read from a disk
_LONGEST_STEP_S = 2.0  # assumed longest seconds of a decoded token
_UNPREDICTED_S = 100.0  # assumed seconds of a prefill without a profile of this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """Functions that get messages and progress while ranks work."""

    note: Callable[[str], object] = lambda text: None
    progress: OnProgress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The machine on which ranks run, and how ranks are started."""

    config: str  # the model's configuration: a built-in name, a config.json or its folder
    device: str = "cpu"  # "cpu" or "cuda"
    backend: RankBackend | None = None  # None: NCCL where each rank has its own GPU, else gloo
    threads: int = 1  # threads per rank on a CPU
    repeats: int = 5  # measured prefills of each candidate
    warmups: int = 1  # prefills of each candidate before the measured ones
    seed: int = 0  # seed of random weights and of prompts
    random_weights: bool = False  # whether weights are random although the model's folder has some
    output_tokens: int = 1  # tokens that each candidate generates
    host_memory: bool = False  # whether NCCL sends through host memory instead of directly between GPUs
    side_traffic_bytes: int | None = None  # bytes of each message of a sidecar; None: no sidecar
    emulated: bool = False  # whether the scenario's links replace the machine's own
    timeout_s: float | None = None  # timeout of a message; None: derived from the predicted duration
    other_machine: bool = False  # whether to measure although the profile is of another machine

    def runnable(self, scenario: Scenario, *, needs_profile: bool = True) -> Scenario:
        """Return the scenario as ranks can run it: emulated links are independent, even if the machine has a bus.

        Raises InputError where the runtime cannot run the scenario or the profile is of another machine, before
        anything starts.
        """
        request = scenario.request
        cluster = scenario.cluster
        profile = scenario.profile
        if self.repeats < 1:
            raise InputError("repeats", self.repeats, "at least 1")
        here = host.device_name(host.chosen_device(self.device))
        if needs_profile and profile is None:
            raise InputError("profile", scenario.profile_name, f"a profile of this machine; {CALIBRATE}")
        if profile is not None and not self.other_machine and not is_same_device(profile.gpu, here):
            accepted = f"a profile of this machine, {here}; {CALIBRATE}; or --other-machine"
            raise InputError("profile", f"{scenario.profile_name}, measured on {profile.gpu}", accepted)
        if request.cached_prefix:
            raise InputError("cached_prefix", request.cached_prefix, "0: the runtime prefills whole contexts")
        if cluster.num_gpus > request.new_tokens:
            raise InputError("gpus", cluster.num_gpus, f"at most one GPU per token, here {request.new_tokens}")
        from kvrsim.runtime.geometry import check_kernel

        check_kernel(scenario.model.model_type, scenario.kernel)
        self.choice(scenario)
        if self.host_memory and self.device != "cuda":
            raise InputError("host_memory", here, "GPUs: on a CPU all messages go through host memory")
        if self.side_traffic_bytes is not None and host.started_by_torchrun():
            raise InputError("side_traffic", "torchrun", "ranks that this command starts itself")
        if not self.emulated:
            return scenario
        return replace(scenario, cluster=replace(cluster, topology="switch"))

    def choice(self, scenario: Scenario) -> ModelChoice:
        """Return the model as the ranks load it.

        Raises InputError for a dtype that the runtime lacks, or a checkpoint with more than a text model.
        """
        checkpoint = None
        if not self.random_weights and (files := checkpoint_files(self.config)):
            checkpoint = str(files[0].parent)
            config = JsonObject.read(config_path(self.config, "model"), "model")
            if read_text_part(config)[1]:
                accepted = "the checkpoint of a text model, or --random-weights: it has other parts, such as vision"
                raise InputError("model", self.config, accepted)
        return ModelChoice(
            config=self.config,
            dtype=scenario.request.dtype,
            attention=scenario.kernel,  # type: ignore[arg-type]
            seed=self.seed,
            checkpoint=checkpoint,
        )

    def check(self, candidate: Candidate) -> None:
        """Raise InputError where the runtime cannot run the candidate with this model, before the model is loaded."""
        from kvrsim.runtime.exchange import exchange_of
        from kvrsim.runtime.model import geometry_of

        plan = self.run_plan(candidate)
        choice = self.choice(candidate.scenario)
        exchange_of(plan.strategy).check(plan, geometry_of(choice.config, choice.attention))

    def longest_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds of the longest prefill; a fixed guess without a profile of this machine."""
        if candidates[0].scenario.profile is None or self.other_machine:
            return _UNPREDICTED_S
        return max(candidate.ttft_s for candidate in candidates)

    def launch(self, scenario: Scenario, num_ranks: int, longest_s: float, count: float) -> RankSettings:
        """Return the options with which ranks are started for `count` prefills, the longest of `longest_s` seconds."""
        decoding_s = (self.output_tokens - 1) * min(longest_s, _LONGEST_STEP_S)  # other ranks wait meanwhile
        loading_s = 0.0
        if not self.random_weights:
            loading_s = sum(path.stat().st_size for path in checkpoint_files(self.config)) / _LEAST_READ_BYTES_PER_S
        timeout_s = self.timeout_s or max(_MESSAGE_TIMEOUT_S, loading_s, _TIMEOUT_FACTOR * (longest_s + decoding_s))
        link = None
        if self.emulated and num_ranks > 1:
            link = scenario.cluster.link
        return RankSettings(
            num_ranks=num_ranks,
            device=self.device,
            backend=self.backend,
            timeout_s=timeout_s,
            deadline_s=_START_S + loading_s + timeout_s + _TIMEOUT_FACTOR * (count * longest_s + 2 * decoding_s),
            threads=self.threads,
            link=link,
            peer_to_peer=not self.host_memory,
        )

    @property
    def devices(self) -> int:
        """Number of ranks that this machine can compute at the same time."""
        return host.devices(self.device, self.threads)

    def gpus_of(self, num_ranks: int) -> range:
        """Return CUDA's numbers of the GPUs of these ranks on this host, for the process that reports on them."""
        if self.device != "cuda" or not is_first_rank():
            return range(0)
        return range(min(num_ranks, self.devices))

    def run_plan(self, candidate: Candidate) -> RunPlan:
        """Return the candidate's plan for the ranks; their attention covers the same tokens as in the simulation.

        Raises InputError for a strategy that the runtime cannot run, or for query blocks without a profile.
        """
        scenario = candidate.scenario
        strategy = candidate.strategy
        run_as = run_strategy(strategy.name)
        blocks: tuple[tuple[int, ...], ...] = ()
        if strategy.query_blocks != (1,):
            if scenario.profile is None:
                which = f"a profile of this machine, by which {strategy.name} chooses query blocks"
                raise InputError("profile", ABSENT, f"{which}; {CALIBRATE}")
            blocks = candidate.program.query_blocks or ()
        gather = self.gather(scenario)
        if strategy.name == "tp":
            gather = self.gather(scenario, "all_reduce")
        return RunPlan(
            strategy=run_as,
            query_blocks=blocks,
            partition=candidate.partition,
            batch=scenario.request.batch,
            gather=gather,
            stage_layers=candidate.execution.stage_layers,
            output_tokens=self.output_tokens,
        )

    def gather(self, scenario: Scenario, collective: Literal["all_gather", "all_reduce"] = "all_gather") -> Gather:
        """Return the algorithm of a collective to which the profile was fitted.

        The algorithm is a ring over emulated links, and also if the profile does not name one.
        """
        if self.emulated or scenario.profile is None:
            return "ring"
        fit = scenario.profile.operations.get(collective)
        if fit is None or fit.gather is None:
            return "ring"
        return fit.gather


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Memory that several ranks share: that of a GPU, or of this host."""

    limit_bytes: float  # memory for all these ranks together
    num_ranks: int  # number of ranks that share the memory, including ranks without a chunk
    on_gpu: bool
    mode: Mode
    output_tokens: int = 1  # tokens that are generated; those after the first need memory for their K and V

    @classmethod
    def of(cls, scenario: Scenario, hardware: Hardware, mode: Mode) -> MemoryBudget:
        """Return a GPU's memory, or this host's free memory, times the scenario's memory fraction."""
        on_gpu = hardware.device == "cuda"
        num_ranks = scenario.cluster.num_gpus
        if mode == "virtual":
            num_ranks = 1
        if host.started_by_torchrun():
            num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        if on_gpu:
            limit = float(scenario.memory_limit.nbytes)
            num_ranks = -(-num_ranks // max(1, hardware.devices))
        else:
            limit = scenario.memory_fraction * host.free_memory()
        return cls(
            limit_bytes=limit, num_ranks=num_ranks, on_gpu=on_gpu, mode=mode, output_tokens=hardware.output_tokens
        )

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return the peak memory of the ranks that share the budget; all candidates use the same KV buffers."""
        scenario = candidate.scenario
        request = scenario.request
        weights = scenario.model.weight_bytes(request.dtype_bytes)  # ranks' parts are views of all weights
        decoded = request.batch * scenario.model.cache_bytes(self.output_tokens - 1, request.dtype_bytes)
        memory = memory_of(candidate.execution, candidate.partition)  # no simulation
        ranks = [replace(rank, weights=weights, kv_cache=rank.kv_cache + round(decoded)) for rank in memory]
        if self.mode == "virtual":  # one device runs each rank with the K and V of the whole context
            kv_cache = max(rank.kv_cache for rank in ranks)
            ranks = [replace(rank, kv_cache=kv_cache, gathered=0) for rank in ranks]
        else:
            idle = replace(ranks[0], kv_cache=0, gathered=0, activations=0, scores=0, logits=0)
            ranks += [idle] * (scenario.cluster.num_gpus - len(ranks))
        peaks = [rank.total for rank in ranks]
        if not self.on_gpu:  # the memory of the runtime is CUDA's
            peaks = [rank.total - rank.runtime for rank in ranks]
        return sum(sorted(peaks)[-self.num_ranks :])

    def fits_reference(self, scenario: Scenario) -> bool:
        """Whether the prefill of one process, the reference of the logits, fits in memory."""
        single = Candidate.of(place(scenario, STRATEGIES["single"]), (scenario.request.new_tokens,))
        return self.needed_bytes(single) <= self.limit_bytes

    def check(self, candidates: Mapping[str, Candidate]) -> dict[str, int]:
        """Return the bytes that each candidate needs; raise InputError with remedies if none of them fits."""
        needed = {name: self.needed_bytes(candidate) for name, candidate in candidates.items()}
        name = min(needed, key=lambda name: needed[name])
        if needed[name] <= self.limit_bytes:
            return needed
        scenario = candidates[name].scenario
        weights = self.num_ranks * scenario.model.weight_bytes(scenario.request.dtype_bytes)
        takes = f"{name} on {format_count(self.num_ranks, 'rank')} takes {format_bytes(needed[name])}"
        if weights > 0.5 * self.limit_bytes:
            accepted = f"a model that fits in the {self.name}, such as tiny-llama, or fewer `gpus`: {takes}"
            raise InputError("model", scenario.model.name, accepted)
        raise InputError("ctx", scenario.request.context_len, f"a context that fits in the {self.name}: {takes}")

    @property
    def name(self) -> str:
        """Describe the budget."""
        place = "a GPU" if self.on_gpu else "this host"
        return f"{format_bytes(self.limit_bytes)} that may be used of {place}"


def is_same_device(profiled: str, device: str) -> bool:
    """Whether the device names of the profile and of this machine mean the same device."""
    profiled_words = _words(profiled)
    device_words = _words(device)
    profiled_numbers = {word for word in profiled_words if _has_digit(word)}
    device_numbers = {word for word in device_words if _has_digit(word)}
    if profiled_numbers and device_numbers:  # the model numbers say more than the words, such as "nvidia"
        return not profiled_numbers.isdisjoint(device_numbers)
    return not profiled_words.isdisjoint(device_words)


def _has_digit(word: str) -> bool:
    return any(map(str.isdigit, word))


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "cpu", "r", "tm", "1", "2", "4", "8", "thread"}
