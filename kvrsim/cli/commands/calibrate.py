"""`kvrsim calibrate`: fit a profile to measurements of this machine, or to published ones."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvrsim.arguments import Arguments, Help, PrefillArgs, Read, Seconds, Tokens, quantity, written
from kvrsim.choices import ATTENTIONS, DEVICES, Device
from kvrsim.cli.commands.catalogue import TERM_MEANINGS
from kvrsim.cli.help import CommandGroup
from kvrsim.cli.options import OUTPUT, Json, Sources, WritablePath, require_torch, with_options
from kvrsim.cli.output import print_json, print_result, warn_notes
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Facts, Part, Row, ShellCommand, confirm_command, facts, show
from kvrsim.errors import ABSENT, InputError
from kvrsim.io.annotations import Range
from kvrsim.io.schema import fields_to_json, to_json, write_json
from kvrsim.text import printable
from kvrsim.units import format_seconds, parse_bytes
from kvrsim.version import __version__
from kvrsim.views.table import columns, format_interval, narrowing

if TYPE_CHECKING:
    from calibrate.data import Measurement
    from calibrate.fit.profile import FitReport
    from calibrate.measure.campaign import Campaign, Outcome
    from calibrate.measure.forward import ComputeSetup
    from calibrate.measure.ranks import LinkSetup
    from calibrate.prefills.fit import PrefillCheck, PrefillErrors, PrefillFit, TermFit
    from calibrate.prefills.parts import TtftPart
    from kvrsim.scenario import Scenario

app = CommandGroup()
_ROWS = "Write the measurements as CSV."
_COMPUTE_SHARE = 0.75  # share of `--minutes` that `calibrate all` spends on layers
_LONGEST_MESSAGE = written("64MiB")
_USUAL_LINK = "pcie4-x16"  # link assumed for a device that no built-in cluster has


def _kernels(value: object, parameter: str) -> tuple[str, ...]:
    """Check a list of attention kernels."""
    kernels = tuple(part.strip() for part in str(value).split(","))
    if not set(kernels) <= set(ATTENTIONS) or len(set(kernels)) < len(kernels):
        raise InputError(parameter, value, f"some of {', '.join(ATTENTIONS)}, separated by commas")
    return kernels


def _form(value: object, parameter: str) -> str:
    """Check the form of an attention kernel."""
    from calibrate.fit.attention import KERNELS

    if value not in KERNELS:
        raise InputError(parameter, value, ", ".join(KERNELS))
    return str(value)


Bytes = Annotated[int, Read(quantity(parse_bytes))]
MeasuredDevice = Annotated[Device, Help("Device that computes.", metavar="|".join(DEVICES), section="Measurement")]
Threads = Annotated[
    int, Range(least=1, most=1024), Help("CPU threads of each rank.", metavar="N", section="Measurement")
]
ProfileName = Annotated[str | None, Help("Name of the profile. Default: the name of its file.", metavar="NAME")]
Minutes = Annotated[
    float,
    Range(least=0.05, most=24 * 60),
    Help("Approximate time limit of the measurements, in minutes.", metavar="M", section="Measurement"),
]


class LayerArgs(Arguments):
    """The layers to measure, and how to measure them."""

    model: Annotated[
        str,
        Help(
            "Model whose layers are measured: a built-in name, or a config.json's path.",
            metavar="NAME|PATH",
            section="Question",
        ),
    ] = "llama-7b"
    ctx: Annotated[
        Tokens | None, Help("Longest context. Default: 16k; 4k on a CPU.", metavar="LEN", section="Question")
    ] = None
    dtype: Annotated[
        Literal["fp16", "bf16", "fp32"] | None,
        Help("Element type. Default: fp16; fp32 on a CPU.", metavar="fp16|bf16|fp32", section="Question"),
    ] = None
    attention: Annotated[
        tuple[str, ...] | None,
        Read(_kernels),
        Help(
            "Kernels out of eager, sdpa, flash; the first is the profile's default. Default: all; sdpa on a CPU.",
            metavar="KERNEL,...",
            section="Machine",
        ),
    ] = None
    device: MeasuredDevice = "auto"
    threads: Threads = 1

    def setup(self) -> ComputeSetup:
        """Return the setup of the measurement of layers; torch finds the devices."""
        require_torch()
        from calibrate.measure.forward import ComputeSetup
        from kvrsim.io.schema import JsonObject
        from kvrsim.model.load import config_path, load_model
        from kvrsim.runtime.geometry import family_of
        from kvrsim.runtime.host import chosen_device, num_gpus

        model = load_model(self.model)
        config = JsonObject.read(config_path(self.model, "model"), "model").fields
        family_of(model.model_type)
        device = chosen_device(self.device)
        on_cpu = device == "cpu"
        return ComputeSetup(
            model=model,
            config={key: value for key, value in config.items() if not key.startswith("_")},
            device=device,
            dtype=self.dtype or ("fp32" if on_cpu else "fp16"),
            kernels=self.attention or (("sdpa",) if on_cpu else ATTENTIONS),
            max_context=self.ctx or (2**12 if on_cpu else 2**14),
            threads=self.threads,
            num_gpus=1 if on_cpu else num_gpus(),
        )


class RankArgs(Arguments):
    """The ranks between which links are measured."""

    ranks: Annotated[
        int | None,
        Range(least=1, most=64),
        Help("Number of ranks. Default: one per GPU, or cores / threads.", metavar="N", section="Measurement"),
    ] = None
    timeout: Annotated[
        Seconds, Help("Time after which an unresponsive rank counts as failed.", metavar="TIME", section="Measurement")
    ] = written("60s")

    def number(self, device: str, threads: int) -> int:
        """Return the given number of ranks, by default as many as the machine has room for."""
        from kvrsim.runtime.host import devices

        return self.ranks or devices(device, threads)

    def setup(self, device: str, threads: int, max_bytes: int) -> LinkSetup:
        """Return the setup of the measurement of links. Raises InputError for a single rank."""
        from calibrate.measure.ranks import LinkSetup

        num_ranks = self.number(device, threads)
        if num_ranks < 2:
            raise InputError("ranks", num_ranks, "at least 2: links join ranks")
        return LinkSetup(
            num_ranks=num_ranks, device=device, num_threads=threads, max_bytes=max_bytes, timeout_s=self.timeout
        )


@app.command("compute")
@with_options()
def compute(
    layers: LayerArgs,
    *,
    minutes: Minutes = 3,
    output: Annotated[WritablePath, Help(_ROWS, metavar="FILE", spelling=OUTPUT)],
    json: Json = False,
) -> None:
    """Measure a model's decoder layers on this machine.

    Each part of a layer is measured alone.

    Example: kvrsim calibrate compute --model llama-3-8b -o compute.csv
    """
    from calibrate.measure.compute import compute_campaign

    _measure_one(compute_campaign(layers.setup(), Path(output), command()), minutes, json=json)


@app.command("links")
@with_options()
def links(
    effort: RankArgs,
    *,
    device: MeasuredDevice = "auto",
    threads: Threads = 1,
    max_bytes: Annotated[
        Bytes, Help("Longest message, such as a layer's K and V.", metavar="SIZE", section="Measurement")
    ] = _LONGEST_MESSAGE,
    minutes: Minutes = 2,
    output: Annotated[WritablePath, Help(_ROWS, metavar="FILE", spelling=OUTPUT)],
    json: Json = False,
) -> None:
    """Measure messages and all-gathers between this machine's ranks.

    Also detects the topology of the links.

    Example: kvrsim calibrate links --ranks 2 -o links.csv
    """
    require_torch()
    from calibrate.measure.links import link_campaign
    from kvrsim.runtime.host import chosen_device

    setup = effort.setup(chosen_device(device), threads, max_bytes)
    _measure_one(link_campaign(setup, Path(output), command()), minutes, json=json)


def _run(campaign: Campaign, minutes: float) -> Outcome:
    """Run a measurement; print progress and notes to standard error."""
    from calibrate.measure.campaign import measure

    with Progress(f"{campaign.title}: preparing", is_timed=True) as progress:
        outcome = measure(campaign, 60 * minutes, progress)
    warn_notes(outcome.notes)
    return outcome


def _measure_one(campaign: Campaign, minutes: float, *, json: bool) -> None:
    outcome = _run(campaign, minutes)
    campaign.journal().remove()
    output = str(campaign.output)
    print_result(outcome_json(outcome) | {"output": output}, outcome_facts(outcome, output), json=json)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Results of the measurement, as JSON."""
    about = {"median_spread": outcome.median_spread, "device_state": outcome.device}
    return {"rows": len(outcome.rows), **fields_to_json(outcome, "samples", "skipped"), **about}


