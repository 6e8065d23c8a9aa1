"""Hardware: how a candidate runs on this machine; translates the simulator's values to the runtime's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from kvrsim.choices import RankBackend
from kvrsim.errors import InputError
from kvrsim.kernels.profile import Gather
from kvrsim.scenario import Scenario
from kvrsim.strategies import Strategy
from kvrsim.strategies.pipeline import layers_of
from planner.candidates import Candidate

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Job, ModelChoice
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.ranks import Launch, OnProgress
    from kvrsim.runtime.transport import EmulatedLink

Mode = Literal["ranks", "virtual"]

_MESSAGE_TIMEOUT_S = 60.0  # the least timeout of a message
_TIMEOUT_FACTOR = 6.0  # timeouts over predicted durations
_START_S = 120.0  # for processes to start and models to be made
_UNKNOWN_S = 100.0  # of a prefill without a profile
_NAMED_PROCESSES = 3  # in a note
_LEAST_ACCOUNTED_S = 0.2  # of a prefill; for shorter ones the system's CPU accounting is too coarse


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporter:
    """Where messages and progress go while ranks work."""

    note: Callable[[str], object] = lambda text: None
    progress: OnProgress | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Where and how ranks run."""

    config: str  # of the model: a built-in name, a config.json or its folder
    device: str = "cpu"  # or "cuda"
    backend: RankBackend | None = None  # None: NCCL where each rank has its own GPU, else gloo
    threads: int = 1  # of each rank, on a CPU
    repeats: int = 5  # measured prefills of each candidate
    warmups: int = 1  # before them
    seed: int = 0  # of weights, prompts and side traffic
    init_std: float | None = None  # standard deviation of the random weights; None: the config's
    emulated: bool = False  # the scenario's links override the machine's own
    traffic_share: float = 0.0  # share of an emulated link's time that other traffic takes
    traffic_bytes: float = 2**20  # of each message of that traffic
    timeout_s: float | None = None  # of a message; None: from the predicted duration

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError("repeats", self.repeats, "at least 1")
        if self.traffic_share and not self.emulated:
            raise InputError("side_traffic", self.traffic_share, "nothing without `link_bandwidth`: links are emulated")

    def runnable(self, scenario: Scenario, *, needs_profile: bool = True) -> Scenario:
        """Return the scenario as ranks can run it: emulated links are independent, even where the machine has a bus.

        Raises InputError where the runtime cannot run it, before anything is started.
        """
        request, cluster = scenario.request, scenario.cluster
        if needs_profile and scenario.profile is None:
            accepted = "a profile of this machine; kvrsim calibrate all makes one"
            raise InputError("profile", scenario.profile_name, accepted)
        if request.cached_prefix:
            raise InputError("cached_prefix", request.cached_prefix, "0: the runtime prefills whole contexts")
        if cluster.num_gpus > request.new_tokens:
            raise InputError("gpus", cluster.num_gpus, f"at most one GPU per token, here {request.new_tokens}")
        from kvrsim.runtime.geometry import check_kernel

        check_kernel(scenario.model.model_type, scenario.kernel)
        self.choice(scenario)
        return replace(scenario, cluster=cluster.with_topology("switch")) if self.emulated else scenario

    def choice(self, scenario: Scenario) -> ModelChoice:
        """Return the model as the ranks load it; raise InputError for a dtype that the runtime lacks."""
        from kvrsim.runtime.measure import ModelChoice

        return ModelChoice(
            config=self.config,
            dtype=scenario.request.dtype,
            attention=scenario.kernel,  # type: ignore[arg-type]
            device=self.device,
            seed=self.seed,
            init_std=self.init_std,
        )

    def job(self, scenario: Scenario, plans: tuple[RunPlan, ...], *, check: bool) -> Job:
        """Return the job of the ranks. check: compare logits with one process's."""
        from kvrsim.runtime.measure import Job

        return Job(
            model=self.choice(scenario),
            plans=plans,
            repeats=self.repeats,
            warmups=self.warmups,
            link=self.link(scenario),
            check_logits=check,
        )

    def link(self, scenario: Scenario) -> EmulatedLink | None:
        """Return the scenario's link with other traffic between neighbours; None where links are not emulated."""
        from kvrsim.runtime.transport import EmulatedLink, MessageTraffic

        if not self.emulated:
            return None
        num_ranks, link, traffic = scenario.cluster.num_gpus, scenario.cluster.link, None
        if self.traffic_share:
            traffic = MessageTraffic(
                pairs=tuple((rank, (rank + 1) % num_ranks) for rank in range(num_ranks)),
                share=self.traffic_share,
                message_bytes=self.traffic_bytes,
                seed=self.seed,
            )
        return EmulatedLink(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, traffic=traffic)

    def launch(self, num_ranks: int, longest_s: float | None, count: float) -> Launch:
        """Return how ranks are started for `count` prefills. longest_s: predicted for the longest; None: unknown."""
        from kvrsim.runtime.ranks import Launch

        longest_s = longest_s or _UNKNOWN_S
        timeout_s = self.timeout_s or max(_MESSAGE_TIMEOUT_S, _TIMEOUT_FACTOR * longest_s)
        return Launch(
            num_ranks=num_ranks,
            device=self.device,
            backend=self.backend,
            timeout_s=timeout_s,
            deadline_s=_START_S + timeout_s + _TIMEOUT_FACTOR * count * longest_s,
            threads=self.threads,
            pin=True,
        )

    @property
    def devices(self) -> int:
        """Ranks that this machine can compute at once."""
        from kvrsim.runtime.host import devices

        return devices(self.device, self.threads)

    def notes(self) -> tuple[str, ...]:
        """Return a note where other processes use the GPUs that are to be measured."""
        from kvrsim.runtime.host import others_on_gpus

        others = others_on_gpus() if self.device == "cuda" else ()
        names = ", ".join(others[:_NAMED_PROCESSES]) + (", ..." if len(others) > _NAMED_PROCESSES else "")
        return (f"other processes are on the GPUs: {names}",) if others else ()

    def run_plan(self, candidate: Candidate) -> RunPlan:
        """Return a candidate as the ranks run it: attention covers the same tokens in both.

        Raises InputError for a strategy that the runtime cannot run, or for query blocks without a profile.
        """
        from kvrsim.runtime.plan import RunPlan, run_strategy

        scenario, strategy = candidate.scenario, candidate.strategy
        run_as, blocks = run_strategy(strategy.name), None
        if strategy.query_blocks != (1,):
            if scenario.profile is None:
                which = f"a profile of this machine, by which {strategy.name} chooses query blocks"
                raise InputError("profile", "nothing", f"{which}; kvrsim calibrate all makes one")
            blocks = candidate.program.query_blocks
        return RunPlan(
            strategy=run_as,
            query_blocks=blocks or (),
            partition=candidate.partition,
            batch=scenario.request.batch,
            gather=self.gather(scenario, strategy.name),
            stage_layers=layers_of(candidate.per_rank, strategy),
        )

    def gather(self, scenario: Scenario, strategy: str = "tsp") -> Gather:
        """Return the collective that the profile's links were fitted to: an all-reduce for tp, else an all-gather.

        A ring over emulated links, or where it is unknown.
        """
        kind = "all_reduce" if strategy == "tp" else "all_gather"
        fit = None if scenario.profile is None else scenario.profile.operations.get(kind)
        return "ring" if fit is None or fit.gather is None or self.emulated else fit.gather


