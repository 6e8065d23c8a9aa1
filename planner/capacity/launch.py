"""The launch of a capacity plan's fleet: a server for each kind of group, and for the fleet that decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvrsim.errors import InputError
from kvrsim.scenario import Scenario
from kvrsim.strategies import get_strategy
from planner.candidates import Candidate, Search
from planner.capacity.fleet import WHOLE
from planner.capacity.request import CapacityRequest
from planner.capacity.result import CapacityPlan, GroupAnswer
from planner.deploy import Launch, Server, about_pieces, degrees_on, deploy_engine

_LAST_GPU = "separate, with `emit`: no engine decodes on one GPU of a group that prefills"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Servers:
    """Equal servers."""

    name: str  # of their script
    server: Server
    what: str  # in words: how many, of what, for which prompts
    notes: tuple[str, ...] = ()

    def script(self) -> str:
        return f"#!/bin/sh\n# {self.what}\nexec {self.server.command}\n"


def check_emit(request: CapacityRequest) -> None:
    """Raises InputError where the groups do what no engine does."""
    if request.decoding.seconds_per_token is not None:
        raise InputError("decode", "last-gpu", _LAST_GPU)


def launch_of_fleet(
    scenario: Scenario, request: CapacityRequest, plan: CapacityPlan, engine_name: str, *, model: str
) -> Launch:
    """How the answer's fleet is started: args of its first groups; a script for each kind where there are several.

    model: what the engine loads. Raises InputError where there is no answer, or the engine has not got a strategy.
    """
    check_emit(request)
    if plan.answer is None:
        raise InputError("emit", engine_name, "a fleet that meets the target; none does")
    servers = tuple(_servers(scenario, request, plan, engine_name, model))
    several = len(servers) > 1
    if several:
        servers = tuple(replace(one, server=replace(one.server, config=f"{one.name}.yaml")) for one in servers)
    files = {name: text for one in servers for name, text in one.server.files.items()}
    scripts = {f"{one.name}.sh": one.script() for one in servers} if several else {}
    notes = [f"{one.name}.sh: {one.what}" if several else one.what for one in servers]
    if several:
        notes.append("the arguments are those of the first script; --host and --port are for you to add")
    if len(plan.answer.groups) > 1:
        notes.append(f"a router sends each prompt to the servers of its length: {plan.request.dispatch}")
    notes += [note for one in servers for note in (*one.notes, *one.server.notes())]
    if plan.decode_fleet is None:
        notes.append("these servers were planned to prefill only; --tpot plans the ones that decode")
    first = servers[0].server
    return Launch(
        engine=first.engine.name,
        version=first.engine.version,
        strategy=_strategy(plan.answer.groups[0]),
        command=first.command,
        args=first.args,
        files=scripts | files,
        notes=tuple(dict.fromkeys(notes)),
    )


def _servers(
    scenario: Scenario, request: CapacityRequest, plan: CapacityPlan, engine_name: str, model: str
) -> Iterator[_Servers]:
    assert plan.answer is not None
    groups, decodes = plan.answer.groups, plan.decode_fleet
    engine = deploy_engine(engine_name)
    max_len = plan.question.context_len + int(plan.workload["output_tokens"]["max"])
    for number, group in enumerate(groups, start=1):
        longest = _longest(scenario, group)
        degrees, pieces = degrees_on(engine, longest.scenario, longest.strategy), longest.partition.chunk_lens
        tokens, budget = longest.scenario.request.new_tokens, request.pack_tokens
        if budget is not None:
            pieces = (budget,) * (tokens // budget) + (tokens % budget,) * (tokens % budget > 0)
        elif degrees.pipeline == 1:
            pieces = (tokens,)
        yield _Servers(
            name="prefill" if len(groups) == 1 else f"prefill-{number}",
            server=Server(
                engine=engine,
                scenario=longest.scenario,
                degrees=degrees,
                model=model,
                max_len=max_len,
                step_tokens=max(pieces) if budget is None else budget,
                in_pieces=len(pieces) > 1,
                role=None if decodes is None else "prefill",
            ),
            what=_what(group, alone=len(groups) == 1),
            notes=tuple(
                _group_notes(group, pieces, budget, about_pieces(degrees, pieces, longest.strategy.stage_layers or ()))
            ),
        )
    if decodes is not None:
        here = scenario.on_gpus(decodes.gpus_per_group)
        yield _Servers(
            name="decode",
            server=Server(
                engine=engine,
                scenario=here,
                degrees=degrees_on(engine, here, get_strategy(decodes.strategy)),
                model=model,
                max_len=max_len,
                role="decode",
                max_sequences=decodes.batch,
            ),
            what=f"{_count(decodes.replicas, decodes.gpus_per_group, decodes.strategy)}, to decode batches of"
            f" {decodes.batch}",
        )


def _longest(scenario: Scenario, group: GroupAnswer) -> Candidate:
    """The longest prompt that is sent to a group, with its partition."""
    request = replace(scenario.request, context_len=group.context_range[1], cached_prefix=0, batch=1)
    here = replace(scenario.on_gpus(group.gpus_per_group), request=request)
    return Search().candidate(here, get_strategy(_strategy(group)))


def _strategy(group: GroupAnswer) -> str:
    """The only one of groups that an engine serves."""
    return "single" if group.weights == WHOLE else group.weights


def _what(group: GroupAnswer, *, alone: bool) -> str:
    low, high = group.context_range
    sent = "" if alone else f", for prompts of {low} to {high} new tokens"
    return f"{_count(group.replicas, group.gpus_per_group, _strategy(group))}{sent}"


def _count(replicas: int, gpus: int, strategy: str) -> str:
    return f"{replicas} server{'s' * (replicas > 1)} of {gpus} GPU{'s' * (gpus > 1)} ({strategy})"


def _group_notes(group: GroupAnswer, pieces: Sequence[int], budget: int | None, others: Iterator[str]) -> Iterator[str]:
    if budget is not None:
        yield f"prompts share steps of up to {budget} new tokens"
    elif len(pieces) > 1:
        yield f"pieces are those of {group.context_range[1]} new tokens; shorter prompts were planned with their own"
    yield from others
