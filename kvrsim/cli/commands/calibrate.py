"""`kvrsim calibrate compute` and `links`: measuring this machine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrsim.cli.machine_options import Device as Device
from kvrsim.cli.machine_options import require_torch
from kvrsim.cli.options import Json, ScenarioOptions, takes
from kvrsim.cli.outputs import print_json, resumable, tell
from kvrsim.cli.parsing import check_output, check_plot, parse_choice, parse_list, parse_strategy
from kvrsim.cli.progress import WorkProgress
from kvrsim.cli.text import columns, facts, format_interval, narrowing, show
from kvrsim.errors import InputError
from kvrsim.text import printable
from kvrsim.units import format_seconds
from kvrsim.version import __version__

if TYPE_CHECKING:
    from calibrate.data import Measurement
    from calibrate.fit.report import FitReport
    from calibrate.measure.campaign import Campaign, Measured, Outcome, Policy
    from calibrate.measure.forward import ComputeSetup
    from calibrate.prefills.fit import Errors, FittedTerm, PrefillCases, PrefillCheck, PrefillFit
    from calibrate.prefills.rows import PrefillDefaults
    from kvrsim.kernels.profile import CalibrationProfile
    from kvrsim.scenario import Scenario

app = typer.Typer()

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
        from kvrsim.io.schema import JsonObject
        from kvrsim.model.load import config_path, load_model
        from kvrsim.runtime.geometry import DTYPES, family_of
        from kvrsim.runtime.host import chosen_device, num_gpus
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
    from kvrsim.cli.text import facts, show

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


# -- `kvrsim calibrate fit` and `import`: measurements to a profile, and how well it agrees with them.

Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Write the profile, as JSON.")]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="Name of the profile. Default: its file's.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions:
    """What to fit and where to write it; `check` before the work."""

    output: Output
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME|PATH", help="The GPU measured. Default: the one named in the rows."),
    ] = None
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME|PATH", help="The link measured. Default: the one of the GPU's cluster."),
    ] = None
    name: Name = None
    attention_kernel: Annotated[
        str | None,
        typer.Option(
            "--attention-kernel",
            metavar="fa2|flashinfer|paged|fa3|eager",
            help="Form of the kernel. Default: the best fit.",
        ),
    ] = None
    report: Annotated[
        str | None, typer.Option("--report", metavar="FILE", help="Also write the errors of the fit as Markdown.")
    ] = None
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="FILE", help="Plot fitted against measured times: FILE.png, .svg or .pdf."),
    ] = None
    json: Json = False

    def check(self) -> None:
        """Complain before the work rather than after it."""
        check_output(self.output, "output")
        check_output(self.report, "report")
        check_plot(self.plot)
        if self.attention_kernel is not None:
            from calibrate.fit.attention import KERNELS

            if self.attention_kernel not in KERNELS:
                raise InputError("attention_kernel", self.attention_kernel, ", ".join(KERNELS))


@takes(FitOptions)
def fit(
    wanted: FitOptions,
    *,
    compute: Annotated[
        str,
        typer.Option("--compute", metavar="SOURCE", help="Measured kernels: CSV, or another source (see import)."),
    ],
    links: Annotated[
        str | None, typer.Option("--links", metavar="SOURCE", help="Measured links. Default: the datasheet's.")
    ] = None,
) -> None:
    """Fit a profile to measurements of one GPU and its links.

    Prints how well it agrees with them.

    Example: kvrsim calibrate fit --compute compute.csv --links links.csv -o here.json
    """
    from calibrate.data import read_origins
    from calibrate.importers import read_source

    wanted.check()
    rows = read_source(compute, "compute")
    origins = read_origins([compute], "compute")
    if links is not None:
        rows += read_source(links, "links")
        origins += read_origins([links], "links")
    found = write_fit(rows, wanted, "compute", origins)
    if wanted.json:
        print_json(found)


@takes(FitOptions)
def import_(
    wanted: FitOptions,
    *,
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="aiconfigurator:SYSTEM, or a CSV file; append ?gpu=TEXT, ?kernel=TEXT or ?model=TEXT to filter.",
        ),
    ],
    measurements: Annotated[
        str | None, typer.Option("--measurements", metavar="FILE", help="Also write the rows as one CSV file.")
    ] = None,
) -> None:
    """Fit a profile to measurements that others have published.

    Example: kvrsim calibrate import aiconfigurator:b200_sxm/vllm -o b200.json
    """
    from calibrate.data import read_origins, write_measurements
    from calibrate.importers import read_source

    wanted.check()
    check_output(measurements, "measurements")
    with WorkProgress() as progress:
        rows = []
        for source in sources:
            progress(f"reading {printable(source)}")
            rows += read_source(source, "SOURCE...")
    if measurements is not None:
        write_measurements(measurements, rows, "measurements")
    found = write_fit(rows, wanted, "SOURCE...", read_origins(sources, "SOURCE..."))
    if wanted.json:
        print_json(found)


def write_fit(
    rows: list[Measurement], wanted: FitOptions, argument: str, origins: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Fit, write, and print how well the profile agrees; with --json nothing is printed, the caller does."""
    from calibrate.fit.profile import FitChoices, Label, fit_profile
    from calibrate.measure.device import gpu_of, link_of

    spec = gpu_of(rows, wanted.gpu, origins)
    label = Label(
        name=wanted.name or Path(wanted.output).stem,
        provenance={"fitted": f"{date.today().isoformat()} by kvrsim {__version__}"},
    )
    link = link_of(spec, wanted.link, origins)
    choices = FitChoices(attention_kernel=wanted.attention_kernel, fused=wanted.attention_kernel != "eager")
    with WorkProgress() as progress:
        progress(f"fitting {len(rows)} rows")
        profile, found = fit_profile(
            rows, label, gpu=spec, link=link, choices=choices, argument=argument, origins=origins
        )
    profile.write(wanted.output)
    if wanted.report is not None:
        found.write(wanted.report, picture=wanted.plot)
    if wanted.plot is not None:
        found.plot(wanted.plot)
    if not wanted.json:
        _show(found, wanted)
    return found.to_dict()