def outcome_facts(outcome: Outcome, output: str) -> Facts:
    """Make lines of the number of measured rows, the skipped points, and the file."""
    spread = outcome.median_spread
    steady = "" if spread is None else f", spread {spread:.1%} (median of interquartile ranges)"
    measured = f"{len(outcome.rows)} rows of {outcome.samples} samples{steady}"
    skipped = (("skipped:", f"{point}: {why}") for point, why in outcome.skipped.items())
    return facts(("measured:", measured), *skipped, ("written:", output))


def command() -> str:
    """The command as the user typed it, without folders of this machine."""
    return " ".join(["kvrsim", *(Path(word).name if "/" in word else word for word in sys.argv[1:])])


@app.command("all")
@with_options()
def calibrate_all(
    layers: LayerArgs,
    effort: RankArgs,
    *,
    links: Annotated[
        str | None, Help("Use links measured elsewhere instead of measuring them.", metavar="FILE", section="Machine")
    ] = None,
    link: Annotated[
        str | None, Help("Use a datasheet's link instead of measuring it.", metavar="NAME|PATH", section="Machine")
    ] = None,
    minutes: Minutes = 4,
    output: Annotated[
        WritablePath,
        Help(
            "Write the profile, and next to it FILE.compute.csv and FILE.links.csv.",
            metavar="FILE.json",
            spelling=OUTPUT,
        ),
    ],
    name: ProfileName = None,
    json: Json = False,
) -> None:
    """Measure layers and links of this machine and fit a profile.

    Reports how well the profile agrees with the measurements.

    Example: kvrsim calibrate all --minutes 5 -o here.json
    """
    from calibrate.data import read_origins
    from calibrate.importers import read_source
    from calibrate.measure.compute import compute_campaign, layer_kv_bytes
    from calibrate.measure.links import link_campaign

    if Path(output).suffix != ".json":
        raise InputError("output", output, "a file that ends in .json")
    if links is not None and link is not None:
        raise InputError("link", link, "nothing where --links is given")
    if links is not None:
        read_source(links, "links")  # a mistake is reported before the work starts
    setup = layers.setup()
    stem = Path(output).with_suffix("")
    layers_csv = f"{stem}.compute.csv"
    campaigns = [(compute_campaign(setup, Path(layers_csv), command()), _COMPUTE_SHARE)]
    if links is None and link is None and effort.number(setup.device, setup.threads) > 1:
        links = f"{stem}.links.csv"
        longest = max(layer_kv_bytes(setup), 2**20)  # bytes of a layer's K and V for the longest context
        ranks = effort.setup(setup.device, setup.threads, longest)
        campaigns.append((link_campaign(ranks, Path(links), command()), 1 - _COMPUTE_SHARE))
    outcomes = {campaign.title: _run(campaign, minutes * share) for campaign, share in campaigns}
    sources = [layers_csv, *([links] if links else [])]
    try:
        link = link or (None if links else _datasheet_link(layers_csv))
        wanted = FitArgs(output=output, link=link, name=name, json=json)
        rows = [row for source in sources for row in read_source(source, "output")]
        content = write_fit(rows, wanted, "calibrate all", read_origins(sources, "output"))
    except InputError as refusal:
        advice = "measure again with nothing else running, or with more --minutes"
        raise InputError(refusal.parameter, refusal.value, f"{refusal.accepted}; {advice}") from None
    finally:
        for campaign, _ in campaigns:
            campaign.journal().remove()
    if json:
        measured = {title: outcome_json(outcome) for title, outcome in outcomes.items()}
        print_json(
            content | {"measured": measured, "files": {"profile": output, "compute": layers_csv, "links": links}}
        )
    else:
        show(facts(*next_rows(str(layers.model), output)))


