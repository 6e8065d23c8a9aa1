"""Run `kvrsim serve` in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from kvrsim.cli.commands.serve import application


@contextmanager
def running_server(token: str) -> Iterator[str]:
    """Run the server on a free port; yield the address of the first page."""
    server = uvicorn.Server(uvicorn.Config(application(token), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    (port,) = {socket.getsockname()[1] for one in server.servers for socket in one.sockets}
    yield f"http://127.0.0.1:{port}/{token}/"
    server.should_exit = True
    thread.join()
