"""Answers of the server's processes, and their limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from kvrsim.cli.server import worker
from kvrsim.cli.server.form import EXAMPLE, FIELDS, fields_of, on_page
from kvrsim.cli.server.worker import answer, command_of

SHORT = {"model": "llama-7b", "cluster": "a100-nvlink", "gpus": "2", "ctx": "1k", "strategies": "tp"}


def told(question: Mapping[str, str]) -> dict[str, Any]:
    """The last line of each name."""
    found: dict[str, Any] = {}
    answer(question, found.update)
    return found


@pytest.mark.parametrize("field", FIELDS, ids=[field.name for field in FIELDS])
def test_the_form_accepts_its_placeholders(field: Any) -> None:
    question = EXAMPLE | {"ctx": "2k", "strategies": "tp"} | {field.name: field.example}
    found = told(question)
    assert "error" not in found, found.get("error")
    assert found["answer"]["sentences"]


@pytest.mark.slow
def test_the_example_of_an_empty_form_has_an_answer() -> None:
    found = told(EXAMPLE)
    assert found["answer"]["plan"]["best"] is not None
    assert "page" in found


def test_values_that_an_answer_used_are_accepted() -> None:
    used = told(SHORT)["answer"]["used"]
    again = told(SHORT | used)
    assert "error" not in again
    assert again["answer"]["plan"]["best"] == told(SHORT)["answer"]["plan"]["best"]


def test_a_launch_is_that_of_the_best_strategy() -> None:
    found = told(SHORT | {"model": "llama-3.1-8b", "only_deployable": "vllm"})["answer"]
    (launch,) = [one for one in found["launches"] if one["engine"] == "vllm"]
    assert launch["strategy"] == found["plan"]["best"]["strategy"]
    assert launch["command"].startswith("vllm serve")


def test_advice_fills_fields_of_the_form() -> None:
    question = {"model": "llama-3.1-70b", "cluster": "4xh100", "gpus": "2", "ctx": "32k"}
    found = told(question)["answer"]
    assert found["plan"]["best"] is None
    assert found["advice"]
    followed = told(question | found["advice"][0]["fields"])["answer"]
    assert followed["plan"]["best"] is not None
    assert not any("--" in one["text"] for one in found["advice"])


def test_options_become_fields() -> None:
    assert fields_of("--dtype fp8 --expert-parallel") == {"dtype": "fp8", "expert_parallel": "yes"}
    assert fields_of("--replicas 2") == {}
    assert on_page("Faster, simulated: --dtype fp8: 1 s") == "Faster, simulated: Data type fp8: 1 s"
    assert command_of({"ctx": "2k", "expert_parallel": "yes"}) == "kvrsim plan --ctx 2k --expert-parallel"


@pytest.mark.parametrize("error", [MemoryError(), worker.WorkLimitError()])
def test_a_limit_that_is_reached_is_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("planner.api.plan_of", fail)
    found = told(SHORT)
    assert "that the server allows" in found["error"]
    assert found["end"] is False


def test_a_page_that_cannot_be_drawn_leaves_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise AssertionError("the executors disagree")

    monkeypatch.setattr("kvrsim.views.plan.plan_page", fail)
    found = told(SHORT)
    assert found["answer"]["plan"]["best"] is not None
    assert "the executors disagree" in found["no_page"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no limit of memory")
def test_memory_and_processor_time_of_a_process_are_limited() -> None:
    code = """
import json, sys
from kvrsim.cli.server import worker
worker.MOST_CPU_S = 1
worker.limit_memory()
try:
    bytearray(worker.MOST_BYTES)
except MemoryError:
    print("memory")
try:
    with worker.limited_work():
        while True:
            pass
except worker.WorkLimitError:
    print("work")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["memory", "work"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such limit")
def test_an_answer_leaves_the_limits_of_its_process() -> None:
    import resource
    import signal

    limits = resource.getrlimit(resource.RLIMIT_CPU)
    handler = signal.getsignal(signal.SIGXCPU)
    told(SHORT)
    assert resource.getrlimit(resource.RLIMIT_CPU) == limits
    assert signal.getsignal(signal.SIGXCPU) == handler


def test_a_process_answers_several_questions_and_ends_with_its_input() -> None:
    questions = [SHORT, {"ctx": "2k", "model": "nothing"}, SHORT]
    text = "".join(json.dumps(question) + "\n" for question in questions)
    command = [sys.executable, "-m", "kvrsim.cli.server.worker"]
    ends = 0
    kinds = list[str]()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.flush()
        while ends < len(questions):
            line = json.loads(process.stdout.readline())
            ends += "end" in line
            kinds += [kind for kind in ("answer", "page", "error") if kind in line]
        process.stdin.close()
        assert process.wait() == 0
    assert kinds == ["answer", "page", "error", "answer", "page"]
