"""Ranks end with whoever started them, however that ends, and listen to nobody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.cli.main import ENDED
from kvrsim.runtime import ranks as pools
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.ranks import Launch, launch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[4]
SCRIPT = """
import signal, sys
from tests.kvrsim.runtime.ranks.rank_idlers import working
from kvrsim.runtime import ranks
from kvrsim.runtime.ranks import Launch, launch

ranks._PRELOADED = ["torch.distributed"]  # all that is needed here

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
if __name__ == "__main__":
    launch(working, sys.argv[1], how=Launch(num_ranks=2, timeout_s=600))
"""
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts two ranks, whose temporary files all stand in tmp_path / tmp."""
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(tmp_path / "tmp"),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield process
    finally:
        for pid in processes_of(tmp_path):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def processes_of(folder: Path) -> list[int]:
    """All that run with its temporary folder, whoever their parent is now."""
    word, found = f"TMPDIR={folder / 'tmp'}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_for(what: object, within_s: float) -> bool:
    until_s = time.monotonic() + within_s
    while not what():  # type: ignore[operator]
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir() if path.name.startswith(("kvrsim-", "pymp-"))]


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_at_work(started: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals) -> None:
    assert wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 60)
    os.kill(started.pid, number)
    assert wait_for(lambda: started.poll() is not None, 10)
    assert wait_for(lambda: processes_of(tmp_path) == [], 8)
    left = left_in(tmp_path)
    assert [name for name in left if number != signal.SIGKILL or name.startswith("kvrsim-")] == []
    if number in (signal.SIGTERM, signal.SIGHUP):
        assert started.returncode == 128 + number
        assert started.returncode in ENDED


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_while_they_start(started: subprocess.Popen[bytes], tmp_path: Path, number: signal.Signals) -> None:
    assert wait_for(lambda: any(name.startswith("kvrsim-") for name in left_in(tmp_path)), 60)
    time.sleep(0.3)
    os.kill(started.pid, number)
    assert wait_for(lambda: processes_of(tmp_path) == [], 90)  # torch may have to be imported first
    assert number == signal.SIGKILL or left_in(tmp_path) == []


@linux
def test_a_rank_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_STOPPED_LOOKS", 3)
    started_s = time.monotonic()
    with pytest.raises(RankError, match="rank 1: no answer for 3 s; it is stopped") as caught:
        launch(workers.stopped, 1, how=Launch(num_ranks=2, timeout_s=600, deadline_s=600))
    assert caught.value.cause.rank == 1
    assert time.monotonic() - started_s < 40


@linux
def test_they_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = launch(workers.listening, how=Launch(num_ranks=2))
    assert all(found)
    addresses = {address for one in found for address in one}
    assert addresses <= {"0100007F", "00000000000000000000000001000000"}
    assert {name for name, _ in launch(workers.interfaces, how=Launch(num_ranks=2))} <= {"lo", "lo0"}


def test_one_rank_alone_needs_no_network() -> None:
    [(_, connected)] = launch(workers.interfaces, how=Launch(num_ranks=1))
    assert not connected
