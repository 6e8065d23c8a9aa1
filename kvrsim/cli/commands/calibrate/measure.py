"""`kvrsim calibrate compute` and `links`: measuring this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.machine_options import Device as Device
from kvrsim.cli.machine_options import require_torch
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json, resumable
from kvrsim.cli.parsing import check_output, parse_choice, parse_list
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from calibrate.measure.campaign import Campaign, Measured, Outcome, Policy
    from calibrate.measure.forward import ComputeSetup

Threads = Annotated[str, typer.Option("--threads", metavar="N", help="CPU threads of each rank.")]
Ranks = Annotated[
    str | None, typer.Option("--ranks", metavar="N", help="Number of ranks. Default: one per GPU, or cores / threads.")
]
Minutes = Annotated[
    str, typer.Option("--minutes", metavar="M", help="Approximate time limit of the measurements, in minutes.")
]
EvenIfBusy = Annotated[
    bool, typer.Option("--even-if-busy", help="Keep samples taken while other processes used the machine.")
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Time after which an unresponsive rank counts as failed.")
]
CsvOutput = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the measurements as CSV. The same command resumes an interrupted run.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """What to measure, as text; `setup` checks it."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="NAME|PATH",
            help="Model whose layers are measured: a built-in name, or a config.json's path.",
        ),
    ] = "llama-7b"
    device: Device = "auto"
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", metavar="fp16|bf16|fp32", help="Element type. Default: fp16; fp32 on a CPU."),
    ] = None
    attention: Annotated[
        str | None,
        typer.Option(
            "--attention",
            metavar="KERNEL,...",
            help="Kernels out of eager, sdpa, flash; the first is the profile's default. Default: all; sdpa on a CPU.",
        ),
    ] = None
    ctx: Annotated[
        str | None, typer.Option("--ctx", metavar="LEN", help="Longest context. Default: 16k; 4k on a CPU.")
    ] = None
    threads: Threads = "1"

    def setup(self) -> ComputeSetup:
        """Checked, with what torch finds on this machine; InputError names the option."""
        require_torch()
        from calibrate.measure.forward import ComputeSetup
        from kvrsim.io.json_text import JsonObject
        from kvrsim.model.load import config_path, load_model
        from kvrsim.runtime.geometry import DTYPES
        from kvrsim.runtime.host import chosen_device, num_gpus
        from kvrsim.runtime.kept.families import family_of
        from kvrsim.units import parse_count, parse_tokens

        model = load_model(self.model)
        config = JsonObject.read(config_path(self.model, "model"), "model").fields
        family_of(model.model_type)
        parse_choice(self.dtype, "dtype", tuple(DTYPES))
        device = chosen_device(self.device)
        on_cpu = device == "cpu"
        dtype = self.dtype or ("fp32" if on_cpu else "fp16")
        return ComputeSetup(
            model=model,
            config={key: value for key, value in config.items() if not key.startswith("_")},
            device=device,
            dtype=dtype,
            kernels=self._kernels(on_cpu),
            max_context=parse_tokens(self.ctx or ("4k" if on_cpu else "16k"), "ctx"),
            threads=parse_count(self.threads, "threads", maximum=1024),
            num_gpus=1 if on_cpu else num_gpus(),
        )

    def _kernels(self, on_cpu: bool) -> tuple[str, ...]:
        from kvrsim.choices import ATTENTIONS

        accepted = f"some of {', '.join(ATTENTIONS)}, separated by commas"
        named = self.attention or ("sdpa" if on_cpu else ",".join(ATTENTIONS))
        kernels = parse_list(named, "attention", accepted)
        if not set(kernels) <= set(ATTENTIONS) or len(set(kernels)) < len(kernels):
            raise InputError("attention", named, accepted)
        return tuple(kernels)


@takes(LayerOptions)
def compute(
    layers: LayerOptions,
    *,
    output: CsvOutput,
    minutes: Minutes = "3",
    even_if_busy: EvenIfBusy = False,
    json: Json = False,
) -> None:
    """Measure a model's decoder layers on this machine.

    Each part of a layer is measured alone.

    Example: kvrsim calibrate compute --model llama-3-8b -o compute.csv
    """
    check_output(output, "output")
    setup = layers.setup()
    from calibrate.measure.compute import compute_campaign

    campaign = compute_campaign(setup, Path(output), command())
    _measure_one(campaign, policy_of(minutes, even_if_busy), "layers", json=json)


