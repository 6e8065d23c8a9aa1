"""A process that answers questions of the server, one after another.

A question is one line of JSON on standard input. Its answer is lines of JSON on standard output, the last of which is
{"end": whether the process can answer further questions}; before it come

- {"progress": text} and {"candidate": {"strategy", "ttft_s", "fits"}} during the search,
- {"answer": {...}}, as `answer_of` makes it,
- {"page": text}, the page of `plan --plot` with all timelines, or {"no_page": line} if it cannot be drawn,
- {"error": line, "field": the wrong field, if it is one} in place of an answer.

The server ends the process if nobody waits for its answer any more. The process ends itself if the server ends.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from kvrsim.results.results import Plan
    from kvrsim.scenario import Scenario
    from planner.candidates import Candidate

Tell = Callable[[Mapping[str, Any]], object]
MOST_BYTES = 2 * 2**30  # memory of one process; a plan of 16 GPUs takes about 0.1 GiB
MOST_CPU_S = 600  # processor seconds of one question
_PROGRESS_S = 0.1  # shortest time between two lines of progress


class WorkLimitError(Exception):
    """Raised if a question takes more than MOST_CPU_S."""


def main() -> None:
    """Answer the questions of standard input until it ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no line of an answer
    questions = SimpleQueue[str]()
    threading.Thread(target=_read, args=(sys.stdin, questions), daemon=True).start()
    limit_memory()
    warm_up()
    while True:
        question = json.loads(questions.get())

        def tell(line: Mapping[str, Any]) -> None:
            answers.write(json.dumps(line) + "\n")
            answers.flush()

        answer(question, tell)


def _read(source: TextIO, questions: SimpleQueue[str]) -> None:
    """Pass on the lines of the server; end this process, also within a search, if the server has ended."""
    for line in source:
        questions.put(line)
    os._exit(0)


def warm_up() -> None:
    """Import the planner and the page before the first question."""
    import kvrsim.views.plan

    kvrsim.plan(ctx="512", gpus=2, strategies="tp")


def limit_memory() -> None:
    """Let an allocation beyond MOST_BYTES fail, where the system has such a limit."""
    if sys.platform != "linux":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))


@contextmanager
def limited_work() -> Iterator[None]:
    """Raise WorkLimitError after MOST_CPU_S processor seconds within the block, where the system has such a limit."""
    if sys.platform == "win32":
        yield
        return
    import resource
    import signal

    def end(_signal: int, _frame: object) -> None:
        raise WorkLimitError

    handler = signal.signal(signal.SIGXCPU, end)
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    _, most = limits
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + MOST_CPU_S, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, limits)
        signal.signal(signal.SIGXCPU, handler)


def answer(question: Mapping[str, str], tell: Tell) -> None:
    """Tell the lines of an answer, the end included; raises nothing."""
    from kvrsim.errors import KvrsimError

    can_go_on = True
    try:
        with limited_work():
            _answer(question, tell)
    except KvrsimError as error:
        tell({"error": reason(error), "field": getattr(error, "parameter", "")})
    except Exception as error:  # the page shows the reason; the server continues
        tell({"error": reason(error)})
        can_go_on = False
    tell({"end": can_go_on})


