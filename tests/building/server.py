"""Run the server of `kvrsim serve` in a thread, and read its answers."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

from kvrsim.cli.commands.serve import listen
from kvrsim.cli.server.application import HttpServer, application
from kvrsim.cli.server.searches import Searches

Line = dict[str, Any]


@contextmanager
def running_server(token: str, searches: Searches | None = None) -> Iterator[str]:
    """Run the server on a free port; yield the address of the first page."""
    searches = searches or Searches()
    server = HttpServer(application(token, searches), searches)
    with listen(0) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        server.handle_exit(signal.SIGTERM, None)
        thread.join()


def get(url: str, host: str = "127.0.0.1") -> tuple[int, str, Mapping[str, str]]:
    """Status, text and headers of the answer to a request."""
    try:
        with urlopen(Request(url, headers={"Host": host})) as response:
            return response.status, response.read().decode(), response.headers
    except HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode(), refused.headers


def ask(address: str, question: Mapping[str, str]) -> HTTPResponse:
    """The open response of a question; its lines arrive while the search runs."""
    response = urlopen(f"{address}answer?{urlencode(question)}")
    assert isinstance(response, HTTPResponse)
    return response


def lines(response: HTTPResponse) -> Iterator[Line]:
    """The lines of an answer."""
    for line in response:
        yield json.loads(line)


def last(found: Iterator[Line] | list[Line], name: str) -> Any:
    """The value of the last line with this name."""
    values = [line[name] for line in found if name in line]
    assert values, f"no line with {name}"
    return values[-1]
