"""`kvrsim serve`: plans in a browser. The question is edited on a page; the answer is the page of `plan --plot`.

The server listens on the loopback interface, and each address holds a token that only the terminal shows. The server
keeps the last answers in memory and nothing on disk. A new question ends the search for the question before it.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from kvrsim.arguments import NoiseArgs, PlanArgs, ScenarioArgs, UsersArgs, argument, count, option, switch, text
from kvrsim.cli.options import takes
from kvrsim.errors import InputError, KvrsimError
from kvrsim.io.schema import JsonObject, shipped_files
from kvrsim.views.page import Page, Section, join, render, tag
from kvrsim.views.table import sentences

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from kvrsim.results.results import Plan
    from planner.candidates import Candidate

FIELDS = {  # fields of the form: the parameter of kvrsim.plan, its label, and an example
    "model": ("Model", "llama-3.1-70b"),
    "cluster": ("Cluster", "h100-nvlink"),
    "ctx": ("Context", "16k, or 1k:64k:x4"),
    "gpus": ("GPUs", "8"),
    "engine": ("Engine", "serving"),
    "strategies": ("Strategies", "all"),
    "cached_prefix": ("Cached prefix", "0"),
    "batch": ("Batch", "1"),
    "dtype": ("Data type", "bf16"),
    "link_bandwidth": ("Link bandwidth", "10GB/s"),
}
_NAMES = {"model": "models", "cluster": "clusters", "engine": "engines"}  # folders with suggested values
_DATA = Path(__file__).parents[2] / "data"
_MOST_ANSWERS = 64  # largest number of answers in memory


class SupersededError(Exception):
    """The question was replaced by a newer one."""


@dataclass(slots=True)
class Answers:
    """Answers by question; one search runs at a time, and a new question ends an older search."""

    kept: OrderedDict[tuple[Any, ...], Plan] = field(default_factory=OrderedDict)
    newest: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(
        self,
        question: Mapping[str, str],
        tell: Callable[[Mapping[str, Any]], object] | None = None,
        *,
        timeline: bool = False,
    ) -> Plan:
        """Return the plan for a question.

        tell: called with progress and candidates as plain JSON values. A question with `tell` ends an older search.
        Raises InputError, and SupersededError if a newer question arrives during the search.
        """
        if unknown := sorted(set(question) - set(FIELDS)):
            raise InputError(unknown[0], question[unknown[0]], f"one of {', '.join(FIELDS)}")
        if ".py" in question.get("strategies", ""):
            raise InputError("strategies", question["strategies"], "names; a file is for the command line")
        if "ctx" not in question:
            raise InputError("ctx", "nothing", "a context length, such as 16k")
        key, options = (timeline, *sorted(question.items())), dict(question)
        self.newest += tell is not None
        mine = self.newest

        def progress(_done: float, _total: float | None, what: str) -> None:
            if self.newest != mine and (tell or timeline):
                raise SupersededError
            if tell is not None:
                tell({"progress": what})

        def candidate(one: Candidate) -> None:
            if tell is not None:
                tell({"candidate": {"strategy": one.strategy.name, "ttft_s": one.ttft_s, "fits": one.fits}})

        with self.lock:
            if key not in self.kept:
                from planner.api import plan_of
                from planner.candidates import Search

                args, plan_args = ScenarioArgs.take(options), PlanArgs.take(options)
                about: Any = {"timelines": "all" if timeline else None}
                about["search"] = Search(on_progress=progress, on_candidate=candidate)
                _, self.kept[key] = plan_of(args, plan_args, NoiseArgs(), UsersArgs(), **about)
                while len(self.kept) > _MOST_ANSWERS:
                    self.kept.popitem(last=False)
            self.kept.move_to_end(key)
            return self.kept[key]


def application(token: str) -> Starlette:
    """The web application: the form at /TOKEN/, answers as JSON lines, their pages, and pinned answers compared."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route

    answers = Answers()

    def answer(request: Any) -> StreamingResponse:
        return StreamingResponse(answer_lines(answers, dict(request.query_params)), media_type="application/x-ndjson")

    def as_html(page: Callable[[Any], Page]) -> Callable[[Any], HTMLResponse]:
        def view(request: Any) -> HTMLResponse:
            try:
                return HTMLResponse(render(page(request.query_params)))
            except (KvrsimError, SupersededError) as error:
                page_of_error = Page(title="This question has no answer", answer=str(error))
                return HTMLResponse(render(page_of_error), status_code=422)

        return view

    def details(query: Any) -> Page:
        from kvrsim.views.plan import plan_page

        return plan_page(answers.of(dict(query), timeline=True))

    def comparison(query: Any) -> Page:
        from kvrsim.views.compare import SavedAnswer, page

        plans = [answers.of(dict(parse_qsl(pin))).to_dict() for pin in query.getlist("pin") or [""]]
        data = [JsonObject(fields=json.loads(json.dumps(plan)), where="pin") for plan in plans]
        return page(list(map(SavedAnswer.of, ascii_uppercase, data)))

    pages = {"": lambda _: question_page(), "page": details, "compare": comparison}
    routes = [Route(f"/{token}/{name}", as_html(page)) for name, page in pages.items()]
    routes.append(Route(f"/{token}/answer", answer))
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def answer_lines(answers: Answers, question: Mapping[str, str]) -> Iterator[str]:
    """JSON lines: {"progress": text} and {"candidate": {"strategy", "ttft_s", "fits"}} while the search runs, then
    {"plan": ..., "answer": text} or {"error": line}.
    """
    lines: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()

    def work() -> None:
        try:
            plan = answers.of(question, lines.put)
            lines.put({"answer": "\n".join(sentences(plan)), "plan": plan.to_dict()})
        except SupersededError:
            lines.put({"error": "a newer question ended the search"})
        except KvrsimError as error:
            lines.put({"error": " ".join(str(error).split())})
        except Exception as error:  # the page shows the error; the server continues
            lines.put({"error": f"{type(error).__name__}: {error}"})
        finally:
            lines.put(None)

    threading.Thread(target=work, daemon=True).start()
    while (line := lines.get()) is not None:
        yield json.dumps(line) + "\n"


