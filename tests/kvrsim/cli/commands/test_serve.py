"""HTTP requests to the server of `kvrsim serve`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest

import kvrsim
from kvrsim.cli.commands.serve import Answers, SupersededError, answer_lines
from kvrsim.errors import InputError
from tests.building.commands import page_data
from tests.building.server import running_server

QUESTION = "model=llama-7b&cluster=a100-nvlink&gpus=2&ctx=2k&strategies=tsp,kvr-e"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server("secret") as result:
        yield result


def get(url: str, host: str = "127.0.0.1") -> tuple[int, str]:
    """Status and text of the answer to a request."""
    try:
        with urlopen(Request(url, headers={"Host": host})) as response:
            return response.status, response.read().decode()
    except HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_answer_equals_the_api_and_its_page_holds_the_timelines(address: str) -> None:
    *progress, last = lines(get(f"{address}answer?{QUESTION}")[1])
    plan = kvrsim.plan(model="llama-7b", cluster="a100-nvlink", gpus=2, ctx="2k", strategies="tsp,kvr-e")
    assert [one["ttft_s"] for one in last["plan"]["strategies"]] == [one.ttft_s for one in plan.strategies]  # type: ignore[index]
    assert last["answer"]
    assert all("progress" in line or "candidate" in line for line in progress)
    candidates = [line["candidate"] for line in progress if "candidate" in line]
    assert [one["ttft_s"] for one in candidates] == [plan[name].ttft_s for name in ("tsp", "kvr-e")]  # type: ignore[index]
    _, page = get(f"{address}page?{QUESTION}")
    assert len(page_data(page)["timelines"]) == 2
    status, page = get(f"{address}compare?{urlencode([('pin', QUESTION), ('pin', QUESTION.replace('2k', '4k'))])}")
    assert status == 200
    assert "A and B compared" in page


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("ctx=2k&model=nothing", "model"),
        ("model=llama-7b", "ctx"),
        ("ctx=2k&noise=jitter:1", "noise"),
        ("ctx=2k&strategies=mine.py:ONE", "strategies"),
    ],
)
def test_a_wrong_question_gets_one_line_that_names_the_parameter(address: str, query: str, parameter: str) -> None:
    (line,) = lines(get(f"{address}answer?{query}")[1])
    assert str(line["error"]).startswith(f"{parameter}: ")
    assert get(f"{address}page?{query}")[0] == 422


def test_no_page_without_the_token_or_under_another_host_name(address: str) -> None:
    for url, host, code in (
        (address.replace("secret", "guess"), "127.0.0.1", 404),
        (address.replace("secret/", ""), "127.0.0.1", 404),
        (address, "attacker.example", 400),
    ):
        assert get(url, host)[0] == code


def test_a_newer_question_ends_the_search() -> None:
    answers = Answers()
    question = {"model": "llama-7b", "cluster": "a100-nvlink", "gpus": "4", "ctx": "4k", "strategies": "tsp,kvr-s"}

    def tell(_line: object) -> None:
        answers.newest += 1

    with pytest.raises(SupersededError):
        answers.of(question, tell)
    *_, last = lines("".join(answer_lines(answers, question)))
    assert "plan" in last


def test_answers_in_memory_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrsim.cli.commands.serve._MOST_ANSWERS", 2)
    answers = Answers()
    for ctx in ("1k", "2k", "3k"):
        question = {"model": "llama-7b", "cluster": "a100-nvlink", "gpus": "1", "ctx": ctx, "strategies": "single"}
        answers.of(question)
    assert len(answers.kept) == 2
    with pytest.raises(InputError, match="ctx"):
        answers.of({})
