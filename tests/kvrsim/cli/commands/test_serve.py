"""`kvrsim serve` as a process: its address, its port, and how signals end it."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.building.server import ask, get, lines

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are listed in /proc")
LONG = {  # a question whose search takes minutes
    **{"model": "llama-3.1-405b", "cluster": "a100-10gbs-bus", "gpus": "256", "ctx": "256k"},
    **{"strategies": "ring", "search_budget": "1000s"},
}


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvrsim", "serve", "--port", str(port), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = re.search(r"http://\S+/", process.stdout.readline())
    assert address is not None
    assert get(address[0])[0] == 200  # it answers
    yield process, address[0]
    process.kill()
    process.communicate()


def children(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the searches."""
    listed = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(word) for path in listed for word in path.read_text().split()]


def runs(number: int) -> bool:
    """Whether a process still runs; one that nobody has waited for has ended."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("question", [LONG, None], ids=["searching", "idle"])
def test_one_interrupt_ends_the_server_and_its_searches(served: Any, question: dict[str, str] | None) -> None:
    process, address = served
    if question is not None:
        response = ask(address, question)
    workers = children(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    if question is not None:
        assert "end" not in dict(enumerate(lines(response)))
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not [number for number in workers if runs(number)]


def test_a_file_that_never_ends_blocks_no_other_question_and_no_interrupt(served: Any, tmp_path: Path) -> None:
    process, address = served
    os.mkfifo(tmp_path / "pipe.json")
    blocked = ask(address, {"model": str(tmp_path / "pipe.json"), "ctx": "1k"})
    quick = ask(address, {"model": "llama-7b", "ctx": "1k", "gpus": "1", "strategies": "single"})
    assert any("answer" in line for line in lines(quick))
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    blocked.close()


def test_a_search_ends_with_a_server_that_is_killed(served: Any) -> None:
    process, address = served
    response = ask(address, LONG)
    workers = children(process)
    assert workers
    process.kill()
    process.communicate()
    while any(map(runs, workers)):
        select.select([], [], [], 0.05)
    response.close()


def test_a_port_in_use_is_one_line(served: Any) -> None:
    _, address = served
    port = re.search(r":(\d+)/", address)
    assert port is not None
    command = [sys.executable, "-m", "kvrsim", "serve", "--port", port[1], "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvrsim: error: --port: got '{port[1]}'")
    assert done.stderr.count("\n") == 1
