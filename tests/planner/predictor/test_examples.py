"""Examples that put a predictor behind a router and vLLM's front end, against the interfaces of those projects."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
POINTS = (4, 16, 64, 256, 1024, 4096, 16384, 65536)
PREFIXES = (0, 8192, 32768)
# Fields of llm-d-latency-predictor's PredictionRequest and PredictionResponse (prediction_server.py at 147d369)
REQUEST = {
    **{"kv_cache_percentage": 0.4, "input_token_length": 8192, "num_request_waiting": 0, "num_request_running": 3},
    **{"num_tokens_generated": 0, "prefix_cache_score": 0.25, "pod_type": "", "prefill_tokens_in_flight": 0},
}
RESPONSE = {
    **{"ttft_ms": float, "tpot_ms": float, "predicted_at": str, "model_type": str, "objective_type": str},
    **{"quantile": float, "last_model_load": str},
}


def grid(strategies: int = 1) -> dict[str, Any]:
    """A predictor whose TTFT is linear in new and cached tokens, 1 µs and 0.1 µs each."""
    rows = []
    for index in range(strategies):
        ttft_s = [[[1e-2 + 1e-6 * new + 1e-7 * prefix for new in POINTS] for prefix in PREFIXES]]
        ends = {key: [[[by * one for one in row] for row in part] for part in ttft_s] for key, by in ENDS.items()}
        rows.append({"strategy": f"tp{index}", "most_new_tokens": [[65536] * 3], "ttft_s": ttft_s, **ends})
    about = {"new_tokens": list(POINTS), "cached_prefix": list(PREFIXES), "batch": [1], "longest_context": 65536}
    question = {"model": "llama-3-8b", "num_gpus": 2, "cluster": {"gpu": "h100"}}
    return {**about, "question": question, "kvrsim_version": "0.1.0", "strategies": rows}


ENDS = {"ttft_low_s": 0.8, "ttft_high_s": 1.2}


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import an example as its folder's program does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("read_predictor", "prediction_server", "vllm_vcr_trace")
    yield import_module
    for name in names:
        sys.modules.pop(name, None)


def test_an_answer_takes_few_steps(example: Callable[[str], ModuleType]) -> None:
    """20 µs are about 250 lines of Python; a count does not depend on the machine."""
    predict = example("read_predictor").predict
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    four = grid(strategies=4)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        predict(four, 9000, 512)
    finally:
        sys.settrace(before)
    assert lines < 150


def post(url: str, content: object) -> tuple[int, dict[str, Any]]:
    request = Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request) as response:
            return response.status, json.load(response)
    except HTTPError as refused:
        with refused:
            return refused.code, json.load(refused)


def test_the_server_answers_as_the_routers_prediction_server(example: Callable[[str], ModuleType]) -> None:
    server = example("prediction_server").server(grid(), 12.5, 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        status, answer = post(f"{address}/predict", REQUEST)
        assert status == 200
        assert {name: type(value) for name, value in answer.items()} == RESPONSE
        assert answer["ttft_ms"] == pytest.approx(1.2 * (10 + 6.144 + 0.2048)), "the upper end, with a quarter cached"
        assert answer["tpot_ms"] == 12.5
        datetime.fromisoformat(answer["predicted_at"])
        waiting = post(f"{address}/predict", REQUEST | {"num_request_waiting": 2})[1]
        assert waiting["ttft_ms"] == pytest.approx(3 * answer["ttft_ms"])
        bulk = {"requests": [REQUEST, REQUEST | {"prefix_cache_score": 2}, REQUEST | {"input_token_length": 1}]}
        status, answers = post(f"{address}/predict/bulk", bulk)
        assert (status, answers["total_requests"], answers["failed_predictions"]) == (200, 3, 1)
        assert [one is None for one in answers["predictions"]] == [False, True, False]
        assert answers["errors"][0]["index"] == 1
        assert post(f"{address}/predict/bulk/strict", {"requests": [REQUEST] * 2})[1]["successful_predictions"] == 2
        assert post(f"{address}/predict/bulk/strict", bulk)[0] == 400
        assert post(f"{address}/predict", {"input_token_length": 5})[0] == 400
        assert post(f"{address}/predict", REQUEST | {"input_token_length": 10**6})[0] == 400
        for path, key in (("readyz", "model_type"), ("healthz", "status"), ("status", "models_exist")):
            with urlopen(f"{address}/{path}") as response:
                assert key in json.load(response)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_trace_is_one_of_vllm_vcr(example: Callable[[str], ModuleType]) -> None:
    """The rules of its reader (crates/sim-trace/src/trace.rs at 4b460a1)."""
    module = example("vllm_vcr_trace")
    header, *lines = (json.loads(json.dumps(line)) for line in module.records(grid(), itl_ms=12.5))
    assert list(header) == ["meta"]
    kinds = {"prompt_tokens": int, "cached_tokens": int, "output_tokens": int, "ttft_ms": float, "concurrency": int}
    buckets = set()
    for line in lines:
        assert {name: type(line[name]) for name in kinds} == kinds
        assert set(line) - set(kinds) == {"itl_summary"}, "needed for more than one token"
        assert line["itl_summary"] == {"mean_ms": 12.5, "count": line["output_tokens"] - 1}
        new = line["prompt_tokens"] - line["cached_tokens"]
        assert line["ttft_ms"] == pytest.approx(10 + 1e-3 * new + 1e-4 * line["cached_tokens"])
        buckets.add(max(edge for edge in module.EDGES if edge <= new))
    assert buckets == set(module.EDGES), "each bucket of its latency model has records"
