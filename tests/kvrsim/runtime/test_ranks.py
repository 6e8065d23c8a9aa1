"""Ranks: they answer, end together with their parent process, and a failed rank is named quickly."""

from __future__ import annotations

import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.cli.main import EXIT_SIGNALS
from kvrsim.errors import InputError
from kvrsim.runtime import ranks
from kvrsim.runtime.faults import RankError
from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.ranks import launch
from tests.kvrsim.runtime.runtime_models import CONFIGS

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from idlers import working
from kvrsim.runtime import ranks
from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.ranks import launch

ranks._PRELOADED = ["torch.distributed"]  # all that is needed here

if __name__ == "__main__":
    launch(working, sys.argv[1], how=RankSettings(num_ranks=2, timeout_s=600))
"""
IDLERS = """
import os, pathlib

def working(transport, folder):
    pathlib.Path(folder, f"{os.getpid()}.pid").touch()
    while True:
        sum(range(10000))
"""
linux = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="k-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts two ranks; all temporary files are in tmp_path / tmp."""
    script = tmp_path / "start.py"
    script.write_text(SCRIPT)
    (tmp_path / "idlers.py").write_text(IDLERS)  # the only module that the ranks import
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
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
    """Processes whose temporary folder is this one, even if their parent has ended."""
    word, result = f"TMPDIR={folder / 'tmp'}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if word in path.read_bytes().split(b"\0"):
                result.append(int(path.parent.name))
        except OSError:
            continue
    return result


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until this holds; only the time limit of all tests ends the wait, since a busy machine takes long."""
    while not what():
        time.sleep(0.05)


def left_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("pymp-*")]


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "stops"), [(signal.SIGKILL, False), (signal.SIGKILL, True), (signal.SIGTERM, False)]
)
def test_ranks_at_work_end_with_their_parent(
    started: subprocess.Popen[bytes],
    tmp_path: Path,
    number: signal.Signals,
    stops: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that were stopped by SIGSTOP end, too."""
    wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
    for path in list(tmp_path.glob("*.pid"))[:stops]:
        os.kill(int(path.stem), signal.SIGSTOP)
    os.kill(started.pid, number)
    wait_for(lambda: started.poll() is not None)
    wait_for(lambda: processes_of(tmp_path) == [])
    if number == signal.SIGKILL:  # the next run removes the folder of a killed run
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(multiprocessing.util, "get_temp_dir", lambda: tempfile.mkdtemp(prefix="pymp-"))
        folder = ranks._own_folder()
        assert left_in(tmp_path / "tmp") == [str(folder)]
        shutil.rmtree(folder)
    assert left_in(tmp_path / "tmp") == []
    if number == signal.SIGTERM:
        assert started.returncode == 128 + number
        assert started.returncode in EXIT_SIGNALS


@linux
def test_ranks_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    results = launch(workers.listening, how=RankSettings(num_ranks=2))
    assert all(addresses for addresses, *_ in results)
    assert {one for addresses, *_ in results for one in addresses} <= {"0100007F", "00000000000000000000000001000000"}
    assert {interface for _, interface, _ in results} <= {"lo", "lo0"}
    [(_, _, is_connected)] = launch(workers.listening, how=RankSettings(num_ranks=1))
    assert not is_connected, "one rank alone needs no network"


def failing(function: Any, *arguments: Any, num_ranks: int = 2, **how: Any) -> RankError:
    """The RankError of a launch that must fail."""
    with pytest.raises(RankError) as caught:
        launch(function, *arguments, how=RankSettings(num_ranks=num_ranks, **how))
    return caught.value


