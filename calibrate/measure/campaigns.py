"""The two campaigns of a calibration: a model's layers on one device, and the links between ranks.

measure: run a campaign from its journal to its CSV, with its provenance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calibrate.data.measurement import Measurement, write_measurements
from calibrate.measure.campaign import Bench, Estimate, Outcome, Policy, Progress, estimate, run_campaign
from calibrate.measure.compute_bench import ComputeBench
from calibrate.measure.forward_timer import ComputeSetup
from calibrate.measure.journal import CampaignJournal, journal_path
from calibrate.measure.link_bench import LinkBench
from calibrate.measure.machine import device_name, origin, spec_of, versions
from calibrate.measure.topology import find_layout
from kvrsim.request import dtype_bytes


def compute_campaign(setup: ComputeSetup, output: Path, command: str) -> Campaign:
    """Times of the model's layers."""
    about = {
        "measurement": "compute",
        "model": dict(setup.config),
        "device": device_name(setup.device, setup.threads),
        "dtype": setup.dtype,
        "attention": list(setup.kernels),
        "longest context": setup.max_context,
        "versions": versions(setup.device),
    }

    def origin_of(rows: list[Measurement]) -> Mapping[str, Any]:
        return origin(setup.device, setup.threads, command) | {
            "gpu": gpu_json(setup),
            "model": dict(setup.config),
            "model_name": setup.model.name,
        }

    return Campaign(build=lambda: ComputeBench.build(setup), about=about, origin=origin_of, output=output)


def gpu_json(setup: ComputeSetup) -> dict[str, Any]:
    """The device as a cluster file has it."""
    return spec_of(setup.device, setup.dtype, setup.threads).to_dict()


def link_campaign(
    *, ranks: int, device: str, backend: str, threads: int, max_bytes: int, timeout_s: float, output: Path, command: str
) -> Campaign:
    """Times of messages and all-gathers between the ranks of this machine."""
    name = device_name(device, threads)
    about = {
        "measurement": "links",
        "device": name,
        "ranks": ranks,
        "backend": backend,
        "largest message": max_bytes,
        "versions": versions(device),
    }

    def build() -> LinkBench:
        return LinkBench(
            num_ranks=ranks,
            device_name=name,
            backend=backend,
            device=device,
            num_threads=threads,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
        )

    def origin_of(rows: list[Measurement]) -> Mapping[str, Any]:
        return origin(device, threads, command) | {"num_gpus": ranks, "backend": backend} | layout_json(rows)

    return Campaign(build=build, about=about, origin=origin_of, output=output)


def layout_json(rows: list[Measurement]) -> dict[str, Any]:
    """Links and topology, with the keys of a cluster file, and the ratios they were derived from."""
    layout = find_layout(rows)
    found: dict[str, Any] = {"link": _present(asdict(layout.link)), "topology": layout.topology, "why": layout.why}
    if layout.network is not None:
        found |= {"gpus_per_node": layout.gpus_per_node, "network": _present(asdict(layout.network))}
    return found


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def layer_kv_bytes(setup: ComputeSetup) -> int:
    """K and V of one layer for the longest context: the longest message of a prefill."""
    return setup.model.layer_cache_bytes(setup.max_context, dtype_bytes(setup.dtype))


OnProgress = Callable[[Progress], None]
OriginOf = Callable[[list[Measurement]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is measured, and where the rows are written."""

    build: Callable[[], Bench]
    about: Mapping[str, Any]  # settings and machine; a journal of others is refused
    origin: OriginOf  # what the CSV says of its rows, given them
    output: Path  # the CSV

    def journal(self, argument: str = "output") -> CampaignJournal:
        """A new journal, or that of an interrupted run."""
        return CampaignJournal.open(journal_path(self.output), self.about, argument)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Result of a campaign, and its journal; the caller removes the journal when nothing has to be repeated."""

    outcome: Outcome
    journal: CampaignJournal


def measure(
    campaign: Campaign,
    policy: Policy,
    *,
    on_estimate: Callable[[Estimate, int], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Measured:
    """Measure, and write the CSV.

    `on_estimate` receives the plan, and how many samples an interrupted run has left. Raises
    InputError for a journal of other settings, BusyError for a machine that other processes use.
    """
    journal = campaign.journal()
    try:
        bench = campaign.build()
        try:
            if on_estimate is not None:
                on_estimate(estimate(bench, policy), journal.resumed)
            outcome = run_campaign(bench, journal, policy, on_progress)
        finally:
            bench.close()
        measured_on = {"device_state": dict(outcome.device)} if outcome.device else {}
        write_measurements(campaign.output, outcome.rows, origin={**campaign.origin(outcome.rows), **measured_on})
    except BaseException:
        journal.close()
        raise
    finally:
        if not journal.samples:
            journal.remove()
    return Measured(outcome=outcome, journal=journal)