def _show(found: FitReport, wanted: FitOptions) -> None:
    """One row per operation, then notes."""
    from calibrate.fit.report import TITLES
    from kvrsim.cli.text import Hint, columns, facts, show

    table = columns("operation")
    columns("rows", "error", "held-out", numbers=True, into=table)
    for kind, fit in found.profile.operations.items():
        errors = (f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") if fit.num_rows else ("", "")
        table.add_row(TITLES[kind], str(fit.num_rows), *errors)
    notes = facts()
    sources = sorted({fit.source for fit in found.profile.operations.values() if fit.num_rows})
    for index, source in enumerate(sources):
        notes.add_row("" if index else "from:", source)
    for index, note in enumerate((*found.layers_note, *found.notes)):
        notes.add_row("" if index else "notes:", note)
    notes.add_row("written:", f"{wanted.output}, profile {found.profile.name} of {found.profile.gpu}")
    for path in (wanted.report, wanted.plot):
        if path is not None:
            notes.add_row("", path)
    meaning = "error: mean absolute relative error of the fitted rows; held-out: of rows that the fit has not seen"
    plan = Hint(f"kvrsim plan --profile {shlex.quote(wanted.output)} --gpus 2 --ctx 4k")
    show(table, "", meaning, "", notes, plan)


# -- `kvrsim calibrate all`: from nothing to a profile of this machine, in one command.

_COMPUTE_SHARE = 0.75  # of the minutes
_NO_DATASHEET = "pcie4-x16"  # the link of a device that no built-in cluster has, where nobody measures one
_SUFFIX = ".json"

ProfileOutput = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.json",
        help="Write the profile, and beside it FILE.compute.csv, FILE.links.csv, FILE.md and FILE.png.",
    ),
]