@pytest.mark.parametrize(
    ("trouble", "kind", "strategy", "rank", "layer", "message"),
    [
        ("dies", "died", "kvr", 1, 1, "killed by SIGKILL"), ("dies", "died", "ring", 1, 1, "killed by SIGKILL"),
        ("dies", "died", "tp", 0, 1, "killed by SIGKILL"), ("memory", "memory", "kvr", 1, 2, "out of memory"),
        ("error", "error", "kvr", 0, 0, "ValueError: a shape that does not fit (runtime_workers.py"),
    ],
)  # fmt: skip
def test_a_rank_that_fails_is_named_with_its_layer(
    trouble: str, kind: str, strategy: str, rank: int, layer: int, message: str
) -> None:
    """Closed connections and pipes show the death long before any time-out."""
    error = failing(workers.troubled, trouble, rank, layer, strategy, timeout_s=600)
    assert (error.faults[0].rank, error.faults[0].kind, error.faults[0].layer) == (rank, kind, layer)
    assert f"rank {rank}, layer {layer}: {message}" in str(error)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_layer() -> None:
    """The other ranks report that they wait for a message of the rank that hangs."""
    for timeout_s in (10.0, 60.0, 600.0):
        error = failing(workers.troubled, "hangs", 1, 1, num_ranks=3, timeout_s=timeout_s)
        if error.faults[0].layer == 1:
            break  # on a busy machine the ranks may need longer to come to the layer
    assert (error.faults[0].rank, error.faults[0].kind, error.faults[0].layer) == (1, "silent", 1)
    assert any(fault.peer == 1 for fault in error.faults if fault.kind == "link")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": replace(workers.LLAMA, config=CONFIGS["llama-mqa"])}, "model is "),
        ({"repeats": 3}, "repeats is 3, but 2 on rank 0"),
        ({"check_logits": True}, "check_logits is True, but False on rank 0"),
        ({"plans": (workers.kvr(12, 11),)}, "partitions is kvr 12,11, but kvr 11,12 on rank 0"),
    ],
)
def test_ranks_with_different_arguments_do_not_start(changed: dict[str, Any], message: str) -> None:
    error = failing(workers.mismatched, changed)
    assert {fault.kind for fault in error.faults} == {"mismatch"}
    assert error.faults[0].rank == 1
    assert error.faults[0].message.startswith(message)


@pytest.mark.slow
def test_a_rank_that_never_answers_is_waited_for_until_the_deadline_only() -> None:
    launch(workers.rank_of, how=RankSettings(num_ranks=2))  # loads torch; all later tests reuse it
    assert "rank 1: no answer within" in str(failing(workers.silent, 1, deadline_s=8))


def test_the_first_ranks_progress_is_heard_before_the_result() -> None:
    heard: list[tuple[int, int, str]] = []
    how = RankSettings(num_ranks=2, deadline_s=1e8)  # longer than a system call can wait
    results = launch(workers.reporting, 3, how=how, on_progress=lambda *progress: heard.append(progress))
    assert heard == [(1, 3, "steps"), (2, 3, "steps"), (3, 3, "steps")]
    assert results == [0, 1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_ranks_compute_on_cores_of_their_own_where_there_are_enough() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert launch(workers.cores_of, how=RankSettings(num_ranks=1)) == [[cores[0]]]
    assert launch(workers.cores_of, how=RankSettings(num_ranks=1, threads=len(cores) + 1)) == [cores]


def test_what_torchrun_would_not_say_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(InputError, match="RANK: got 'x'"):
        launch(workers.rank_of, how=RankSettings(num_ranks=2))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"rank 0: no connection to the other ranks: .*MASTER_ADDR"):
        launch(workers.rank_of, how=RankSettings(num_ranks=2))
    with pytest.raises(InputError, match="gpus: got '3'"):
        launch(workers.rank_of, how=RankSettings(num_ranks=3))


@pytest.mark.slow
def test_an_interrupt_while_ranks_start_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    words = ["run", "--model", "tiny-llama", "--strategy", "kvr-e", "--ctx", "1k", "--gpus", "2", "--device", "cpu"]
    start = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import kvrsim.cli.main as m; m.run()"
    )
    command = [sys.executable, "-c", start, *words]  # a background job of a shell would ignore the signal
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)  # type: ignore[call-overload]
    while not list(tmp_path.glob("pymp-*/kvrsim-*")):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(1.0)  # time for the server to import torch
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate()
    assert (process.returncode, out) == (130, "")
    (line,) = (line for line in errors.splitlines() if "other processes" not in line)  # a busy machine causes a note
    assert "interrupted" in line
    assert left_in(tmp_path) == []


def test_ranks_make_no_folder_for_compiled_code() -> None:
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