def check_split(scenario: Scenario, strategy: Strategy, *, generate: int = 0) -> None:
    """Raise InputError where no rank could run its part of the model, or decode `generate` tokens."""
    from kvrsim.runtime.exchange import exchange_of
    from kvrsim.runtime.plan import run_strategy

    exchange = exchange_of(run_strategy(strategy.name))
    exchange.check_family(scenario.model.model_type)
    if generate and not exchange.decodes:
        accepted = f"nothing for {strategy.name}, under which no rank keeps all K and V"
        raise InputError("generate", generate, accepted)


def is_busy(sample_s: float, other_cores: float | None) -> bool:
    """Whether other processes used this machine during a prefill; False where CPU accounting cannot tell."""
    from kvrsim.runtime.host import busy_cores

    return other_cores is not None and sample_s >= _LEAST_ACCOUNTED_S and other_cores > busy_cores()


def other_device_note(gpu: str, device: str) -> tuple[str, ...]:
    """Return a note where, by name, the profile's device is not the measuring one."""
    numbered = [{word for word in _words(name) if any(map(str.isdigit, word))} for name in (gpu, device)]
    same = bool(numbered[0] & numbered[1]) if all(numbered) else bool(_words(gpu) & _words(device))
    note = f"the profile was measured on {gpu}, not on {device}: predictions are for another machine"
    return () if same else (note,)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "cpu", "r", "tm", "1", "2", "4", "8", "thread"}