@takes(LayerOptions)
def calibrate_all(
    layers: LayerOptions,
    *,
    output: ProfileOutput,
    ranks: Ranks = None,
    links: Annotated[
        str | None,
        typer.Option("--links", metavar="FILE", help="Use links measured elsewhere instead of measuring them."),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME|PATH", help="Use a datasheet's link instead of measuring it."),
    ] = None,
    name: Name = None,
    minutes: Minutes = "4",
    timeout: Timeout = "60s",
    even_if_busy: EvenIfBusy = False,
    json: Json = False,
) -> None:
    """Measure layers and links of this machine and fit a profile.

    Reports how well the profile agrees with the measurements.

    Example: kvrsim calibrate all --minutes 5 -o here.json
    """
    from calibrate.importers import read_source
    from kvrsim.units import parse_seconds

    check_output(output, "output")
    if Path(output).suffix != _SUFFIX:
        raise InputError("output", output, f"a file that ends in {_SUFFIX}")
    if links is not None and link is not None:
        raise InputError("link", link, "nothing where --links is given")
    if links is not None:
        read_source(links, "links")  # complain before the work
    setup = layers.setup()
    count = parse_ranks(ranks, setup.device, setup.threads)
    files = _Files(output)
    steps = [("layers", files.compute_campaign(setup), _COMPUTE_SHARE)]
    if links is None and link is None and count > 1:
        timeout_s = parse_seconds(timeout, "timeout")
        steps.append(("links", files.link_campaign(setup, count, timeout_s), 1 - _COMPUTE_SHARE))
    done = [_step(*step, minutes, even_if_busy) for step in steps]
    links_file = links or (str(files.links) if len(steps) > 1 else None)
    try:
        told = _fitted(files, links_file, link, name, json)
    except InputError as refusal:
        for measured in done:
            measured.journal.remove()  # the next run measures anew; the CSV files stay
        advice = "measure again with nothing else running, or with more --minutes"
        raise InputError(refusal.parameter, refusal.value, f"{refusal.accepted}; {advice}") from None
    for measured in done:
        measured.journal.remove()
    if json:
        outcomes = {title: outcome_json(one.outcome) for (title, *_), one in zip(steps, done, strict=True)}
        print_json(told | {"measured": outcomes, "files": files.names(links_file)})


def _fitted(files: _Files, links: str | None, link: str | None, name: str | None, json: bool) -> dict[str, Any]:
    """The profile, its report and plot, from the CSV files."""
    from calibrate.data import read_origins
    from calibrate.importers import read_source

    sources = [str(files.compute), *([links] if links else [])]
    wanted = FitOptions(
        output=files.output,
        link=link or (None if links else _datasheet_link(files)),
        name=name,
        report=str(files.report),
        plot=str(files.plot),
        json=json,
    )
    rows = [row for source in sources for row in read_source(source, "output")]
    return write_fit(rows, wanted, "calibrate all", read_origins(sources, "output"))


def _step(title: str, campaign: Campaign, share: float, minutes: str, even_if_busy: bool) -> Measured:
    return run(campaign, policy_of(minutes, even_if_busy, share), title)


class _Files:
    """What goes beside the profile."""

    def __init__(self, output: str) -> None:
        stem = Path(output).with_suffix("")
        self.output = output
        self.compute, self.links, self.report, self.plot = (
            Path(f"{stem}{ending}") for ending in (".compute.csv", ".links.csv", ".md", ".png")
        )

    def compute_campaign(self, setup: ComputeSetup) -> Campaign:
        """Layers."""
        from calibrate.measure.compute import compute_campaign

        return compute_campaign(setup, self.compute, command())

    def link_campaign(self, setup: ComputeSetup, ranks: int, timeout_s: float) -> Campaign:
        """Messages up to K and V of a layer for the longest context."""
        from calibrate.measure.compute import layer_kv_bytes
        from calibrate.measure.links import link_campaign

        return link_campaign(
            ranks=ranks,
            device=setup.device,
            backend="nccl" if setup.device == "cuda" else "gloo",
            threads=setup.threads,
            max_bytes=max(layer_kv_bytes(setup), 2**20),
            timeout_s=timeout_s,
            output=self.links,
            command=command(),
        )

    def names(self, links: str | None) -> dict[str, str | None]:
        """For JSON."""
        return {
            "profile": self.output,
            "compute": str(self.compute),
            "links": links,
            "report": str(self.report),
            "plot": str(self.plot),
        }


def _datasheet_link(files: _Files) -> str | None:
    """None where a built-in cluster has the device; else the link that such a device is likely to have."""
    from calibrate.data import read_origins
    from kvrsim.hardware import builtin_clusters, load_cluster

    gpu = next((origin["gpu"]["name"] for origin in read_origins([str(files.compute)], "compute")), None)
    known = {load_cluster(name).gpu.name for name in builtin_clusters()}
    return None if gpu in known else _NO_DATASHEET


# -- `kvrsim calibrate prefills`: an engine fitted to whole prefills, or a profile checked against them.