def next_rows(model: str, profile: str) -> Iterator[Row]:
    """The commands that plan with the new profile, and measure that plan."""
    plan = f"kvrsim plan --model {shlex.quote(model)} --profile {shlex.quote(profile)} --ctx 4k -o plan.json"
    confirm = confirm_command("plan.json", model, profile)
    yield "next:", ShellCommand(plan)
    yield "", ShellCommand(f"{confirm} -o confirmed.json")


def _datasheet_link(compute: str) -> str | None:
    """Return a link that the device is likely to have; None if a built-in cluster has the device."""
    from calibrate.data import read_origins
    from kvrsim.hardware import cluster_of

    gpu = next((origin["gpu"]["name"] for origin in read_origins([compute], "compute")), "")
    return None if cluster_of(gpu) is not None else _USUAL_LINK


class FitArgs(Arguments):
    """What to fit, and where to write the result."""

    gpu: Annotated[
        str | None,
        Help("The GPU measured. Default: the one named in the rows.", metavar="NAME|PATH", section="Machine"),
    ] = None
    link: Annotated[
        str | None,
        Help("The link measured. Default: the one of the GPU's cluster.", metavar="NAME|PATH", section="Machine"),
    ] = None
    attention_kernel: Annotated[
        str | None,
        Read(_form),
        Help(
            "The kernel's cost model. Default: the best fit.",
            metavar="fa2|flashinfer|paged|fa3|eager",
            section="Machine",
        ),
    ] = None
    output: Annotated[WritablePath, Help("Write the profile, as JSON.", metavar="FILE", spelling=OUTPUT)]
    name: ProfileName = None
    json: Json = False