def _answer(question: Mapping[str, str], tell: Tell) -> None:
    from kvrsim.arguments import NoiseArgs, UsersArgs
    from kvrsim.cli.server.form import arguments
    from planner.api import plan_of
    from planner.candidates import ForEngine, Search

    args, plan_args, only = arguments(question)
    told_s = 0.0

    def progress(_done: float, _total: float | None, what: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _PROGRESS_S:
            told_s = time.monotonic()
            tell({"progress": what})

    def candidate(found: Candidate) -> None:
        tell({"candidate": {"strategy": found.strategy.name, "ttft_s": found.ttft_s, "fits": found.fits}})

    engine = None if only is None else ForEngine(only, only=True)
    search = Search(on_progress=progress, on_candidate=candidate, engine=engine)
    scenario, plan = plan_of(args, plan_args, NoiseArgs(), UsersArgs(), timelines="all", search=search)
    tell({"answer": answer_of(scenario, plan, model=str(args.model))})
    tell(page_of(plan, command_of(question)))


def answer_of(scenario: Scenario, plan: Plan, *, model: str) -> dict[str, Any]:
    """The answer as plain JSON values: sentences, the table of the fastest, launches, and the object of `--json`."""
    from kvrsim.cli.server.form import on_page
    from kvrsim.views.plan_text import first_rows, sentences, strategies_table, tie_text
    from kvrsim.views.table import Cell

    table = strategies_table(plan, short=plan.feasible)
    rows = [[[cell.shown, cell.value] if isinstance(cell, Cell) else cell for cell in row] for row in table.rows]
    return {
        "sentences": [on_page(sentence) for sentence in sentences(plan)],
        "advice": advice_of(plan),
        "used": used_of(plan),
        "columns": [[column.label, column.number] for column in table.columns],
        "rows": rows,
        "ties": tie_text(plan, first_rows(plan)),
        "launches": launches_of(scenario, plan, model=model),
        "plan": plan.to_dict(),
    }


def advice_of(plan: Plan) -> list[dict[str, Any]]:
    """Changes of the question that the form can make: a text, and the values of fields by name."""
    from kvrsim.cli.server.form import fields_of, on_page
    from kvrsim.units import format_seconds

    texts = {one.change: f"{on_page(one.change)}: {format_seconds(one.ttft_s)}" for one in plan.advice}
    if plan.shortfall is not None:
        texts |= {one.change: f"{on_page(one.change)}: {one.strategy} fits" for one in plan.shortfall.would_fit}
    fields = {change: fields_of(change) for change in texts}
    return [{"text": text, "fields": fields[change]} for change, text in texts.items() if fields[change]]


def used_of(plan: Plan) -> dict[str, str]:
    """Values that the answer used where a field was empty, by field."""
    question = plan.question
    return {
        "gpus": str(question.num_gpus),
        "batch": str(question.batch),
        "cached_prefix": str(question.cached_prefix),
        "dtype": question.dtype,
        "attention": question.attention,
        "memory_fraction": f"{question.memory_fraction:g}",
        "engine": question.engine,
        "profile": question.profile,
    }


def launches_of(scenario: Scenario, plan: Plan, *, model: str) -> list[dict[str, Any]]:
    """How each engine that has the plan is started for it; a reason in place of what an engine refuses."""
    from kvrsim.errors import InputError
    from planner.deploy import deployment_of, planned

    launches = list[dict[str, Any]]()
    if plan.deployable is None:
        return []
    candidate = planned(scenario, plan.deployable)
    for engine in plan.deployable.engines:
        if plan.engine not in (None, engine):
            continue
        try:
            deployment = deployment_of(candidate, engine, model=model)
            launches.append(deployment.to_dict())
        except InputError as error:
            launches.append({"engine": engine, "refused": reason(error)})
    return launches


def command_of(question: Mapping[str, str]) -> str:
    """The command that answers a question in a terminal."""
    options = {f"--{name.replace('_', '-')}": value for name, value in question.items()}
    if options.get("--expert-parallel") is not None:
        options["--expert-parallel"] = ""
    return shlex.join(["kvrsim", "plan", *(word for pair in options.items() for word in pair if word)])


def page_of(plan: Plan, command: str) -> dict[str, str]:
    """The line with the page of a plan; a fault in drawing it does not take the answer away."""
    from kvrsim.views.page import render
    from kvrsim.views.plan import plan_page

    try:
        return {"page": render(replace(plan_page(plan), answer="", command=command, framed=True))}
    except Exception as error:
        return {"no_page": f"The timelines cannot be drawn: {reason(error)}"}


def reason(error: Exception) -> str:
    """Why a question has no answer, in one line."""
    from kvrsim.errors import KvrsimError

    limit = {MemoryError: f"{MOST_BYTES / 2**30:g} GiB of memory", WorkLimitError: f"{MOST_CPU_S} processor seconds"}
    if type(error) in limit:
        return f"this takes more than the {limit[type(error)]} that the server allows; kvrsim plan has no such limit"
    return _line(str(error) if isinstance(error, KvrsimError) else f"{type(error).__name__}: {error}")


def _line(words: str) -> str:
    return " ".join(words.split())


if __name__ == "__main__":
    main()