def question_page() -> Page:
    """The page of the question: a form, the answer, pinned answers, and the answer's own page."""
    fields = []
    for name, (label, example) in FIELDS.items():
        values = shipped_files(_DATA / _NAMES[name]) if name in _NAMES else ()
        options = tag("datalist", *(tag("option", value=value) for value in values), id=f"names-{name}")
        about: dict[str, Any] = {"list": f"names-{name}"} if values else {}
        box = tag(
            "input", name=name, id=f"ask-{name}", placeholder=example, autocomplete="off", spellcheck="false", **about
        )
        fields.append(tag("label", label, box, *((options,) if values else ())))
    form = tag(
        "form", *fields, tag("button", "Plan", type="submit"), tag("button", "Pin", type="button", id="pin"), id="ask"
    )
    state = tag("p", id="state", class_="lead", role="status", aria_live="polite")
    parts = {"answer": ("best", "top"), "pinned": ("compared",), "details": ("details-page",)}
    bodies = {name: [tag("div", id=one) for one in inside] for name, inside in parts.items()}
    bodies["pinned"].insert(0, tag("ol", id="pins"))
    return Page(
        title="Plan a prefill",
        sections=[
            Section(title="Question", body=tag("div", form, state)),
            *(Section(title=name.capitalize(), ident=name, body=join(inside)) for name, inside in bodies.items()),
        ],
        scripts=["serve.js"],
        live=True,
    )


@takes()
def serve(
    *,
    model: Any = argument("MODEL", "The model of the first question.", default=None),
    cluster: Any = argument("CLUSTER", "The cluster of the first question.", default=None),
    ctx: Any = option("LEN", "The context of the first question.", "Question", text),
    port: Any = option("N", "Port on the loopback interface.", "Output", count(65535), 8484),
    no_browser: Any = switch("Print the address and open no browser."),
) -> None:
    """Answer questions in a browser, on this machine alone.

    The address holds a token; whoever has it can ask. Ctrl-C ends the server.

    Example: kvrsim serve llama-3.1-70b h100-nvlink --ctx 32k
    """
    import webbrowser

    import click

    try:
        import uvicorn

        app = application(token := secrets.token_urlsafe(16))
    except ImportError as error:
        raise InputError("serve", error.name, "starlette and uvicorn, by: pip install 'kvrsim[serve]'") from None
    first = {name: value for name, value in {"model": model, "cluster": cluster, "ctx": ctx}.items() if value}
    address = f"http://127.0.0.1:{port}/{token}/" + (f"#{urlencode(first)}" if first else "")
    click.echo(f"kvrsim serve: {address}  (Ctrl-C ends it)")
    threading.Thread(target=_warm_up, daemon=True).start()
    if not no_browser:
        webbrowser.open(address)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


def _warm_up() -> None:
    """Import the planner while the browser starts."""
    import kvrsim.views.plan

    kvrsim.plan(ctx="512", gpus=2, strategies="tp")