_ARGUMENT = "prefills"
_OF_ROWS = ("ctx", "gpus", "model", "profile", "batch", "cached_prefix", "dtype")  # the others hold for all rows


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(ScenarioOptions):
    """What rows are about where their file does not say."""

    ctx: Annotated[
        str, typer.Option("--ctx", metavar="LEN", help="Context length in tokens, of rows that do not say theirs.")
    ] = ""
    gpus: Annotated[str | None, typer.Option("--gpus", metavar="N", help="Number of GPUs. Default: 1.")] = None
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME|PATH", help="A built-in model, a Hugging Face config.json, or its folder."
        ),
    ] = ""
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME|PATH", help="The calibration profile whose kernels the engine runs."),
    ]

    def defaults(self, strategy: str | None) -> PrefillDefaults:
        """Checked; InputError names the option."""
        from calibrate.prefills.rows import PrefillDefaults
        from kvrsim.units import parse_count, parse_tokens

        return PrefillDefaults(
            model=self.model or None,
            num_gpus=1 if self.gpus is None else parse_count(self.gpus, "gpus"),
            strategy=strategy,
            context_len=parse_tokens(self.ctx, "ctx") if self.ctx else None,
            batch=parse_count(self.batch, "batch"),
            cached_prefix=0 if self.cached_prefix == "0" else parse_tokens(self.cached_prefix, "cached_prefix"),
            dtype=self.dtype,
        )

    def setting(self) -> dict[str, Any]:
        """The other arguments of make_scenario."""
        return {name: value for name, value in self._given().items() if name not in _OF_ROWS}


@takes(PrefillOptions)
def prefills(
    options: PrefillOptions,
    *,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="ROWS.csv|OUTPUT.json...",
            help="Measured prefills: a CSV file with a column ttft_s, or what vllm bench latency, vllm bench serve,"
            " sglang.bench_one_batch, AIPerf or GenAI-Perf wrote.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the profile with the fitted engine, as JSON."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="NAME",
            help="Strategy of rows that do not say theirs. Default: tp, or single on one GPU.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the profile. Default: its file's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fit nothing; report how far the profile is from the rows.")
    ] = False,
    json: Json = False,
) -> None:
    """Fit a serving engine to whole prefills measured on it.

    A handful of prefills is enough. Prints the engine's terms and the errors of rows that were left out of the fit.

    Example: kvrsim calibrate prefills rows.csv --profile h100-flash -o mine.json
    """
    from calibrate.prefills.rows import read_prefills
    from kvrsim.cli.progress import WorkProgress
    from kvrsim.kernels.profile import load_profile

    _check_outputs(output, name, check)
    if strategy is not None:
        parse_strategy(strategy)
    if options.profile == "roofline":
        raise InputError("profile", options.profile, "a calibration profile, which has measured kernels")
    profile = load_profile(options.profile)
    found = read_prefills(files, options.defaults(strategy), _ARGUMENT)
    with WorkProgress() as progress:
        cases = _cases(options, profile, found.rows, progress)
        for note in (*found.notes, *cases.notes):
            tell(f"note: {note}")
        if check:
            content = _checked(cases, progress, json)
        else:
            assert output is not None, "see _check_outputs"
            label = name or Path(output).stem
            content = _fitted_prefills(cases, profile, label, files, output, progress, json)
    if json:
        print_json(content | {"warnings": [*found.notes, *cases.notes]})


def _check_outputs(output: str | None, name: str | None, check: bool) -> None:
    """Complain before the work rather than after it."""
    if check:
        for parameter, value in (("output", output), ("name", name)):
            if value is not None:
                raise InputError(parameter, value, "nothing beside --check, which fits no profile")
    elif output is None:
        raise InputError("output", "nothing", "a file for the profile, such as mine.json; or --check, which needs none")
    check_output(output, "output")


def _cases(options: PrefillOptions, profile: CalibrationProfile, rows: Any, progress: WorkProgress) -> PrefillCases:
    from calibrate.prefills.fit import make_cases
    from planner.candidates import partition_of

    return make_cases(rows, profile, partition_of, options.setting(), progress)


def _checked(cases: PrefillCases, progress: WorkProgress, json: bool) -> dict[str, Any]:
    from calibrate.prefills.fit import check_prefills
    from planner.uncertainty.intervals import interval

    checked = check_prefills(cases.cases, interval, progress)
    if not json:
        show_check(checked, cases.cases[0].scenario)
    return checked.to_dict()


