"""Build a Scenario from the names that a user gives, with notes about it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

from kvrsim.arguments import ScenarioArgs, ScenariosArgs, takes
from kvrsim.choices import Topology
from kvrsim.engine import NO_ENGINE, SHORT_TOKENS, Engine, load_engine
from kvrsim.errors import InputError
from kvrsim.hardware import (
    DEFAULT_CLUSTER,
    MAX_GPUS,
    Cluster,
    GpuSpec,
    LinkSpec,
    builtin_clusters,
    builtin_gpus,
    cluster_of,
    larger_size,
    load_cluster,
    load_gpu,
    load_link,
)
from kvrsim.kernels.attention import FlashRates
from kvrsim.kernels.prefix import PrefixPlacement
from kvrsim.kernels.profile import CalibrationProfile, load_profile, profile_of_sibling, profile_under_power_limit
from kvrsim.model.load import known_shape, load_model
from kvrsim.model.spec import ModelSpec
from kvrsim.notes import Note, note
from kvrsim.rate_notes import expert_notes, missing_rate_notes, placement_notes, precision_notes
from kvrsim.scenario import ROOFLINE, Request, Scenario
from kvrsim.units import counts_up_to, scale

DEFAULT_DTYPE = "fp16"  # dtype of checkpoints that state none
PAPER_MODELS = ("llama-7b", "llama-13b", "llama-30b", "llama-7b-mqa", "llama-7b-gqa8", "falcon-1b", "falcon-7b")
PAPER_PROFILE = "a100-eager"  # profile of the KV-Runahead paper's machine
_SAME_PEAK = 0.005  # relative difference below which two peaks are the same
_MEASURED = "measured"  # name of a link without a datasheet
DEFAULT_PROFILES = (  # one profile per GPU
    *("a100-flash", "h100-flash", "h200-flash", "b200-flash", "gb200-flash", "b300-flash", "gb300-flash"),
    *("l40s-flash", "rtx-pro-6000-flash"),
)


def build_scenario(args: ScenarioArgs) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario that the arguments describe, and its notes. Raises InputError naming the parameter."""
    model = args.model
    if not isinstance(model, ModelSpec):
        model = load_model(model)
    machine = _machine_of(args, model)
    kernel = args.attention
    if kernel is None:
        kernel = "flash" if machine.profile is None else machine.profile.attention_kernels[0]
    placement = args.prefix_placement
    if isinstance(placement, str):
        placement = PrefixPlacement.parse(placement, "prefix_placement")
    scenario = Scenario(
        model=model,
        cluster=machine.cluster,
        request=Request(
            context_len=args.ctx,
            batch=args.batch,
            cached_prefix=args.cached_prefix,
            dtype=args.dtype or _dtype_of(model, machine.cluster, machine.profile),
        ),
        profile=machine.profile,
        kernel=kernel,
        memory_fraction=args.memory_fraction,
        engine=_engine_of(args.engine, machine.profile),
        expert_parallel=args.expert_parallel,
        expert_imbalance=args.expert_imbalance,
        prefix_placement=placement,
    )
    return scenario, (*machine.notes, *notes_on(scenario), *machine.link_notes)


class _Machine(NamedTuple):
    """GPUs, their links, and the rates of both."""

    cluster: Cluster
    profile: CalibrationProfile | None  # None: the datasheet's roofline
    notes: tuple[str, ...]  # on names, defaults, power and size
    link_notes: tuple[str, ...]


def _machine_of(args: ScenarioArgs, model: ModelSpec) -> _Machine:
    """The cluster and the profile that the arguments name.

    A cluster that is not named is that of the profile; a profile that is not named is that of the cluster's GPU.
    """
    named_cluster = args.cluster
    if named_cluster is not None and not isinstance(named_cluster, Cluster):
        named_cluster = load_cluster(named_cluster)
    profile = args.profile
    if isinstance(profile, str):
        profile = None if profile == ROOFLINE else load_profile(profile)
    cluster = named_cluster or _default_cluster(profile)
    notes = list(_name_notes(args, cluster))
    if args.profile is None:
        profile, profile_notes = _default_profile(model, cluster.gpu)
        notes += profile_notes
    if cluster.power_limit_w is not None and profile is not None:
        profile, power_note = _under_power_limit(profile, cluster, is_default=args.profile is None)
        notes.append(power_note)
    is_measured = profile is not None and profile.cluster is not None
    is_paper = any(one.code == "paper" for one in notes)
    if named_cluster is None and not is_measured and not is_paper:
        notes.append(note("default cluster", cluster=cluster.name))
    if args.topology is not None:
        cluster = replace(cluster, topology=cast(Topology, args.topology))
    if args.gpus is not None:
        notes += _size_notes(cluster, args.gpus, named=named_cluster is not None)
        cluster = replace(cluster, num_gpus=args.gpus)
    cluster, link_notes = _with_links(cluster, profile, args.link_bandwidth, args.link_latency)
    return _Machine(cluster=cluster, profile=profile, notes=tuple(notes), link_notes=link_notes)


