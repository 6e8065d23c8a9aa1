"""The web application of `kvrsim serve`: the question's page, answers as lines, their pages, and pins compared."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from string import ascii_uppercase
from types import FrameType
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvrsim.cli.server.form import EXAMPLE, checked, form
from kvrsim.cli.server.searches import RunningSearch, Searches
from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject
from kvrsim.views.page import Page, Section, join, render, tag

MOST_PINS = len(ascii_uppercase)
HEADERS = {  # of every answer, refusals included
    "Cache-Control": "no-store",  # answers are kept in no browser's files
    "Content-Security-Policy": "frame-ancestors 'self'",  # pages have a stricter policy of their own
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
}
GRACE_S = 1  # seconds that open requests have after a signal
_Result = TypeVar("_Result")


class Lines(StreamingResponse):
    """Lines of JSON; the iterator is closed as soon as the client has left."""

    async def stream_response(self, send: Send) -> None:
        """Send all lines."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)


class WithHeaders:
    """An application whose answers have HEADERS."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request, and its answer with the headers."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)


def application(token: str, searches: Searches) -> ASGIApp:
    """The application at /TOKEN/; it ends the searches when it ends."""
    pages = Pages(searches)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await searches.ready()
        yield
        await searches.close()

    routes = [
        Route(f"/{token}/", pages.question),
        Route(f"/{token}/answer", pages.answer),
        Route(f"/{token}/page", pages.details),
        Route(f"/{token}/compare", pages.comparison),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return WithHeaders(Starlette(routes=routes, middleware=[hosts], lifespan=lifespan))


class HttpServer(uvicorn.Server):
    """A server that ends within GRACE_S of a signal, and at once at a second one, whatever its searches do."""

    def __init__(self, app: ASGIApp, searches: Searches) -> None:
        settings: dict[str, Any] = {"log_level": "critical", "access_log": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S, **settings))
        self._searches = searches

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the searches, and with them the requests that wait for them."""
        self._searches.kill()
        if self.should_exit:
            os._exit(128 + sig)
        super().handle_exit(sig, frame)


class Pages:
    """Answers to the requests of the application."""

    def __init__(self, searches: Searches) -> None:
        self._searches = searches

    async def question(self, _: Request) -> Response:
        """The page with the form."""
        return HTMLResponse(render(question_page()))

    async def answer(self, request: Request) -> Response:
        """The lines of an answer (kvrsim/cli/server/worker.py), of which {"page": true} says that the page is ready."""
        return Lines(self._lines(dict(request.query_params)), media_type="application/x-ndjson")

    async def _lines(self, question: Mapping[str, str]) -> AsyncIterator[str]:
        try:
            asked = checked(question)
        except InputError as error:
            yield json.dumps({"error": str(error), "field": error.parameter}) + "\n"
            return
        async with aclosing(self._searches.lines(asked)) as lines:
            async for line in lines:
                yield json.dumps(line) + "\n"

    async def details(self, request: Request) -> Response:
        """The page of an answer: that of `plan --plot`."""
        try:
            question = checked(request.query_params)
        except InputError as error:
            return _refusal(str(error))
        search = await _while_connected(request, self._searches.complete(question))
        if search.page is None:
            return _refusal(search.last("error") or search.last("no_page"))
        return HTMLResponse(search.page)

    async def comparison(self, request: Request) -> Response:
        """Pinned answers side by side."""
        pins = request.query_params.getlist("pin")
        try:
            if not 1 <= len(pins) <= MOST_PINS:
                raise InputError("pin", f"{len(pins)} questions", f"1 to {MOST_PINS} questions")
            questions = [checked(dict(parse_qsl(pin))) for pin in pins]
        except InputError as error:
            return _refusal(str(error))
        found = await _while_connected(request, asyncio.gather(*map(self._searches.complete, questions)))
        return await asyncio.to_thread(_compared, found)


async def _while_connected(request: Request, result: Awaitable[_Result]) -> _Result:
    """Wait for a result; raises ClientDisconnect, and stops what computes it, if the client leaves."""
    task = asyncio.ensure_future(result)
    leaving = asyncio.create_task(_left(request.receive))
    await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if not task.done():
        task.cancel()
        raise ClientDisconnect
    return task.result()


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _compared(found: list[RunningSearch]) -> Response:
    from kvrsim.views.compare import SavedAnswer, page

    names = ascii_uppercase[: len(found)]
    errors = [
        f"{name}: {search.last('error')}" for name, search in zip(names, found, strict=True) if search.last("error")
    ]
    if errors:
        return _refusal("\n".join(errors))
    plans = [JsonObject(fields=search.last("answer")["plan"], where="pin") for search in found]
    answers = [SavedAnswer.of(name, plan) for name, plan in zip(names, plans, strict=True)]
    return HTMLResponse(render(replace(page(answers), framed=True)))


def _refusal(reason: str) -> Response:
    return HTMLResponse(render(Page(title="This question has no answer", answer=reason, framed=True)), status_code=422)


def question_page() -> Page:
    """The page of the question: a form, the answer with its launches, pinned answers, and the answer's own page."""
    state = tag("p", id="state", class_="lead", role="status", aria_live="polite")
    pinned = join([tag("ol", id="pins"), tag("div", id="compared")])
    answer = join([tag("div", id=ident) for ident in ("best", "advice", "top", "ties", "launches")])
    return Page(
        title="Plan a prefill",
        sections=[
            Section(title="Question", body=tag("div", form(EXAMPLE), state)),
            Section(title="Answer", ident="answer", body=answer),
            Section(title="Pinned", ident="pinned", body=pinned),
            Section(title="Details", ident="details", body=tag("div", id="details-page")),
        ],
        scripts=["serve.js"],
        live=True,
    )
