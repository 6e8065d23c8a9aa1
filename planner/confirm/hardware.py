"""Hardware: how a plan runs on this machine; translates the simulator's objects to the runtime's."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvrsim.choices import RankBackend
from kvrsim.compile import build_program, columns
from kvrsim.errors import InputError
from kvrsim.kernels.profile import CalibrationProfile, Gather
from kvrsim.scenario import Partition, Scenario
from kvrsim.strategies import Strategy, get_strategy

if TYPE_CHECKING:
    from kvrsim.runtime.measure import Job, ModelChoice
    from kvrsim.runtime.plan import RunPlan
    from kvrsim.runtime.ranks import Launch
    from kvrsim.runtime.transport import EmulatedLink

_PATIENCE_S = 60.0  # the least timeout of a message
_SLOWER = 6.0  # timeouts are so many times the predicted duration
_SHOWN_OTHERS = 3  # processes that a note names
_START_S = 120.0  # for processes to start and models to be built


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """Where and how ranks run."""

    config: str  # of the model: a built-in name, a config.json or its folder
    device: str = "cpu"  # or "cuda"
    backend: RankBackend | None = None  # None: NCCL where each rank has a GPU of its own, else gloo
    threads: int = 1  # of each rank, on a CPU
    repeats: int = 5  # measured prefills of each candidate
    warmups: int = 1  # before them
    seed: int = 0  # of weights, prompts and side traffic
    init_std: float | None = None  # spread of the random weights; None: the config's
    emulated: bool = False  # the scenario's links override the machine's own
    traffic_share: float = 0.0  # share of an emulated link's time that other traffic takes
    traffic_bytes: float = 2**20  # of each message of that traffic
    timeout_s: float | None = None  # of a message; None: from the predicted duration

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError("repeats", self.repeats, "at least 1")
        if self.traffic_share and not self.emulated:
            raise InputError("side_traffic", self.traffic_share, "nothing without `link_bandwidth`: links are emulated")

    def placed(self, scenario: Scenario) -> Scenario:
        """The scenario as it can be run: emulated links are independent, even where the machine's own are a bus."""
        if not self.emulated or scenario.cluster.topology == "switch":
            return scenario
        return replace(scenario, cluster=scenario.cluster.with_topology("switch"))

    def choice(self, scenario: Scenario) -> ModelChoice:
        """The model as the ranks load it; InputError for a dtype that the runtime has not got."""
        from kvrsim.runtime.measure import ModelChoice

        return ModelChoice(
            config=self.config,
            dtype=scenario.request.dtype,
            attention=scenario.kernel,  # type: ignore[arg-type]
            device=self.device,
            seed=self.seed,
            init_std=self.init_std,
        )

    def job(self, scenario: Scenario, plans: tuple[RunPlan, ...], *, generate: int = 0, check: bool = True) -> Job:
        """The job that the ranks receive."""
        from kvrsim.runtime.measure import Job

        return Job(
            model=self.choice(scenario),
            plans=plans,
            repeats=self.repeats,
            warmups=self.warmups,
            link=self.link(scenario),
            check_logits=check,
            generate=generate,
        )

    def link(self, scenario: Scenario) -> EmulatedLink | None:
        """Return the scenario's link with other traffic between neighbours; None where links are not emulated."""
        from kvrsim.runtime.transport import EmulatedLink, MessageTraffic

        if not self.emulated:
            return None
        num_ranks, traffic = scenario.cluster.num_gpus, None
        if self.traffic_share:
            traffic = MessageTraffic(
                pairs=tuple((rank, (rank + 1) % num_ranks) for rank in range(num_ranks)),
                share=self.traffic_share,
                message_bytes=self.traffic_bytes,
                seed=self.seed,
            )
        link = scenario.cluster.link
        return EmulatedLink(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s, traffic=traffic)

    def launch(self, num_ranks: int, longest_s: float, all_s: float) -> Launch:
        """How ranks are started; timeouts follow from the predicted longest prefill and their sum."""
        from kvrsim.runtime.ranks import Launch

        patience_s = self.timeout_s or max(_PATIENCE_S, _SLOWER * longest_s)
        return Launch(
            num_ranks=num_ranks,
            device=self.device,
            backend=self.backend,
            timeout_s=patience_s,
            deadline_s=_START_S + patience_s + _SLOWER * all_s,
            threads=self.threads,
            pin=True,
        )


