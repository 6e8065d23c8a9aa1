"""HTTP requests to the server of `kvrsim serve`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from time import sleep
from urllib.parse import urlencode

import pytest

import kvrsim
from kvrsim.cli.server.application import HEADERS
from kvrsim.cli.server.searches import Searches
from tests.building.commands import page_data
from tests.building.server import ask, get, last, lines, running_server

SHORT = {"model": "llama-7b", "cluster": "a100-nvlink", "gpus": "2", "ctx": "2k", "strategies": "tsp,kvr-e"}
LONG = {  # a question with one strategy, whose search takes minutes
    **{"model": "llama-3.1-405b", "cluster": "a100-10gbs-bus", "gpus": "256", "ctx": "256k"},
    **{"strategies": "ring", "search_budget": "1000s"},
}
TOO_LARGE = LONG | {"gpus": "1024", "ctx": "1m"}


@pytest.fixture(scope="module")
def searches() -> Searches:
    return Searches()


@pytest.fixture(scope="module")
def address(searches: Searches) -> Iterator[str]:
    with running_server("secret", searches) as result:
        yield result


def wait_for(searches: Searches, number: int) -> None:
    """Wait until this number of searches runs."""
    while searches.num_running != number:
        sleep(0.02)


def test_an_answer_equals_the_api_and_its_page_holds_the_timelines(address: str) -> None:
    found = list(lines(ask(address, SHORT)))
    plan = kvrsim.plan(model="llama-7b", cluster="a100-nvlink", gpus=2, ctx="2k", strategies="tsp,kvr-e")
    answer = last(found, "answer")
    assert [one["ttft_s"] for one in answer["plan"]["strategies"]] == [one.ttft_s for one in plan.strategies]
    assert answer["sentences"]
    candidates = [line["candidate"] for line in found if "candidate" in line]
    assert [one["ttft_s"] for one in candidates] == [plan[name].ttft_s for name in ("tsp", "kvr-e")]
    assert last(found, "page") is True
    _, page, _ = get(f"{address}page?{urlencode(SHORT)}")
    assert len(page_data(page)["timelines"]) == 2


def test_the_answer_and_its_page_are_one_plan_and_say_the_same(address: str) -> None:
    answer = last(lines(ask(address, SHORT)), "answer")
    _, page, _ = get(f"{address}page?{urlencode(SHORT)}")
    ends_s = {one["name"]: one["end_s"] for one in page_data(page)["timelines"]}
    assert ends_s == pytest.approx({one["strategy"]: one["ttft_s"] for one in answer["plan"]["strategies"]})
    shown = {row[0]: row[1][0] for row in answer["rows"]}
    assert all(f">{ttft}<" in page for ttft in shown.values())


def test_pins_are_compared(address: str) -> None:
    pins = [urlencode(SHORT), urlencode(SHORT | {"ctx": "4k"})]
    status, page, _ = get(f"{address}compare?{urlencode([('pin', pin) for pin in pins])}")
    assert status == 200
    assert "A and B compared" in page
    wrong = urlencode(SHORT | {"ctx": "never"})
    status, page, _ = get(f"{address}compare?{urlencode([('pin', pins[0]), ('pin', wrong)])}")
    assert status == 422
    assert "B: ctx: got" in page


@pytest.mark.parametrize(
    ("question", "parameter"),
    [
        ({"ctx": "2k", "model": "nothing"}, "model"),
        ({"model": "llama-7b"}, "ctx"),
        ({"ctx": "2k", "noise": "jitter:1"}, "noise"),
        ({"ctx": "2k", "strategies": "mine.py:ONE"}, "strategies"),
        ({"ctx": "2k", "only_deployable": "mine"}, "only_deployable"),
        ({"ctx": "2k", "expert_parallel": "perhaps"}, "expert_parallel"),
    ],
)
def test_a_wrong_question_gets_one_line_that_names_the_parameter(
    address: str, question: dict[str, str], parameter: str
) -> None:
    (line,) = lines(ask(address, question))
    assert re.match(rf"{parameter}(: | is missing)", line["error"])
    assert line["field"] == parameter
    assert get(f"{address}page?{urlencode(question)}")[0] == 422


def test_no_page_without_the_token_or_under_another_host_name(address: str) -> None:
    for url, host, code in (
        (address.replace("secret", "guess"), "127.0.0.1", 404),
        (address.replace("secret/", ""), "127.0.0.1", 404),
        (address, "attacker.example", 400),
    ):
        status, _, headers = get(url, host)
        assert status == code
        assert {name: headers[name] for name in HEADERS} == HEADERS


def test_every_answer_has_the_headers_that_keep_the_token(address: str) -> None:
    for url in (address, f"{address}page?{urlencode(SHORT)}", f"{address}answer?{urlencode(SHORT)}"):
        _, _, headers = get(url)
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Frame-Options"] == "SAMEORIGIN"


def test_a_search_ends_within_a_strategy_when_its_client_leaves(address: str, searches: Searches) -> None:
    wait_for(searches, 0)
    response = ask(address, LONG)
    wait_for(searches, 1)
    response.close()
    wait_for(searches, 0)
    assert last(lines(ask(address, SHORT)), "page") is True


def test_two_pages_do_not_end_each_other_and_further_ones_wait(address: str, searches: Searches) -> None:
    wait_for(searches, 0)
    long_ones = [ask(address, LONG | {"ctx": ctx}) for ctx in ("256k", "255k")]
    wait_for(searches, 2)
    waiting = ask(address, SHORT | {"ctx": "3k"})
    assert "waiting" in next(lines(waiting))["progress"]
    wait_for(searches, 3)
    long_ones[0].close()
    assert last(lines(waiting), "page") is True
    wait_for(searches, 1)
    long_ones[1].close()
    wait_for(searches, 0)


def test_requests_for_one_question_share_its_search(address: str, searches: Searches) -> None:
    question = SHORT | {"ctx": "5k"}
    both = [ask(address, question), ask(address, question)]
    first, second = (list(lines(response)) for response in both)
    assert [line for line in first if "progress" not in line] == [line for line in second if "progress" not in line]


def test_answers_in_memory_are_limited(address: str, searches: Searches, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(searches, 0)
    monkeypatch.setattr("kvrsim.cli.server.searches.MOST_ANSWERS", 2)
    for ctx in ("1k", "1200", "1300"):
        assert last(lines(ask(address, SHORT | {"ctx": ctx, "strategies": "tp"})), "page") is True
    assert len(searches._kept) == 2