@takes()
def make_scenario(args: ScenarioArgs) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario of a prediction, and notes on it.

    Numbers may be text with a unit, as on the command line.

    Parameters
    ----------

    Returns
    -------
    scenario : Scenario
        Model, cluster, request and everything else that a TTFT depends on.
    notes : tuple of str
        Limits of the prediction, such as that it is extrapolated.

    Raises
    ------
    InputError
        Its message names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> scenario, notes = kvrsim.make_scenario(ctx="16k", gpus=8)
    >>> scenario.request.context_len, scenario.num_gpus
    (16384, 8)
    """
    return build_scenario(args)


def build_scenarios(args: ScenariosArgs) -> tuple[Scenario, tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Build the scenario of the longest context on the most GPUs; also return its notes, all contexts and GPU counts.

    Without `gpus`, the GPU counts are 2, 4, 8, ... up to that of the cluster. Raises InputError.
    """
    values = vars(args) | {"ctx": args.ctx[-1]}
    counts: tuple[int, ...] | None = args.gpus
    if counts is None:
        counts = counts_up_to(build_scenario(ScenarioArgs(**values))[0].num_gpus)
    scenario, notes = build_scenario(ScenarioArgs(**values | {"gpus": counts[-1]}))
    return scenario, notes, args.ctx, counts


def _default_cluster(profile: CalibrationProfile | None) -> Cluster:
    """The cluster on which the profile was measured, else the built-in one of its GPU, else DEFAULT_CLUSTER."""
    if profile is None:
        return load_cluster(DEFAULT_CLUSTER)
    return profile.cluster or cluster_of(profile.gpu) or load_cluster(DEFAULT_CLUSTER)


def _size_notes(cluster: Cluster, gpus: int, *, named: bool) -> tuple[Note, ...]:
    """Return a note if `gpus` is more than the cluster has. Raises InputError if the user named a switched cluster.

    A bus, a chain and a number of nodes can grow; a switch has a fixed number of ports.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not cluster.num_gpus < gpus <= MAX_GPUS:
        return ()  # the constructor of Cluster checks the number
    if named and cluster.topology == "switch":
        accepted = f"at most {cluster.num_gpus}, the GPUs on the switch of {cluster.name}"
        raise InputError("gpus", gpus, f"{accepted}; more of them: `cluster` {larger_size(cluster, gpus)}, or a file")
    longer = {
        "nodes": "more nodes alike",
        "switch": "a larger switch",
        "bus": "a longer bus",
        "chain": "a longer chain",
    }
    has = f"{cluster.num_gpus} GPU{'s' * (cluster.num_gpus != 1)}"
    return (note("size", cluster=cluster.name, has=has, gpus=gpus, longer=longer[cluster.topology]),)


def _name_notes(args: ScenarioArgs, cluster: Cluster) -> tuple[Note, ...]:
    """Notes on names: the known shape that a model has, and the network assumed for a size such as 2x8xh100."""
    notes: list[Note] = []
    shape = known_shape(args.model) if isinstance(args.model, str) else None
    if shape is not None and shape.name != shape.shape:
        notes.append(note("shape", model=shape.name, shape=shape.shape))
    is_named = isinstance(args.cluster, str)
    is_size = is_named and args.cluster not in builtin_clusters() and not Path(str(args.cluster)).exists()
    if is_size and cluster.network is not None:
        notes.append(note("network", cluster=cluster.name, network=cluster.network.name))
    return tuple(notes)


def _default_profile(model: ModelSpec, gpu: GpuSpec) -> tuple[CalibrationProfile | None, tuple[Note, ...]]:
    """The default profile of the GPU and a note on it; None: the datasheet's roofline is used.

    The paper's models on the paper's GPU get the profile of the eager kernels of 2023.
    """
    paper = load_profile(PAPER_PROFILE) if model.name in PAPER_MODELS else None
    if paper is not None and paper.gpu == gpu.name:
        return paper, (note("paper", model=model.name),)
    for name in DEFAULT_PROFILES:
        if name.startswith(f"{gpu.name.partition('-80gb')[0]}-"):
            others: tuple[Note, ...] = ()
            if name == "a100-flash":
                others = (note("default profile", profile=name, other=PAPER_PROFILE, what="eager attention of 2023"),)
            return load_profile(name), others
    if gpu.like is None:
        return None, ()
    measured = load_gpu(gpu.like)
    profile, _ = _default_profile(replace(model, name=""), measured)
    if profile is None:
        return None, ()
    compute = gpu.peak_flops["fp16"] / measured.peak_flops["fp16"]
    memory = gpu.hbm_bytes_per_s / measured.hbm_bytes_per_s
    about = note("sibling", gpu=gpu.name, measured=measured.name, compute=compute, memory=memory)
    return profile_of_sibling(profile, measured, gpu), (about,)


def _under_power_limit(
    profile: CalibrationProfile, cluster: Cluster, *, is_default: bool
) -> tuple[CalibrationProfile, Note]:
    """The profile at the cluster's power limit and a note; a profile that the user named stays as it is."""
    limit = cluster.power_limit_w
    if not is_default:
        return profile, note("power limit, profile", limit=limit, profile=profile.name)
    share = cluster.arithmetic_share
    about = note("power limit", limit=limit, gpu=cluster.gpu.name, power=cluster.gpu.power_w, share=share)
    return profile_under_power_limit(profile, share), about