def links(
    output: CsvOutput,
    device: Device = "auto",
    ranks: Ranks = None,
    threads: Threads = "1",
    max_bytes: Annotated[
        str, typer.Option("--max-bytes", metavar="SIZE", help="Longest message, such as a layer's K and V.")
    ] = "64MiB",
    minutes: Minutes = "2",
    timeout: Timeout = "60s",
    even_if_busy: EvenIfBusy = False,
    json: Json = False,
) -> None:
    """Measure messages and all-gathers between this machine's ranks.

    Also detects the topology of the links.

    Example: kvrsim calibrate links --ranks 2 -o links.csv
    """
    check_output(output, "output")
    require_torch()
    from calibrate.measure.links import link_campaign
    from kvrsim.runtime.host import chosen_device
    from kvrsim.units import parse_bytes, parse_count, parse_seconds

    place = chosen_device(device)
    cores = parse_count(threads, "threads", maximum=1024)
    campaign = link_campaign(
        ranks=parse_ranks(ranks, place, cores, least=2),
        device=place,
        backend="nccl" if place == "cuda" else "gloo",
        threads=cores,
        max_bytes=parse_bytes(max_bytes, "max_bytes"),
        timeout_s=parse_seconds(timeout, "timeout"),
        output=Path(output),
        command=command(),
    )
    _measure_one(campaign, policy_of(minutes, even_if_busy), "links", json=json)


def parse_ranks(text: str | None, device: str, threads: int, *, least: int = 1) -> int:
    """As many as asked for, or as the machine has; InputError where that is fewer than `least`."""
    from kvrsim.runtime.host import devices
    from kvrsim.units import parse_count

    ranks = devices(device, threads) if text is None else parse_count(text, "ranks", maximum=64)
    if ranks < least:
        raise InputError("ranks", ranks, f"at least {least}: links join ranks")
    return ranks


def policy_of(minutes: str, even_if_busy: bool, share: float = 1.0) -> Policy:
    """A budget of so many minutes, or of a share of them."""
    from calibrate.measure.campaign import Policy
    from kvrsim.units import parse_number

    value = parse_number(minutes, "minutes", least=0.05, most=24 * 60)
    return Policy(budget_s=60 * value * share, even_if_busy=even_if_busy)


def run(campaign: Campaign, policy: Policy, title: str) -> Measured:
    """Measure, with an estimate first and a progress bar, both on standard error."""
    from calibrate.measure.campaign import journal_path, measure
    from kvrsim.cli.progress import CampaignProgress, tell_estimate

    with resumable(journal_path(campaign.output)), CampaignProgress(title) as progress:
        return measure(
            campaign,
            policy,
            on_estimate=lambda found, resumed: tell_estimate(title, found, policy, resumed),
            on_progress=progress,
        )


def _measure_one(campaign: Campaign, policy: Policy, title: str, *, json: bool) -> None:
    measured = run(campaign, policy, title)
    measured.journal.remove()
    told = outcome_json(measured.outcome) | {"output": str(campaign.output)}
    if json:
        print_json(told)
    else:
        show_outcome(measured.outcome, str(campaign.output))


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """What was measured, as JSON."""
    return {
        "rows": len(outcome.rows),
        "samples": outcome.samples,
        "busy_samples": outcome.busy,
        "median_spread": median_spread(outcome),
        "skipped": dict(outcome.skipped),
        "device_state": dict(outcome.device),
    }


def median_spread(outcome: Outcome) -> float | None:
    """Of the repeats: interquartile range over median, in the middle of all rows."""
    from statistics import median

    spreads = [row.spread_s / row.median_s for row in outcome.rows if row.spread_s is not None]
    return round(median(spreads), 4) if spreads else None


def show_outcome(outcome: Outcome, output: str) -> None:
    """One line each for what was measured, what was not, and where it is."""
    from kvrsim.cli.render.layout import facts, show

    table = facts()
    spread = median_spread(outcome)
    steady = "" if spread is None else f", spread {spread:.1%} (median of interquartile ranges)"
    table.add_row("measured:", f"{len(outcome.rows)} rows of {outcome.samples} samples{steady}")
    if outcome.busy:
        table.add_row("busy:", f"{outcome.busy} samples were taken while other processes used the machine")
    if not outcome.load_known:
        table.add_row("busy:", "unknown: this system does not report the load of other processes")
    for point, why in outcome.skipped.items():
        table.add_row("skipped:", f"{point}: {why}")
    table.add_row("written:", output)
    show(table)


def command() -> str:
    """As it was typed, without the folders of this machine."""
    return " ".join(["kvrsim", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])
