"""measure: a campaign from its journal to its CSV, which says where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.campaign import Bench, Estimate, Outcome, Policy, Progress, estimate, run_campaign
from calibrate.journal import CampaignJournal, journal_path
from calibrate.measurement import Measurement, write_measurements

OnProgress = Callable[[Progress], None]
OriginOf = Callable[[list[Measurement]], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Campaign:
    """What is to be measured, and where it goes."""

    build: Callable[[], Bench]
    about: Mapping[str, Any]  # settings and machine; a journal of others is refused
    origin: OriginOf  # what the CSV says of its rows, given them
    output: Path  # the CSV

    def journal(self, argument: str = "output") -> CampaignJournal:
        """New, or as an interrupted run has left it."""
        return CampaignJournal.open(journal_path(self.output), self.about, argument)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a campaign has brought, and its journal, which the caller removes once all that follows is done."""

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

    `on_estimate` is told beforehand what will be done, and how many samples an interrupted run has left. Raises
    InputError for a journal of other settings, BusyError for a machine that is not fit to measure on.
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