@app.command("fit")
@with_options()
def fit(
    options: FitArgs,
    *,
    compute: Annotated[
        str, Help("Measured kernels: CSV, or another source (see import).", metavar="SOURCE", section="Machine")
    ],
    links: Annotated[
        str | None, Help("Measured links. Default: the datasheet's.", metavar="SOURCE", section="Machine")
    ] = None,
) -> None:
    """Fit a profile to measurements of one GPU and its links.

    Prints how well it agrees with them.

    Example: kvrsim calibrate fit --compute compute.csv --links links.csv -o here.json
    """
    _fit({"compute": [compute], "links": [] if links is None else [links]}, options)


@app.command("import")
@with_options()
def import_(
    options: FitArgs,
    *,
    sources: Annotated[
        Sources,
        Help(
            "aisimulate:[WHEEL:]SYSTEM/FRAMEWORK, or a CSV file; append ?gpu=TEXT, ?kernel=TEXT or ?model=TEXT to "
            "filter.",
            metavar="SOURCE...",
            positional=True,
        ),
    ],
    measurements: Annotated[WritablePath | None, Help("Also write the rows as one CSV file.", metavar="FILE")] = None,
) -> None:
    """Fit a profile to measurements that others have published.

    Example: kvrsim calibrate import aisimulate:b200_sxm/trtllm -o b200.json
    """
    _fit({"SOURCE...": sources}, options, measurements)


def _fit(sources: Mapping[str, Sequence[str]], options: FitArgs, measurements: str | None = None) -> None:
    """Fit a profile to the rows of sources, which are grouped by argument; also write the rows if requested."""
    from calibrate.data import read_origins, write_measurements
    from calibrate.importers import read_source

    pairs = [(name, source) for name, several in sources.items() for source in several]
    rows: list[Measurement] = []
    with Progress() as progress:
        for number, (name, source) in enumerate(pairs):
            progress(number, len(pairs), f"reading {printable(source)}")
            rows += read_source(source, name)
    if measurements is not None:
        write_measurements(measurements, rows, "measurements")
    origins = [origin for name, source in pairs for origin in read_origins([source], name)]
    content = write_fit(rows, options, next(iter(sources)), origins)
    if options.json:
        print_json(content)


