"""`kvrsim serve`: plans in a browser. The question is edited on a page; the answer is the page of `plan --plot`.

The server listens on the loopback interface, and each address holds a token that only the terminal shows. It keeps the
last answers in memory and nothing on disk. Each search runs in a process of its own (kvrsim/cli/server).
"""

from __future__ import annotations

import os
import secrets
import socket
from typing import Annotated
from urllib.parse import urlencode

import click

from kvrsim.arguments import Help
from kvrsim.cli.options import with_options
from kvrsim.errors import InputError
from kvrsim.io.annotations import Range


@with_options()
def serve(
    *,
    model: Annotated[str | None, Help("The model of the first question.", metavar="MODEL", positional=True)] = None,
    cluster: Annotated[
        str | None, Help("The cluster of the first question.", metavar="CLUSTER", positional=True)
    ] = None,
    ctx: Annotated[str | None, Help("The context of the first question.", metavar="LEN", section="Question")] = None,
    port: Annotated[int, Range(least=1, most=65535), Help("Port on the loopback interface.", metavar="N")] = 8484,
    no_browser: Annotated[bool, Help("Print the address and open no browser.")] = False,
) -> None:
    """Answer questions in a browser, on this machine alone.

    The address holds a token; whoever has it can ask. Ctrl-C ends the server.

    Example: kvrsim serve llama-3.1-70b h100-nvlink --ctx 32k
    """
    import webbrowser

    from kvrsim.cli.server.application import HttpServer, application
    from kvrsim.cli.server.form import EXAMPLE
    from kvrsim.cli.server.searches import Searches

    token = secrets.token_urlsafe(16)
    listener = listen(port)
    given = {name: value for name, value in {"model": model, "cluster": cluster, "ctx": ctx}.items() if value}
    address = f"http://127.0.0.1:{port}/{token}/"
    if given:
        address += f"#{urlencode({'ctx': EXAMPLE['ctx'], **given})}"
    click.echo(f"kvrsim serve: {address}  (Ctrl-C ends it)")
    if not no_browser:
        webbrowser.open(address)
    searches = Searches()
    server = HttpServer(application(token, searches), searches)
    server.run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """A socket of the loopback interface; InputError if another program has the port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if os.name == "posix":  # elsewhere, this option lets two programs have one port
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise InputError("port", port, f"a port that is free and allowed ({error.strerror})") from None
    listener.listen()
    return listener