def devices_of(hardware: Hardware) -> int:
    """How many ranks this machine can compute at once."""
    from kvrsim.runtime.host import devices

    return devices(hardware.device, hardware.threads)


def gpu_notes(device: str) -> tuple[str, ...]:
    """A note where other processes use the GPUs that are to be measured."""
    from kvrsim.runtime.host import others_on_gpus

    others = others_on_gpus() if device == "cuda" else ()
    shown = ", ".join(others[:_SHOWN_OTHERS]) + (", ..." if len(others) > _SHOWN_OTHERS else "")
    return (f"other processes are on the GPUs: {shown}",) if others else ()


def check_split(scenario: Scenario, strategy: Strategy, *, generate: int = 0) -> None:
    """Raise InputError where no rank could run its part of the model, or decode."""
    from kvrsim.runtime.exchange import exchange_of
    from kvrsim.runtime.plan import run_strategy

    exchange = exchange_of(run_strategy(strategy.name))
    exchange.check_family(scenario.model.model_type)
    if generate and not exchange.decodes:
        accepted = f"nothing for {strategy.name}, under which no rank keeps all K and V"
        raise InputError("generate", generate, accepted)


def run_plan(
    scenario: Scenario,
    strategy: str,
    partition: Partition,
    gather: Gather,
    stage_layers: tuple[int, ...] | None = None,
) -> RunPlan:
    """A registered strategy as the runtime runs it: attention covers the same tokens in both.

    stage_layers: of a pipeline, each stage's.

    Raises InputError for a strategy that the runtime cannot run, or for query blocks without a profile.
    """
    from kvrsim.runtime.plan import RunPlan, run_strategy

    run_as, chosen = run_strategy(strategy), get_strategy(strategy)
    blocks = None
    if chosen.query_blocks != (1,):
        if scenario.profile is None:
            accepted = (
                f"a profile of this machine, by which {strategy} chooses query blocks; kvrsim calibrate all makes one"
            )
            raise InputError("profile", "nothing", accepted)
        placed = scenario.on_gpus(len(partition.chunk_lens))
        blocks = build_program(placed, chosen, columns(partition.chunk_lens)).query_blocks
    return RunPlan(
        strategy=run_as,
        query_blocks=blocks or (),
        partition=partition,
        batch=scenario.request.batch,
        tsp_keys="truncated" if scenario.kernel == "flash" else "dense",
        gather=gather,
        stage_layers=stage_layers,
    )


def gather_of(profile: CalibrationProfile | None, *, emulated: bool, strategy: str = "tsp") -> Gather:
    """The collective that the profile's links were fitted to; a ring over emulated links, or where it is unknown.

    An all-reduce for tp, else an all-gather.
    """
    kind = "all_reduce" if strategy == "tp" else "all_gather"
    fit = None if profile is None else profile.operations.get(kind)
    return "ring" if fit is None or fit.gather is None or emulated else fit.gather


def other_device(gpu: str, device: str) -> str | None:
    """A note where, by name, the profile's device is not the measuring one."""
    numbered = [{word for word in _words(name) if any(map(str.isdigit, word))} for name in (gpu, device)]
    same = bool(numbered[0] & numbered[1]) if all(numbered) else bool(_words(gpu) & _words(device))
    return None if same else f"the profile was measured on {gpu}, not on {device}: predictions are for another machine"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower())) - {"nvidia", "cpu", "r", "tm", "1", "2", "4", "8", "thread"}