def _engine_of(engine: str | Engine | None, profile: CalibrationProfile | None) -> Engine | None:
    """Return the given engine, by default that of the profile; None: no engine."""
    result = profile.engine if engine is None and profile is not None else engine
    if isinstance(result, str):
        return None if result == NO_ENGINE else load_engine(result)
    return result


def _dtype_of(model: ModelSpec, cluster: Cluster, profile: CalibrationProfile | None) -> str:
    """The default element type: the first of the checkpoint's, fp16 and others that the profile or the GPU has."""
    dtypes = tuple(cluster.gpu.peak_flops) if profile is None else profile.valid.dtypes
    return next((one for one in (model.dtype, DEFAULT_DTYPE) if one in dtypes), dtypes[0])


def _with_links(
    machine: Cluster, profile: CalibrationProfile | None, bandwidth_bytes_per_s: float | None, latency_s: float | None
) -> tuple[Cluster, tuple[str, ...]]:
    """Return the cluster with the profile's measured links, or with those of the user, and a note."""
    datasheet = machine.link.name
    is_measured = profile is not None and profile.has_measured(machine.link.like or datasheet)
    link_notes: tuple[str, ...] = ()
    if profile is not None and is_measured:
        machine = replace(machine, link=_measured_link(machine.link, profile))
        if not profile.has_times("send_recv") and machine.num_gpus > 1:
            link_notes = (note("links, messages", link=datasheet),)
    if bandwidth_bytes_per_s is not None or latency_s is not None:
        machine = machine.with_link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
        return machine, (note("links, given"),)
    if profile is not None and not is_measured and machine.num_gpus > 1:
        of = profile.links.link if profile.has_measured(profile.links.link) else "none"
        return machine, (note("links, nominal", link=datasheet, profile=profile.name, measured=of),)
    return machine, link_notes


def _measured_link(link: LinkSpec, profile: CalibrationProfile) -> LinkSpec:
    """A link with the profile's measured rates; those of a narrower link of the same kind fall with its bandwidth."""
    rates = profile.links
    measured = LinkSpec(
        name=_name_of(link.name, has_messages=profile.has_times("send_recv")),
        bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s,
        latency_s=rates.latency_s,
        source=link.source,
        short_bytes_per_s=rates.short_bytes_per_s,
        gather=rates.gather,
        all_reduce=rates.all_reduce,
        profile=profile.name,
    )
    if link.like is None:
        return measured
    narrower = load_link(link.like).bandwidth_bytes_per_s / link.bandwidth_bytes_per_s
    return scale(measured, narrower, only_rates=True)


