"""From what a user names to a Scenario, with what has to be said about it."""

from __future__ import annotations

from dataclasses import fields

from kvrsim.arguments import ScenarioArgs, ScenariosArgs, takes
from kvrsim.engine import NO_ENGINE, SHORT_TOKENS, Engine, load_engine
from kvrsim.errors import InputError
from kvrsim.hardware import (
    DEFAULT_CLUSTER,
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
from kvrsim.notes import note
from kvrsim.scenario import ROOFLINE, Request, Scenario
from kvrsim.units import (
    counts_of,
    counts_up_to,
    lengths_of,
    scale,
)

DEFAULT_DTYPE = "fp16"
_MEASURED = "measured"  # what a link is called that no datasheet speaks of
DEFAULT_PROFILES = (  # one a GPU; the first without a cluster
    *("a100-eager", "h100-flash", "h200-flash", "b200-flash", "gb200-flash", "b300-flash", "gb300-flash"),
    *("l40s-flash", "rtx-pro-6000-flash"),
)


def build_scenario(args: ScenarioArgs) -> tuple[Scenario, tuple[str, ...]]:
    """Build the scenario that the arguments describe, and notes on it; raises InputError naming the parameter."""
    spec = args.model if isinstance(args.model, ModelSpec) else load_model(args.model)
    given = args.cluster if isinstance(args.cluster, Cluster) or args.cluster is None else load_cluster(args.cluster)
    profile = _profile_of(args.profile, given)
    cluster = given or (profile and profile.cluster) or load_cluster(DEFAULT_CLUSTER)
    cluster = cluster if args.topology is None else cluster.with_topology(args.topology)
    size_notes = () if args.gpus is None else _size_notes(cluster, args.gpus, named=given is not None)
    cluster = cluster if args.gpus is None else cluster.with_num_gpus(args.gpus)
    cluster, link_notes = _linked(cluster, profile, args.link_bandwidth, args.link_latency)
    placement = args.prefix_placement
    scenario = Scenario(
        model=spec,
        cluster=cluster,
        request=Request(
            context_len=args.ctx,
            batch=args.batch,
            cached_prefix=args.cached_prefix,
            dtype=args.dtype or _dtype_of(profile),
        ),
        profile=profile,
        kernel=args.attention or (profile.attention_kernels[0] if profile else "flash"),
        memory_fraction=args.memory_fraction,
        engine=_engine_of(args.engine, profile),
        expert_parallel=args.expert_parallel,
        expert_imbalance=args.expert_imbalance,
        prefix_placement=PrefixPlacement.parse(placement, "prefix_placement")
        if isinstance(placement, str)
        else placement,
    )
    return scenario, (*size_notes, *notes_on(scenario), *link_notes)


@takes(ScenarioArgs)
def make_scenario(args: ScenarioArgs) -> tuple[Scenario, tuple[str, ...]]:
    """Build what a prediction is about, and notes on it.

    Numbers may be text with a unit, as on the command line.

    Parameters
    ----------

    Returns
    -------
    scenario : Scenario
        Model, cluster, request and everything else that a TTFT depends on.
    notes : tuple of str
        What a reader of a prediction must know, such as that it is extrapolated.

    Raises
    ------
    InputError
        It names the parameter.

    Examples
    --------
    >>> import kvrsim
    >>> scenario, notes = kvrsim.make_scenario(ctx="16k", gpus=8)
    >>> scenario.request.context_len, scenario.num_gpus
    (16384, 8)
    """
    return build_scenario(args)


def build_scenarios(args: ScenariosArgs) -> tuple[Scenario, tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Build the scenario of the longest context on the most GPUs; also its notes, all contexts and numbers of GPUs.

    Without `gpus` these are 2, 4, 8, ... up to the number of GPUs of the cluster. Raises InputError.
    """
    values = {one.name: getattr(args, one.name) for one in fields(args)}
    lengths = lengths_of(args.ctx, "ctx")
    values["ctx"] = lengths[-1]
    if args.gpus is None:
        scenario, _ = build_scenario(ScenarioArgs(**values))
        counts = counts_up_to(scenario.num_gpus)
    else:
        counts = counts_of(args.gpus, "gpus")
    scenario, notes = build_scenario(ScenarioArgs(**values | {"gpus": counts[-1]}))
    return scenario, notes, lengths, counts


def _size_notes(cluster: Cluster, gpus: int, *, named: bool) -> tuple[str, ...]:
    """What to say of more GPUs than the cluster has; InputError where the cluster that was named has no room for them.

    A bus and a chain can be longer, and there can be more nodes; the ports of a switch are limited.
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
    has = f"{cluster.num_gpus} GPU{'s' * (cluster.num_gpus != 1)}"
    return (note("size", cluster=cluster.name, has=has, gpus=gpus, longer=longer[cluster.topology]),)


def _profile_of(profile: str | CalibrationProfile | None, cluster: Cluster | None) -> CalibrationProfile | None:
    """The given profile; by default the one of the cluster's GPU, else the datasheet's roofline."""
    if isinstance(profile, CalibrationProfile):
        return profile
    if profile is None:
        if cluster is None:
            return load_profile(DEFAULT_PROFILES[0])
        defaults = (load_profile(name) for name in DEFAULT_PROFILES)
        return next((default for default in defaults if default.gpu == cluster.gpu.name), None)
    return None if profile == ROOFLINE else load_profile(profile)


def _engine_of(engine: str | Engine | None, profile: CalibrationProfile | None) -> Engine | None:
    """The given engine; by default the profile's."""
    chosen = profile.engine if engine is None and profile is not None else engine
    if isinstance(chosen, str):
        return None if chosen == NO_ENGINE else load_engine(chosen)
    return chosen


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
            link_notes = (note("links, messages", link=datasheet),)
    if bandwidth_bytes_per_s is not None or latency_s is not None:
        machine = machine.with_link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s)
        return machine, (note("links, given"),)
    if profile is not None and measured is None and machine.num_gpus > 1:
        of = profile.links.link if _has_measured(profile, profile.links.link) else "none"
        return machine, (note("links, nominal", link=datasheet, profile=profile.name, measured=of),)
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
        notes.append(note("roofline"))
    else:
        notes.extend(_range_notes(scenario, scenario.profile))
    return tuple(notes)


def _model_notes(scenario: Scenario) -> list[str]:
    model, request = scenario.model, scenario.request
    trained, notes = model.max_position_embeddings, list[str]()
    if trained is not None and request.context_len > trained:
        notes.append(note("max position", tokens=request.context_len, model=model.name, trained=trained))
    notes.extend(note("model", model=model.name, approximation=sentence) for sentence in model.approximations)
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
        note(f"{what}-range", what=what, value=value, low=low, high=high, profile=profile.name)
        for what, value, (low, high) in spans
        if not low <= value <= high
    ]
    notes.extend(coverage_notes(model, profile, scenario.request.dtype_bytes))
    if profile.gpu != scenario.cluster.gpu.name:
        notes.append(note("GPU", profile=profile.name, measured=profile.gpu, gpu=scenario.cluster.gpu.name))
    if scenario.request.batch > 1:
        notes.append(note("batch"))
    engine = scenario.engine
    if engine is not None and not engine.knows(profile.gpu):
        known, scale = ", ".join(engine.kernel_scale), engine.scale_on(profile.gpu)
        notes.append(note("engine", engine=engine.name, known=known, gpu=profile.gpu, scale=scale))
    tokens = scenario.request.batch * scenario.request.new_tokens
    for unknown in () if engine is None else engine.unknowns(model.model_type, profile.gpu, tokens):
        assert engine is not None
        if engine.fit is not None and unknown in engine.fit.widths:
            what = {"model": model.model_type, "gpu": profile.gpu, "short": SHORT_TOKENS}.get(unknown, "")
            notes.append(note(f"engine, {unknown}", engine=engine.name, what=what))
    return notes
