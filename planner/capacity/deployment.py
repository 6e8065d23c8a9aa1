"""The deployment of a capacity plan's fleet: one server for each kind of group, and one for groups that decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvrsim.errors import InputError
from kvrsim.executors.access import execution_of
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from kvrsim.units import format_bandwidth, format_bytes
from planner.candidates import Search
from planner.capacity.fleet import WHOLE
from planner.capacity.request import CapacityRequest
from planner.capacity.result import CapacityPlan, GroupAnswer
from planner.deploy import Deployment, Server, layout_for, longest_sequence
from planner.deploy_engines import DeployEngine, deploy_engine, launching_engine


@dataclass(frozen=True, kw_only=True, slots=True)
class _Servers:
    """Equal servers of a fleet and their description."""

    name: str  # name of the servers' script
    server: Server
    what: str  # description: number of servers, their GPUs, and their prompts
    notes: tuple[str, ...] = ()


def check_deployment(scenario: Scenario, request: CapacityRequest, engine_name: str) -> None:
    """Raise InputError before a search if the engine cannot launch any fleet for the requests.

    These are an engine other than the one whose times the scenario has, and prompts with more tokens than the model
    has positions.
    """
    launching_engine(scenario, engine_name)
    most = scenario.model.max_position_embeddings
    longest = max(int(workload.context_len.max()) for workload in request.workloads())
    if most is not None and longest > most:
        accepted = f"prompts of at most {most} tokens, which {scenario.model.name} has positions for, with `emit`"
        raise InputError("requests", f"a prompt of {longest} tokens", accepted)


def fleet_deployment(plan: CapacityPlan, engine_name: str, *, model: str) -> Deployment:
    """The deployment of the answer's fleet: arguments of its first servers, and a script per kind of server.

    model: the model's name for the engine. Raises InputError if there is no answer, or if the engine lacks a strategy.
    """
    if plan.answer is None:
        raise InputError("emit", engine_name, "a fleet that meets the target; none does")
    servers = list(_servers(plan, plan.answer.groups, deploy_engine(engine_name), model))
    scripts: dict[str, str] = {}
    notes = [servers[0].what]
    if len(servers) > 1:
        servers = [replace(one, server=replace(one.server, config=f"{one.name}.yaml")) for one in servers]
        scripts = {f"{one.name}.sh": f"#!/bin/sh\n# {one.what}\nexec {one.server.command}\n" for one in servers}
        notes = [f"{one.name}.sh: {one.what}" for one in servers]
        notes.append("the arguments are those of the first script; add --host and --port")
    if len(plan.answer.groups) > 1:
        notes.append(
            f"a router sends each prompt to the servers of its length: {plan.request.dispatch(colocated=False)}"
        )
    notes += _cache_notes(plan)
    notes += [note for one in servers for note in (*one.notes, *one.server.notes())]
    if plan.answer.target_tpot_s is None:
        notes.append("these servers were planned to prefill only; --tpot plans the ones that decode")
    files = {name: text for one in servers for name, text in one.server.files.items()}
    return Deployment.of(servers[0].server, _strategy(plan.answer.groups[0]), dict.fromkeys(notes), scripts | files)


def _cache_notes(plan: CapacityPlan) -> Iterator[str]:
    """Notes on what must be configured beside the servers, so that they keep prefixes of sessions as planned."""
    if not plan.request.has_turns:
        return
    tiers = plan.request.tiers
    if not tiers.gpu:
        yield "the plan has no prefix caches: engines that keep prefixes by default need less time"
        return
    yield f"the router must know the prefixes of the servers: {plan.request.dispatch(colocated=True)}"
    if tiers.host_bytes:
        yield f"set up the engine's offloading of KV blocks to the host: {format_bytes(tiers.host_bytes)} for each GPU"
    if tiers.remote_bytes_per_s is not None:
        rate = format_bandwidth(tiers.remote_bytes_per_s)
        yield f"set up a store of KV blocks for all servers, from which each GPU loads {rate}"


def _servers(
    plan: CapacityPlan, groups: tuple[GroupAnswer, ...], engine: DeployEngine, model: str
) -> Iterator[_Servers]:
    decoders = plan.decode_fleet
    budget = plan.request.budget
    if plan.first.serving == "colocated":
        budget = plan.request.step_budget
    longest_tokens = plan.longest_sequence
    most = plan.scenario.model.max_position_embeddings
    ends = list[str]()
    if most is not None and longest_tokens > most:
        ends = [f"the model has {most} positions: some outputs end there, before their {longest_tokens} tokens"]
        longest_tokens = most
    max_len = longest_sequence(plan.scenario.model, longest_tokens - 1)
    for number, group in enumerate(groups, start=1):
        low, high = group.context_range
        request = replace(plan.scenario.request, context_len=high, cached_prefix=0, batch=1)
        here = replace(plan.scenario.on_gpus(group.gpus_per_group), request=request)
        longest = Search().candidate(execution_of(here, get_strategy(_strategy(group))))
        layout = layout_for(engine, longest.execution)
        pieces = longest.partition.chunk_lens
        notes = list(ends)
        if budget is not None:
            pieces = (budget,) * -(-high // budget)
            notes.append(f"requests share steps of up to {budget} tokens")
        elif layout.pieces == "none":
            pieces = (high,)
        elif len(pieces) > 1:
            notes.append(
                f"the pieces are for prompts of {high} new tokens; the plan has other pieces for shorter prompts"
            )
        lengths = "" if len(groups) == 1 else f", for prompts of {low} to {high} new tokens"
        name = "serve" if plan.first.serving == "colocated" else "prefill"
        if len(groups) > 1:
            name += f"-{number}"
        yield _Servers(
            name=name,
            server=Server(
                engine=engine,
                scenario=here,
                layout=layout,
                model=model,
                max_len=max_len,
                pieces=pieces,
                layers=longest.strategy.stage_layers,
                role=None if decoders is None else "prefill",
            ),
            what=_count(group.replicas, group.gpus_per_group, _strategy(group)) + lengths,
            notes=tuple(notes),
        )
    if decoders is not None:
        here = plan.scenario.on_gpus(decoders.gpus_per_group)
        servers = _count(decoders.replicas, decoders.gpus_per_group, decoders.strategy)
        yield _Servers(
            name="decode",
            server=Server(
                engine=engine,
                scenario=here,
                layout=layout_for(engine, execution_of(here, get_strategy(decoders.strategy))),
                model=model,
                max_len=max_len,
                role="decode",
                max_sequences=decoders.batch,
            ),
            what=f"{servers}, to decode batches of {decoders.batch}",
        )


def _strategy(group: GroupAnswer) -> str:
    """The engine's strategy for a group's weights."""
    return "single" if group.weights == WHOLE else group.weights


def _count(replicas: int, gpus: int, strategy: str) -> str:
    return f"{replicas} server{'s' * (replicas > 1)} of {gpus} GPU{'s' * (gpus > 1)} ({strategy})"