def _name_of(datasheet: str, *, has_messages: bool) -> str:
    """Name of a link whose collectives were measured; its bandwidth and latency are those of single messages."""
    if datasheet == _MEASURED:
        return datasheet
    return f"{datasheet}, {_MEASURED}" if has_messages else f"{datasheet}, by its datasheet"


def notes_on(scenario: Scenario) -> tuple[str, ...]:
    """Notes on the model and on the range of the profile."""
    notes = _model_notes(scenario)
    if scenario.profile is None:
        notes.append(note("roofline"))
    else:
        notes.extend(_range_notes(scenario, scenario.profile))
    return tuple(notes)


def _model_notes(scenario: Scenario) -> list[str]:
    model = scenario.model
    request = scenario.request
    trained = model.max_position_embeddings
    notes = list[str]()
    if trained is not None and request.context_len > trained:
        notes.append(note("max position", tokens=request.context_len, model=model.name, trained=trained))
    if model.from_class:
        notes.append(note("from class", model=model.name))
    notes.extend(note("model", model=model.name, approximation=sentence) for sentence in model.approximations)
    notes.extend(precision_notes(scenario))
    notes.extend(expert_notes(scenario))
    notes.extend(placement_notes(scenario))
    return notes


def _range_notes(scenario: Scenario, profile: CalibrationProfile) -> list[str]:
    """Notes on where the scenario lies outside the range that the profile was measured in."""
    valid = profile.valid
    model = scenario.model
    ranges = {
        "context": (scenario.request.context_len, scenario.context_span),
        "GPUs": (scenario.cluster.num_gpus, valid.num_gpus),
        "hidden_size": (model.hidden_size, valid.hidden_size),
    }
    spans = [(what, value, span) for what, (value, span) in ranges.items()]
    spans += [("head_dim", width, valid.head_dim) for width in profile.kernels.head_dims(model)]
    notes: list[str] = [
        note(f"{what}-range", what=what, value=value, low=low, high=high, profile=profile.name)
        for what, value, (low, high) in spans
        if not low <= value <= high
    ]
    notes.extend(missing_rate_notes(model, profile, scenario.request.dtype_bytes))
    notes.extend(_limit_notes(profile, scenario.kernel))
    if profile.gpu != scenario.cluster.gpu.name:
        notes.append(note("GPU", profile=profile.name, measured=profile.gpu, gpu=scenario.cluster.gpu.name))
    if scenario.request.batch > 1:
        notes.append(note("batch"))
    engine = scenario.engine
    if engine is not None and not engine.knows(profile.gpu):
        gpus = ", ".join(engine.kernel_scale)
        scale = engine.scale_on(profile.gpu)
        notes.append(note("engine", engine=engine.name, known=gpus, gpu=profile.gpu, scale=scale))
    tokens = scenario.request.batch * scenario.request.new_tokens
    for unknown in () if engine is None else engine.unknowns(model.model_type, profile.gpu, tokens):
        assert engine is not None
        if engine.has_share_interval:
            what = {"model": model.model_type, "gpu": profile.gpu, "short": SHORT_TOKENS}.get(unknown, "")
            notes.append(note(f"engine, {unknown}", engine=engine.name, what=what))
    return notes


def _limit_notes(profile: CalibrationProfile, kernel: str) -> list[Note]:
    """A note on a limit of attention that is not the datasheet's, and so high that it changes no time."""
    rates = {f"attention.{kernel}": profile.kernels.attention.get(kernel)}
    if profile.kernels.latent is not None:
        rates["latent.expanded"] = profile.kernels.latent.expanded
        rates["latent.absorbed"] = profile.kernels.latent.absorbed
    if profile.gpu not in builtin_gpus():
        return []
    peak = load_gpu(profile.gpu).peak_flops["fp16"]
    notes = []
    for place, flash in rates.items():
        if not isinstance(flash, FlashRates):
            continue
        is_datasheets = math.isclose(flash.flops_per_s, peak, rel_tol=_SAME_PEAK)
        if not is_datasheets and flash.flops_per_s >= flash.tiles_flops_per_s:
            limit = f"{flash.flops_per_s / 1e12:.4g}"
            tiles = f"{flash.tiles_flops_per_s / 1e12:.4g}"
            notes.append(note("attention limit", profile=profile.name, place=place, limit=limit, tiles=tiles))
    return notes