def write_fit(
    rows: list[Measurement], options: FitArgs, argument: str, origins: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Fit and write a profile, and return its errors as JSON values; without --json, also print them."""
    from calibrate.data import gpu_of, link_of
    from calibrate.fit.profile import FitChoices, Label, fit_profile

    spec = gpu_of(rows, options.gpu, origins)
    label = Label(
        name=options.name or Path(options.output).stem,
        provenance={"fitted": f"{date.today().isoformat()} by kvrsim {__version__}"},
    )
    link = link_of(spec, options.link, origins)
    choices = FitChoices(attention_kernel=options.attention_kernel)
    with Progress(f"fitting {len(rows)} rows"):
        profile, report = fit_profile(
            rows, label, gpu=spec, link=link, choices=choices, argument=argument, origins=origins
        )
    profile.write(options.output)
    if not options.json:
        _show(report, options)
    return report.to_dict()


def _show(report: FitReport, options: FitArgs) -> None:
    """Print the errors of each operation, and notes."""
    from calibrate.fit.profile import TITLES

    table = columns("operation", ">rows", ">error", ">held-out")
    for kind, fit in report.profile.operations.items():
        errors = (f"{fit.mape:.1%}", f"{fit.cross_validated_mape:.1%}") if fit.num_rows else ("", "")
        table.add_row(TITLES[kind], str(fit.num_rows), *errors)
    sources = sorted({fit.source for fit in report.profile.operations.values() if fit.num_rows})
    about = (*report.layers_note, *report.notes)
    notes = facts(
        *(("" if index else "from:", source) for index, source in enumerate(sources)),
        *(("" if index else "notes:", note) for index, note in enumerate(about)),
        ("written:", f"{options.output}, profile {report.profile.name} of {report.profile.gpu}"),
    )
    meaning = "error: mean absolute relative error of the fitted rows; held-out: of rows that the fit has not seen"
    show(table, "", meaning, "", notes)


@app.command("prefills")
@with_options()
def prefills(
    args: PrefillArgs,
    *,
    files: Annotated[
        Sources,
        Help(
            "Measured prefills: a CSV file with a column ttft_s or ttft_ms, or what vllm bench, sglang.bench_serving, "
            "sglang.bench_one_batch, AIPerf, genai-perf or InferenceX wrote, or a scrape of /metrics.",
            metavar="ROWS.csv|OUTPUT.json...",
            positional=True,
        ),
    ],
    check: Annotated[
        bool,
        Help("Fit nothing; report where TTFT goes, and how far the profile is from the rows.", section="Measurement"),
    ] = False,
    output: Annotated[
        WritablePath | None, Help("Write the profile with the fitted engine, as JSON.", metavar="FILE", spelling=OUTPUT)
    ] = None,
    name: ProfileName = None,
    share: Annotated[
        WritablePath | None,
        Help(
            "Write the rows with their predictions, without any name of yours, to give to others.",
            metavar="FILE",
            section="Output",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fit a serving engine to whole prefills measured on it.

    A handful of prefills is enough. Prints the engine's terms and the errors of rows that were left out of the fit.

    Example: kvrsim calibrate prefills rows.csv --profile h100-flash -o mine.json
    """
    from calibrate.prefills.fit import check_prefills
    from calibrate.prefills.parts import first_step, parts_of
    from calibrate.prefills.share import shared_rows
    from kvrsim.prefills import cases_of, fit
    from planner.uncertainty.intervals import interval

    for parameter, value in (("output", output), ("name", name)):
        if check and value is not None:
            raise InputError(parameter, value, "nothing with --check, which fits no profile")
    if not check and output is None and share is None:
        raise InputError("output", ABSENT, "a file for the profile, such as mine.json; or --check, which needs none")
    with Progress() as progress:
        cases = cases_of(args, files, progress)
        warn_notes(cases.notes)
        checked = check_prefills(cases.cases, interval, progress)
        if share is not None:
            write_json(share, shared_rows(cases.cases, checked.rows), argument="share")
        if output is None:
            parts = parts_of(cases.cases, checked.rows)
            content = checked.to_dict() | {"parts": to_json(parts), "first": first_step(parts)}
            screen = [*parts_screen(parts), "", *check_screen(checked, cases.cases[0].scenario)]
        else:
            fitted = fit(args, cases, files, name or Path(output).stem, progress)
            fitted.profile.write(output)
            content = fitted.to_dict() | {"output": output}
            screen = fit_screen(fitted, output)
    if share is not None:
        screen += ["", facts(("shared:", f"{share}: no name, path, host or date of yours; read it before you send it"))]
    print_result(content | {"warnings": list(cases.notes)}, *screen, json=json)


_MEANINGS = TERM_MEANINGS | {
    "sustained_share": "rate of the GPU under long load divided by its rate in short bursts, as its clock falls"
}
_RATIOS = ("kernel_scale", "sustained_share")
_FEW = 4  # with fewer rows, left-out errors are uncertain


def fit_screen(fit: PrefillFit, output: str) -> list[Part]:
    """Screen of a fit: the engine's terms, their errors, and the rows."""
    table = columns("term", ">prior", ">fitted", ">80 % interval", "identified", "what")
    for term in fit.terms:
        low, high = term.span
        name = term.prior.name
        table.add_row(
            name,
            _value(term, term.prior.median),
            _value(term, term.value),
            f"{low:.3g}–{high:.3g}" if name in _RATIOS else format_interval(low, high),
            "yes" if term.identified else "no",
            _MEANINGS.get(name, ""),
        )
    errors = columns("absolute error", ">median", ">mean")
    for title, error in (("before", fit.before), ("after", fit.after), ("left out", fit.left_out)):
        errors.add_row(title, *_shares(error))
    rows = columns("row", ">measured", ">before", ">after", ">left out", ">error left out")
    times_s = zip(fit.measured_s, fit.before_s, fit.solution.after_s, fit.solution.left_out_s, strict=True)
    for case, (measured_s, before_s, after_s, left_out_s) in zip(fit.cases, times_s, strict=True):
        times = map(format_seconds, (measured_s, before_s, after_s, left_out_s))
        rows.add_row(case, *times, f"{left_out_s / measured_s - 1:+.1%}")
    names = ", ".join(term.prior.name for term in fit.terms if not term.identified)
    engine_fit = fit.engine.fit
    inside = None if engine_fit is None else f"{engine_fit.coverage:.0%} of the rows left out (80 % are meant to be)"
    notes = facts(
        ("not identified:", names and f"{names}; the rows say little, or only of a sum, and the prior decides"),
        ("inside the interval:", inside),
        ("few rows:", "measure other lengths and numbers of GPUs, too" if len(set(fit.cases)) < _FEW else None),
        ("written:", f"{output}, profile {fit.profile.name} of {fit.profile.gpu}, with the engine in it"),
    )
    meaning = "left out: each row predicted by a fit without it, and without its repetitions"
    return [table, "", errors, "", narrowing(rows, "before", "after"), "", meaning, "", notes]


def parts_screen(parts: Sequence[TtftPart]) -> list[Part]:
    """Screen of where measured TTFT goes, and what to fix first."""
    from calibrate.prefills.parts import first_step

    table = columns("part of TTFT", ">all rows", ">80 % interval", ">share")
    for part in parts:
        interval = ""
        if part.name != "queue":
            interval = f"{format_signed(part.low_s)} to {format_signed(part.high_s)}"
        table.add_row(part.name, format_signed(part.seconds), interval, f"{part.share:.0%}")
    return [table, "", facts(("fix first:", first_step(parts)))]


def format_signed(seconds: float) -> str:
    """Seconds that may be negative."""
    if seconds < 0:
        return f"−{format_seconds(-seconds)}"
    return format_seconds(seconds)


def check_screen(check: PrefillCheck, scenario: Scenario) -> list[Part]:
    """Screen of a check: the rows and their errors."""
    return rows_screen(check, ("profile:", f"{scenario.profile_name}, engine {scenario.engine_name}"))


def rows_screen(check: PrefillCheck, basis: Row) -> list[Part]:
    """The rows of a check, what the predictions rest on, and their errors."""
    rows = columns("row", ">measured", ">predicted", ">prediction interval", ">error")
    for row in check.rows:
        rows.add_row(
            row.case,
            format_seconds(row.measured_s),
            format_seconds(row.predicted_s),
            format_interval(row.low_s, row.high_s),
            f"{row.rel_error:+.1%}",
        )
    notes = facts(
        basis,
        ("absolute error:", f"median {check.errors.median_ape:.1%}, mean {check.errors.mape:.1%}"),
        ("inside the interval:", f"{check.coverage:.0%} of {len(check.rows)} rows"),
    )
    return [narrowing(rows, "80 %"), "", notes]


def _value(term: TermFit, value: float) -> str:
    return f"{value:.3g}" if term.prior.name in _RATIOS else format_seconds(value)


def _shares(errors: PrefillErrors) -> tuple[str, str]:
    return f"{errors.median_ape:.1%}", f"{errors.mape:.1%}"
