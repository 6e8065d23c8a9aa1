"""From what a user names to a Scenario, with what has to be said about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from os import PathLike
from typing import Any, TypedDict, cast

from kvrsim.arguments import checked
from kvrsim.choices import Topology
from kvrsim.engine import NO_ENGINE, Engine, load_engine
from kvrsim.errors import InputError
from kvrsim.hardware import (
    DEFAULT_CLUSTER,
    DEFAULT_MEMORY_FRACTION,
    MAX_GPUS,
    Cluster,
    LinkSpec,
    load_cluster,
    load_link,
)
from kvrsim.kernels.coverage import coverage_notes, expert_notes, head_dims, precision_notes
from kvrsim.kernels.prefix import PrefixPlacement, placement_notes
from kvrsim.kernels.profile import CalibrationProfile, load_profile
from kvrsim.model.load import load_model
from kvrsim.model.spec import ModelSpec
from kvrsim.scenario import ROOFLINE, Request, Scenario
from kvrsim.text import Note
from kvrsim.units import (
    counts_of,
    counts_up_to,
    lengths_of,
    parse_bandwidth,
    parse_count,
    parse_fraction,
    parse_number,
    parse_seconds,
    parse_tokens,
    scale,
)

DEFAULT_MODEL = "llama-7b"
DEFAULT_DTYPE = "fp16"
_MEASURED = "measured"  # what a link is called that no datasheet speaks of
DEFAULT_PROFILES = (  # one a GPU; the first without a cluster
    *("a100-eager", "h100-flash", "h200-flash", "b200-flash", "gb200-flash", "b300-flash", "gb300-flash"),
    *("l40s-flash", "rtx-pro-6000-flash"),
)


class ScenarioArgs(TypedDict, total=False):
    """What make_scenario takes besides the context, for functions that hand it on."""

    gpus: int | str | None
    model: str | PathLike[str] | ModelSpec
    profile: str | PathLike[str] | CalibrationProfile | None
    cluster: str | PathLike[str] | Cluster | None
    link_bandwidth: float | str | None
    link_latency: float | str | None
    topology: str | None
    attention: str | None
    batch: int | str
    cached_prefix: int | str
    dtype: str | None
    memory_fraction: float | str
    engine: str | PathLike[str] | Engine | None
    expert_parallel: bool
    expert_imbalance: float | str | None
    prefix_placement: str | PrefixPlacement


@checked()
def make_scenario(
    *,
    ctx: int | str,
    gpus: int | str | None = None,
    model: str | PathLike[str] | ModelSpec = DEFAULT_MODEL,
    profile: str | PathLike[str] | CalibrationProfile | None = None,
    cluster: str | PathLike[str] | Cluster | None = None,
    link_bandwidth: float | str | None = None,
    link_latency: float | str | None = None,
    topology: str | None = None,
    attention: str | None = None,
    batch: int | str = 1,
    cached_prefix: int | str = 0,
    dtype: str | None = None,
    memory_fraction: float | str = DEFAULT_MEMORY_FRACTION,
    engine: str | PathLike[str] | Engine | None = None,
    expert_parallel: bool = False,
    expert_imbalance: float | str | None = None,
    prefix_placement: str | PrefixPlacement = "all",
) -> tuple[Scenario, tuple[str, ...]]:
    """What a prediction is about, and notes on it; numbers may be text, as on the command line.

    ctx: tokens of the whole context, such as 16384 or "16k".
    gpus: GPUs that take part; None: all of the cluster.
    model: a built-in name, a path to a Hugging Face config.json or its folder, or a ModelSpec.
    profile: a built-in name, a path, "roofline" (the datasheet's limits), or a CalibrationProfile; None: the
        one measured on the cluster's GPU.
    cluster: a built-in name, a path, or a Cluster; None: the one that the profile was measured on, where it says,
        or else A100s of 80 GB on NVLink.
    link_bandwidth: bytes per second and direction, or text such as "10GB/s"; overrides the cluster's.
    link_latency: seconds, or text such as "5us"; overrides the cluster's.
    topology: "switch", "bus" or "chain"; overrides the cluster's.
    attention: kernel, "eager", "sdpa" or "flash"; None: the profile's first.
    batch, cached_prefix: sequences prefilled together; leading tokens of each whose K and V exist already.
    prefix_placement: where: "all" ranks, "sharded" over them by tokens, "host" or "remote", these two with a bandwidth
        per GPU if need be, such as "host:20GB/s"; or a PrefixPlacement.
    dtype: "fp16", "bf16" or "fp32", of weights, activations and KV cache, or "fp8", of the products of the layers, all
        else in half precision; None: fp16, or what the profile has.
    memory_fraction: share of each GPU's memory that the prefill may use, above 0 and at most 1; the rest is a reserve.
    engine: what serves the model: a built-in name, a path, an Engine, or "none" (the kernels, and the host that the
        profile has); None: the profile's.
    expert_parallel: whether routed experts are spread whole over all GPUs, instead of all on each rank.
    expert_imbalance: then, rows of the busiest GPU over the mean, at least 1; None: that of NVIDIA's power law.

    Raises InputError naming the parameter.
    """
    num_gpus = parsed(gpus, parse_count, "gpus")
    spec = model if isinstance(model, ModelSpec) else load_model(str(model))
    given = cluster if isinstance(cluster, Cluster) or cluster is None else load_cluster(str(cluster))
    calibration = _profile_of(profile, given)
    whole = given or (calibration and calibration.cluster) or load_cluster(DEFAULT_CLUSTER)
    machine = whole if topology is None else whole.with_topology(cast("Topology", topology))  # checked by Cluster
    size_notes = () if num_gpus is None else _size_notes(machine, num_gpus, named=given is not None)
    machine = machine if num_gpus is None else machine.with_num_gpus(num_gpus)
    bandwidth_bytes_per_s = parsed(link_bandwidth, parse_bandwidth, "link_bandwidth")
    latency_s = parsed(link_latency, parse_seconds, "link_latency", allow_zero=True)
    machine, link_notes = _linked(machine, calibration, bandwidth_bytes_per_s, latency_s)
    scenario = Scenario(
        model=spec,
        cluster=machine,
        request=Request(
            context_len=parsed(ctx, parse_tokens, "ctx"),
            batch=parsed(batch, parse_count, "batch"),
            cached_prefix=0 if cached_prefix == "0" else parsed(cached_prefix, parse_tokens, "cached_prefix"),
            dtype=dtype or _dtype_of(calibration),
        ),
        profile=calibration,
        kernel=attention or (calibration.attention_kernels[0] if calibration else "flash"),
        memory_fraction=parsed(memory_fraction, parse_fraction, "memory_fraction"),
        engine=_engine_of(engine, calibration),
        expert_parallel=expert_parallel,
        expert_imbalance=parsed(expert_imbalance, parse_number, "expert_imbalance"),
        prefix_placement=parsed(prefix_placement, PrefixPlacement.parse, "prefix_placement"),
    )
    return scenario, (*size_notes, *notes_on(scenario), *link_notes)


def make_scenarios(
    *, ctx: str | Iterable[int | str], gpus: str | Iterable[int | str] | None = None, **scenario: Any
) -> tuple[Scenario, tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """The scenario of the longest context on the most GPUs, its notes, and all contexts and numbers of GPUs.

    gpus: None: 2, 4, 8, ... up to the number of GPUs of the cluster. Raises InputError naming the parameter.
    """
    lengths = lengths_of(ctx, "ctx")
    counts = counts_of(gpus, "gpus") if gpus is not None else None
    counts = counts or counts_up_to(make_scenario(ctx=lengths[-1], **scenario)[0].num_gpus)
    base, notes = make_scenario(ctx=lengths[-1], gpus=counts[-1], **scenario)
    return base, notes, lengths, counts


def parsed(value: Any, parse: Callable[..., Any], parameter: str, **options: bool) -> Any:
    """Text as a number; the rest is left for the type that checks it."""
    return parse(value, parameter, **options) if isinstance(value, str) else value


def _size_notes(cluster: Cluster, gpus: int, *, named: bool) -> tuple[str, ...]:
    """What to say of more GPUs than the cluster has; InputError where the cluster that was named has no room for them.

    A bus and a chain can be longer, and there can be more nodes; a switch has so many ports.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not cluster.num_gpus < gpus <= MAX_GPUS:
        return ()  # Cluster checks the number itself
    if named and cluster.topology == "switch":
        accepted = f"at most {cluster.num_gpus}, the GPUs on the switch of {cluster.name}; more of them: a cluster file"
        raise InputError("gpus", gpus, accepted)
    longer = {
        "nodes": "more nodes alike",
        "switch": "a larger switch",
        "bus": "a longer bus",
        "chain": "a longer chain",
    }
    kind = "GPU" if cluster.num_gpus == 1 else "GPUs"
    return (f"{cluster.name} has {cluster.num_gpus} {kind}; {gpus} are simulated on {longer[cluster.topology]}",)


def _profile_of(
    profile: str | PathLike[str] | CalibrationProfile | None, cluster: Cluster | None
) -> CalibrationProfile | None:
    """The profile asked for; by default the one of the cluster's GPU, else the datasheet's roofline."""
    if isinstance(profile, CalibrationProfile):
        return profile
    if profile is None:
        if cluster is None:
            return load_profile(DEFAULT_PROFILES[0])
        defaults = (load_profile(name) for name in DEFAULT_PROFILES)
        return next((default for default in defaults if default.gpu == cluster.gpu.name), None)
    return None if str(profile) == ROOFLINE else load_profile(str(profile))


def _engine_of(engine: str | PathLike[str] | Engine | None, profile: CalibrationProfile | None) -> Engine | None:
    """The engine asked for; by default the profile's."""
    asked = profile.engine if engine is None and profile is not None else engine
    if asked is None or isinstance(asked, Engine):
        return asked
    return None if str(asked) == NO_ENGINE else load_engine(str(asked))


def _dtype_of(profile: CalibrationProfile | None) -> str:
    """fp16, or, where the profile has none, its first."""
    dtypes = (DEFAULT_DTYPE,) if profile is None else profile.valid.dtypes
    return DEFAULT_DTYPE if DEFAULT_DTYPE in dtypes else dtypes[0]


def _linked(
    machine: Cluster, profile: CalibrationProfile | None, bandwidth_bytes_per_s: float | None, latency_s: float | None
) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster with the profile's measured links, unless the user gave others; and what to say of them."""
    link = machine.link
    datasheet = link.name
    measured = profile.links if profile is not None and _has_measured(profile, link.like or datasheet) else None
    link_notes: tuple[str, ...] = ()
    if profile is not None and measured is not None:
        as_measured = LinkSpec(
            name=datasheet if datasheet == _MEASURED else f"{datasheet}, {_MEASURED}",
            bandwidth_bytes_per_s=measured.bandwidth_bytes_per_s,
            latency_s=measured.latency_s,
            source=link.source,
            short_bytes_per_s=measured.short_bytes_per_s,
            gather=measured.gather,
            all_reduce=measured.all_reduce,
            profile=profile.name,
        )
        if link.like is not None:
            narrower = load_link(link.like).bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
            as_measured = scale(as_measured, narrower, only_rates=True)
        machine = machine.with_measured(as_measured)
        if not _timed(profile, "send_recv") and machine.num_gpus > 1:
            link_notes = (f"links: nominal figures of {datasheet} for single messages; collectives as measured",)
    if bandwidth_bytes_per_s is not None or latency_s is not None:
        machine = machine.with_link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
        return machine, ("links as given, not as measured: their bandwidth is taken to be reached in full",)
    if profile is not None and measured is None and machine.num_gpus > 1:
        of = profile.links.link if _has_measured(profile, profile.links.link) else "none"
        return machine, (f"links: nominal figures of {datasheet}; {profile.name} measured {of}",)
    return machine, link_notes


def _has_measured(profile: CalibrationProfile, link: str) -> bool:
    """Whether the profile has figures of that link's messages or collectives that are not a datasheet's."""
    kinds = ("send_recv", "all_gather", "all_reduce")
    return profile.links.link == link and any(_timed(profile, kind) for kind in kinds)


def _timed(profile: CalibrationProfile, kind: str) -> bool:
    fit = profile.operations.get(kind)
    return (fit is None and kind == "send_recv") or (fit is not None and fit.num_rows > 0)


def notes_on(scenario: Scenario) -> tuple[str, ...]:
    """What a reader of the prediction has to know about its model and range."""
    notes = _model_notes(scenario)
    if scenario.profile is None:
        notes.append("roofline: the datasheet's limits, not a measurement; expect real TTFTs 1.3 to 3 times longer")
    else:
        notes.extend(_range_notes(scenario, scenario.profile))
    return tuple(notes)


def _model_notes(scenario: Scenario) -> list[str]:
    model, request = scenario.model, scenario.request
    trained, notes = model.max_position_embeddings, []
    if trained is not None and request.context_len > trained:
        what = f"the max_position_embeddings of {model.name} ({trained})"
        notes.append(f"{request.context_len} tokens exceed {what}; simulated anyway")
    notes.extend(f"{model.name}: {sentence}" for sentence in model.approximations)
    notes.extend(precision_notes(model, request.dtype, scenario.profile, scenario.cluster.gpu))
    notes.extend(expert_notes(model, scenario.profile, scenario.expert_placement))
    notes.extend(placement_notes(scenario.prefix_placement, scenario.cluster, request.cached_prefix))
    return notes


def _range_notes(scenario: Scenario, profile: CalibrationProfile) -> list[str]:
    """Where the scenario leaves what the profile was measured on."""
    valid, model = profile.valid, scenario.model
    ranges = {
        "context": (scenario.request.context_len, valid.context_len),
        "GPUs": (scenario.cluster.num_gpus, valid.num_gpus),
        "hidden_size": (model.hidden_size, valid.hidden_size),
    }
    spans = [(what, value, span) for what, (value, span) in ranges.items()]
    spans += [("head_dim", width, valid.head_dim) for width in head_dims(model, profile.kernels)]
    notes: list[str] = [
        Note(
            f"extrapolated: {what} {value} is outside {low} to {high}, which profile {profile.name} was measured on",
            f"{what}-range",
        )
        for what, value, (low, high) in spans
        if not low <= value <= high
    ]
    notes.extend(coverage_notes(model, profile, scenario.request.dtype_bytes))
    if profile.gpu != scenario.cluster.gpu.name:
        notes.append(f"profile {profile.name} was measured on {profile.gpu}, not on {scenario.cluster.gpu.name}")
    if scenario.request.batch > 1:
        notes.append("batch above 1 was not measured")
    engine = scenario.engine
    if engine is not None and not engine.knows(profile.gpu):
        known = ", ".join(engine.kernel_scale)
        scale = f"{engine.scale_on(profile.gpu):.2f} times the profile's"
        notes.append(f"engine {engine.name} was measured on {known}; its kernels on {profile.gpu} are taken as {scale}")
    return notes