def _fitted_prefills(
    cases: PrefillCases,
    profile: CalibrationProfile,
    name: str,
    files: list[str],
    output: str,
    progress: WorkProgress,
    json: bool,
) -> dict[str, Any]:
    from calibrate.prefills.fit import fit_prefills, source_of
    from planner.uncertainty.intervals import interval

    fit = fit_prefills(
        cases.cases,
        profile,
        cases.cases[0].scenario.engine,
        name=name,
        source=source_of(files),
        cluster=cases.cluster,
        interval_of=interval,
        on_progress=progress,
    )
    fit.profile.write(output)
    if not json:
        show_fit(fit, output)
    return fit.to_dict() | {"output": output}


# -- An engine fitted to whole prefills, and a profile checked against them, on the terminal.

_WHAT = {
    "request_s": "before the first layer, once a request",
    "token_s": "more for each token of the request",
    "step_s": "before each pass through the layers",
    "layer_s": "of the host, to issue one layer",
    "collective_s": "to start a collective of tensor parallelism",
    "kernel_scale": "the engine's kernels over the profile's",
    "sustained_share": "rate after long load over that of bursts",
}
_RATIOS = ("kernel_scale", "sustained_share")
_FEW = 4  # rows below which left-out errors say little


def show_fit(fit: PrefillFit, output: str) -> None:
    """Terms, errors, then rows."""
    table = columns("term")
    columns("prior", "fitted", "80 % interval", numbers=True, into=table)
    columns("identified", "what", into=table)
    for term in fit.terms:
        low, high = term.span
        name = term.prior.name
        table.add_row(
            name,
            _value(term, term.prior.median),
            _value(term, term.value),
            f"{low:.3g}–{high:.3g}" if name in _RATIOS else format_interval(low, high),
            "yes" if term.identified else "no",
            _WHAT.get(name, ""),
        )
    errors = columns("absolute error")
    columns("median", "mean", numbers=True, into=errors)
    for title, found in (("before", fit.before), ("after", fit.after), ("left out", fit.left_out)):
        errors.add_row(title, *_shares(found))
    rows = columns("row")
    columns("measured", "before", "after", "left out", "error left out", numbers=True, into=rows)
    found_s = zip(fit.measured_s, fit.before_s, fit.solution.after_s, fit.solution.left_out_s, strict=True)
    for case, seconds in zip(fit.cases, found_s, strict=True):
        rows.add_row(case, *map(format_seconds, seconds), f"{seconds[3] / seconds[0] - 1:+.1%}")
    notes = facts()
    if not all(term.identified for term in fit.terms):
        names = ", ".join(term.prior.name for term in fit.terms if not term.identified)
        notes.add_row("not identified:", f"{names}; the rows say little, or only of a sum, and the prior decides")
    if fit.engine.fit is not None:
        notes.add_row(
            "inside the interval:", f"{fit.engine.fit.coverage:.0%} of the rows left out (80 % are meant to be)"
        )
    if len(set(fit.cases)) < _FEW:
        notes.add_row("few rows:", "measure other lengths and numbers of GPUs, too")
    notes.add_row("written:", f"{output}, profile {fit.profile.name} of {fit.profile.gpu}, with the engine in it")
    meaning = "left out: each row predicted by a fit without it, and without its repetitions"
    show(table, "", errors, "", narrowing(rows, "before", "after"), "", meaning, "", notes)


def show_check(check: PrefillCheck, scenario: Scenario) -> None:
    """Rows, then their errors together."""
    rows = columns("row")
    columns("measured", "predicted", "prediction interval", "error", numbers=True, into=rows)
    for row in check.rows:
        rows.add_row(
            row.case,
            format_seconds(row.measured_s),
            format_seconds(row.predicted_s),
            format_interval(row.low_s, row.high_s),
            f"{row.rel_error:+.1%}",
        )
    notes = facts()
    notes.add_row("profile:", f"{scenario.profile_name}, engine {scenario.engine_name}")
    notes.add_row("absolute error:", f"median {check.median_ape:.1%}, mean {check.mape:.1%}")
    notes.add_row("inside the interval:", f"{check.coverage:.0%} of {len(check.rows)} rows")
    show(narrowing(rows, "80 %"), "", notes)


def _value(term: FittedTerm, value: float) -> str:
    return f"{value:.3g}" if term.prior.name in _RATIOS else format_seconds(value)


def _shares(errors: Errors) -> tuple[str, str]:
    return f"{errors.median_ape:.1%}", f"{errors.mape:.1%}"


for _name, _command in {
    "compute": compute,
    "links": links,
    "all": calibrate_all,
    "fit": fit,
    "import": import_,
    "prefills": prefills,
}.items():
    app.command(_name)(_command)
