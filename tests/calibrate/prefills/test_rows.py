"""Rows of measured prefills: CSV files, values from options where files have none, and mistakes in files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calibrate.prefills.rows import MOST_GROUPS, PrefillRow, known_model, read_prefills
from kvrsim.closed_loop import ClosedLoop
from kvrsim.errors import InputError

FULL = """\
# measured on a Sunday
model,gpu,num_gpus,strategy,context_len,batch,cached_prefix,dtype,ttft_s
llama-2-7b,A100-SXM-80GB,1,single,2k,1,0,fp16,0.131
llama-2-70b,a100-80gb,8,tp8+kvr-e,16384,2,1024,bf16,3.5
"""


NONE: dict[str, Any] = {"num_gpus": 1, "batch": 1, "cached_prefix": 0}


def written(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_every_column_is_read(tmp_path: Path) -> None:
    result = read_prefills([written(tmp_path, FULL)], NONE)
    first, second = result.rows
    assert (first.model, first.gpu, first.num_gpus, first.strategy) == ("llama-2-7b", "A100-SXM-80GB", 1, "single")
    assert (first.context_len, first.batch, first.cached_prefix, first.dtype) == (2048, 1, 0, "fp16")
    assert first.ttft_s == 0.131
    assert second.case == "llama-2-70b 16384 tp8+kvr-e on 8 GPUs, batch 2, 1024 cached"
    assert result.notes == ()


def test_absent_columns_and_empty_cells_take_the_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "context_len,num_gpus,ttft_s\n1024,,0.1\n,4,0.2\n")
    defaults = dict(model="llama-2-7b", num_gpus=2, context_len=512, batch=3, cached_prefix=0, dtype="bf16")
    one, other = read_prefills([path], defaults).rows
    assert (one.model, one.num_gpus, one.context_len, one.batch) == ("llama-2-7b", 2, 1024, 3)
    assert (other.num_gpus, other.context_len, other.dtype, other.cached_prefix) == (4, 512, "bf16", 0)


@pytest.mark.parametrize(
    ("header", "columns", "seconds"),
    [
        ("prompt_tokens,ttft_ms", None, 1e-3),
        ("Prompt Tokens,TTFT (ms)", None, 1e-3),
        ("isl,mean_ttft_ms", None, 1e-3),
        ("input_tokens,time_to_first_token_seconds", None, 1.0),
        ("input_length,ttft_us", None, 1e-6),
        ("n,latency", "context_len=n,ttft_s=latency", 1.0),
        ("n,latency", "prompt_tokens=n,ttft_ms=latency", 1e-3),
        ("n,latency_ms", "context_len=n,ttft_s=latency_ms", 1e-3),
    ],
)
def test_columns_of_other_tools_are_read_in_their_unit(
    tmp_path: Path, header: str, columns: str | None, seconds: float
) -> None:
    path = written(tmp_path, f"{header}\n2048,92\n4096,190\n")
    result = read_prefills([path], NONE | {"model": "llama-2-7b"}, columns=columns)
    assert [row.context_len for row in result.rows] == [2048, 4096]
    assert [row.ttft_s for row in result.rows] == pytest.approx([92 * seconds, 190 * seconds])
    assert {row.unitless for row in result.rows} == {None}
    assert all(name in result.notes[0] for name in header.split(","))


@pytest.mark.parametrize(
    ("columns", "named"),
    [("x=n", "ttft_s=COLUMN"), ("ttft_s=q", "n, latency"), ("ttft_s", "ttft_s=COLUMN"), ("ttft_s=a,ttft_ms=b", "once")],
)
def test_columns_that_are_not_there_are_refused(tmp_path: Path, columns: str, named: str) -> None:
    path = written(tmp_path, "n,latency\n2048,92\n")
    with pytest.raises(InputError, match="columns: got") as caught:
        read_prefills([path], NONE, columns=columns)
    assert named in str(caught.value)


def test_columns_need_a_table(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(LATENCY), "out.json")
    with pytest.raises(InputError, match="columns: got"):
        read_prefills([path], DEFAULTS, columns="ttft_s=a")


def test_a_data_frame_is_read_as_its_csv_file_is(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    path = written(tmp_path, FULL + "llama-2-7b,,,,1024,,,,0.2\n")
    whole = pandas.read_csv(path, comment="#")
    expected = read_prefills([path], NONE).rows
    result = read_prefills([whole], NONE).rows
    assert [replace(row, where="") for row in result] == [replace(row, where="") for row in expected]
    with pytest.raises(InputError, match=r"prefills DataFrame, row 0: ttft_s: got '-1'"):
        read_prefills([whole.assign(ttft_s=-1)], NONE)
    with pytest.raises(InputError, match=r"prefills DataFrame: header: .* a column ttft_s"):
        read_prefills([whole.drop(columns="ttft_s")], NONE)


def test_the_mean_of_several_users_becomes_one_prefill(tmp_path: Path) -> None:
    mean_s = ClosedLoop(users=8, tpot_s=0.01, output_tokens=500, prompt_tokens=1024).mean_ttft_s(0.2)
    text = f"ttft_s,context_len,concurrency,tpot_s,output_tokens\n{mean_s},,8,0.01,500\n0.2,1k,1,,\n"
    result = read_prefills([written(tmp_path, text)], NONE | {"model": "llama-2-7b", "context_len": 1024})
    assert [row.ttft_s for row in result.rows] == pytest.approx([0.2, 0.2])
    assert result.notes == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,context_len\nllama-2-7b,1k\n", "header: got 'model, context_len', accepted: a column ttft_s"),
        ("ttft_s,context_len,model\n0,1k,llama-2-7b\n", "line 2: ttft_s: got '0', accepted: a finite number above 0"),
        ("ttft_s,context_len,model\n0.1,long,llama-2-7b\n", "line 2: context_len: got 'long'"),
        ("ttft_s,context_len,model,dtype\n0.1,1k,llama-2-7b,int3\n", "line 2: dtype: got 'int3', accepted: fp16"),
        ("ttft_s,context_len,model,concurrency\n0.1,1k,llama-2-7b,8\n", "line 2: tpot_s"),
        ("ttft_s,context_len,model,concurrency,tpot_s\n0.1,1k,llama-2-7b,8,1\n", "line 2: ttft_s: got '0.1'"),
        ("ttft_s,context_len\n0.1,1k\n", "line 2: model is missing, accepted: a value, or one for all rows"),
    ],
)
def test_mistakes_name_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_prefills([written(tmp_path, text)], NONE)
    assert message in str(caught.value)


def test_a_table_of_measurements_runs_no_code(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("raise SystemExit('run')\n", encoding="utf-8")
    path = written(tmp_path, f"ttft_s,context_len,model,strategy\n0.1,1k,llama-2-7b,{code}:MINE\n")
    with pytest.raises(InputError, match="line 2: strategy"):
        read_prefills([path], NONE)


# -- Small outputs of engine benchmarks: the keys identify the tool, and times to first token are read.

DEFAULTS = NONE | {"model": "llama-2-7b", "context_len": 4096}
LATENCY = {"avg_latency": 0.2101, "latencies": [0.208, 0.209, 0.2135], "percentiles": {"50": 0.209}}
SERVE = {
    **{"model_id": "meta-llama/Llama-3.1-8B-Instruct", "request_rate": "inf", "max_concurrency": 1, "completed": 4},
    **{"total_input_tokens": 6144, "total_output_tokens": 4, "mean_ttft_ms": 62.0, "median_ttft_ms": 61.0},
}
DETAILS = {"input_lens": [1024, 2048, 1024, 2048, 1024], "ttfts": [0.050, 0.090, 0.052, 0.094, 0.0]}
SGLANG = {"batch_size": 2, "input_len": 512, "prefill_latency": 0.0456, "total_latency": 0.095}
AIPERF = {
    "time_to_first_token": {"unit": "ms", "avg": 123.0, "p50": 120.0, "p99": 149.0, "std": 10.0},
    "input_sequence_length": {"unit": "tokens", "avg": 550.0, "p50": 550.0, "std": 0.0},
    "input_config": {"endpoint": {"model_names": ["Qwen/Qwen3-8B"]}, "loadgen": {"concurrency": 1}},
}
RECORD = {
    "metadata": {"was_cancelled": False},
    "metrics": {"input_sequence_length": {"value": 550}, "time_to_first_token": {"value": 255.886, "unit": "ms"}},
    "error": None,
}
FAILED = {"metadata": {"was_cancelled": True}, "metrics": {"error_isl": {"value": 550}}, "error": {"code": 499}}


def read(folder: Path, *contents: Any, name: str = "out.json") -> tuple[list[PrefillRow], str]:
    """Rows and notes of a file with these JSON objects, one per line."""
    path = folder / name
    path.write_text("\n".join(map(json.dumps, contents)) + "\n", encoding="utf-8")
    result = read_prefills([path], DEFAULTS)
    return list(result.rows), " ".join(result.notes)


def test_vllm_bench_latency(tmp_path: Path) -> None:
    rows, notes = read(tmp_path, LATENCY)
    assert [(row.ttft_s, row.context_len) for row in rows] == [(0.209, 4096)]
    assert "--output-len 1" in notes


def test_vllm_bench_serve_detailed(tmp_path: Path) -> None:
    rows, notes = read(tmp_path, SERVE | DETAILS)
    assert [row.context_len for row in rows] == [1024, 2048]
    assert [row.ttft_s for row in rows] == pytest.approx([0.051, 0.092])
    assert notes == ""


def test_vllm_bench_serve_alone_has_a_mean_length(tmp_path: Path) -> None:
    rows, notes = read(tmp_path, SERVE)
    assert [(row.context_len, row.ttft_s) for row in rows] == [(1536, pytest.approx(0.061))]
    assert "--save-detailed" in notes


def test_vllm_bench_serve_of_several_users_is_one_prefill(tmp_path: Path) -> None:
    loop = ClosedLoop(users=4, tpot_s=0.02, output_tokens=256, prompt_tokens=1536)
    load = {"max_concurrency": 4, "mean_tpot_ms": 20.0, "total_output_tokens": 1024}
    rows, notes = read(tmp_path, SERVE | load | {"mean_ttft_ms": 1e3 * loop.mean_ttft_s(0.1)})
    assert rows[0].ttft_s == pytest.approx(0.1)
    assert "wait model" in notes
    assert "queues" not in notes


def test_waits_in_the_queue_of_the_server_are_subtracted(tmp_path: Path) -> None:
    queued = {"request_rate": 4.0, "max_concurrency": None, "server_queue_times": [0.01, 0.0, 0.012, 0.004, None]}
    rows, notes = read(tmp_path, SERVE | DETAILS | queued)
    assert [row.ttft_s for row in rows] == pytest.approx([0.040, 0.090])
    assert "hold waiting" not in notes


def test_many_lengths_are_grouped(tmp_path: Path) -> None:
    lens = list(range(100, 300))
    details = {"input_lens": lens, "ttfts": [length * 1e-4 for length in lens]}
    rows, notes = read(tmp_path, SERVE | details)
    assert len(rows) <= MOST_GROUPS
    assert all(row.ttft_s == pytest.approx((row.context_len or 0) * 1e-4, rel=0.01) for row in rows)
    assert "200 prompt lengths" in notes


def test_sglang_bench_one_batch(tmp_path: Path) -> None:
    rows, notes = read(tmp_path, SGLANG, SGLANG | {"input_len": 1024, "prefill_latency": 0.08}, name="result.jsonl")
    assert [(row.context_len, row.batch, row.ttft_s) for row in rows] == [(512, 2, 0.0456), (1024, 2, 0.08)]
    assert "inside the engine" in notes


def test_aiperf_aggregate(tmp_path: Path) -> None:
    rows, notes = read(tmp_path, AIPERF, name="profile_export_aiperf.json")
    assert [(row.context_len, row.likely_model, row.batch) for row in rows] == [(550, "qwen3-8b", 1)]
    assert rows[0].ttft_s == pytest.approx(0.120)
    assert notes == ""


def test_aiperf_request_by_request(tmp_path: Path) -> None:
    rows, _ = read(tmp_path, RECORD, FAILED, RECORD, name="profile_export.jsonl")
    assert [(row.context_len, row.ttft_s) for row in rows] == [(550, pytest.approx(0.255886))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"latency": 1.0}, "keys: got 'latency', accepted: sglang.bench_one_batch"),
        (SGLANG | {"prefill_latency": "fast"}, "prefill_latency: got 'fast'"),
        (
            SERVE | DETAILS | {"input_lens": [1024]},
            "input_lens: got '[1024]', accepted: an array with a length for each",
        ),
        (SERVE | DETAILS | {"server_queue_times": [0.1]}, "server_queue_times: got"),
        (LATENCY | {"latencies": [0.2, -1.0]}, "latencies[1]: got"),
    ],
)
def test_mistakes_name_file_and_key(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, content)
    assert "out.json" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
        ("TheBloke/Llama-2-7B-AWQ", "TheBloke/Llama-2-7B-AWQ"),
        (None, None),
    ],
)
def test_known_models(name: object, model: str | None) -> None:
    assert known_model(name) == model


@pytest.mark.parametrize("rate", [10**4000, -(10**4000)])
def test_a_rate_of_many_digits_is_no_number(tmp_path: Path, rate: int) -> None:
    rows, _ = read(tmp_path, {**SERVE, "max_concurrency": None, "request_rate": 0} | {"mean_ttft_ms": 62.0})
    path = tmp_path / "long.json"
    text = json.dumps(SERVE | {"max_concurrency": None, "request_rate": "RATE"})
    path.write_text(text.replace('"RATE"', f"{'-' * (rate < 0)}1{'0' * 4000}"), encoding="utf-8")
    result = read_prefills([path], DEFAULTS)
    assert [row.ttft_s for row in result.rows] == [row.ttft_s for row in rows]
    assert any("waiting in queues" in note for note in result.notes)


def test_a_time_beyond_a_lifetime_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "ttft_s,context_len,model\n1e12,1k,llama-2-7b\n")
    with pytest.raises(InputError, match="line 2: ttft_s: got"):
        read_prefills([path], NONE)


# -- further tools, each with a sample in its documented form

SGLANG_SERVING = {  # python -m sglang.bench_serving --output-file
    **{"tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": "trace", "max_concurrency": 1},
    **{"random_input_len": 1024, "random_output_len": 16, "random_range_ratio": 1.0, "duration": 12.5, "completed": 10},
    **{"total_input_tokens": 10240, "total_output_tokens": 160, "request_throughput": 0.8, "mean_ttft_ms": 61.0},
    **{"median_ttft_ms": 60.0, "std_ttft_ms": 3.0, "p99_ttft_ms": 70.0, "mean_tpot_ms": 7.0, "accept_length": None},
}
INFERENCEX = {  # an item of agg_bmk.json
    **{"hw": "h200-nv", "conc": 1, "image": "vllm/vllm-openai:v0.27.0", "model": "meta-llama/Llama-3.3-70B-Instruct"},
    **{"infmax_model_prefix": "70b", "framework": "vllm", "precision": "fp8", "spec_decoding": "none"},
    **{"disagg": False, "isl": 8192, "osl": 1024, "is_multinode": False, "tp": 8, "ep": 1, "dp_attention": "false"},
    **{"tput_per_gpu": 120.0, "mean_ttft": 0.31, "median_ttft": 0.30, "mean_tpot": 0.01, "mean_intvty": 100.0},
}
GENAI_PERF = """\
Metric,avg,min,max,p99,p95,p90,p75,p50,p25
Time To First Token (ms),"1,146.31",249.48,"3,485.23","3,457.97","3,349.56","3,215.06","1,330.93",640.07,286.52
Time To Second Token (ms),26.05,0.00,133.51,96.12,36.56,34.88,34.35,33.55,1.78
Request Latency (ms),"6,406.20","5,371.47","9,608.72","9,436.13","9,046.58","9,028.16","6,549.60","5,690.23","5,493.63"
Output Sequence Length (tokens),174.45,164.00,187.00,186.22,183.10,180.10,177.00,174.00,171.75
Input Sequence Length (tokens),LENGTHS

Metric,Value
Output Token Throughput (per sec),261.25
Request Throughput (per sec),1.50
Request Count (count),40.00
""".replace("LENGTHS", ",".join(['"3,000.05"', '"2,999.00"', *3 * ['"3,001.00"'], *4 * ['"3,000.00"']]))
METRICS = """\
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.08",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="meta-llama/Llama-3.1-8B-Instruct"} 40.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="meta-llama/Llama-3.1-8B-Instruct"} 60.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 21.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:request_queue_time_seconds_bucket{engine="0",le="+Inf",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 1.0
vllm:request_prompt_tokens_bucket{engine="0",le="1000.0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
vllm:request_prompt_tokens_bucket{engine="0",le="2000.0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 40.0
vllm:request_prompt_tokens_bucket{engine="0",le="5000.0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 60.0
vllm:request_prompt_tokens_bucket{engine="0",le="10000.0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="meta-llama/Llama-3.1-8B-Instruct"} 100.0
vllm:prefix_cache_queries_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 4000.0
vllm:prefix_cache_hits_total{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} 2000.0
"""
WHOLE = {"model": "llama-3.1-8b", "num_gpus": 1}


def read_file(folder: Path, text: str, name: str) -> tuple[list[PrefillRow], str]:
    (folder / name).write_text(text, "utf-8")
    result = read_prefills([folder / name], WHOLE)
    return list(result.rows), " | ".join(result.notes)


def test_sglang_bench_serving(tmp_path: Path) -> None:
    (row,), notes = read_file(tmp_path, json.dumps(SGLANG_SERVING) + "\n", "sglang.jsonl")
    assert (row.ttft_s, row.context_len) == (pytest.approx(0.060), 1024)
    assert "mean length" in notes
    detailed = SGLANG_SERVING | {"input_lens": [512, 2048], "ttfts": [0.04, 0.11], "output_lens": [16, 16]}
    rows, _ = read_file(tmp_path, json.dumps(detailed) + "\n", "sglang.jsonl")
    assert [(one.context_len, one.ttft_s) for one in rows] == [(512, 0.04), (2048, 0.11)]


def test_inferencex_in_seconds_and_in_milliseconds(tmp_path: Path) -> None:
    several = INFERENCEX | {"conc": 4}
    moved = INFERENCEX | {"disagg": True}
    (alone, shared), notes = read_file(tmp_path, json.dumps([INFERENCEX, several, moved]), "agg_bmk.json")
    assert (alone.gpu, alone.num_gpus, alone.context_len, alone.dtype) == ("h200", 8, 8192, "fp8")
    assert alone.ttft_s == pytest.approx(0.30)
    assert 0 < shared.ttft_s < 0.31, "without the wait for other users"
    assert "disaggregated" in notes
    in_ms = INFERENCEX | {"mean_ttft": 310.0, "median_ttft": 300.0, "mean_tpot": 10.0}
    (row,), notes = read_file(tmp_path, json.dumps(in_ms), "agg_bmk.json")
    assert row.ttft_s == pytest.approx(0.30)
    assert "milliseconds" in notes


@pytest.mark.parametrize("unit", ["ms", "ns"])
def test_genai_perf_has_commas_and_a_unit(tmp_path: Path, unit: str) -> None:
    scale = {"ms": 1e-3, "ns": 1e-9}[unit]
    (row,), _ = read_file(tmp_path, GENAI_PERF.replace("(ms)", f"({unit})"), "profile_export_genai_perf.csv")
    assert (row.ttft_s, row.context_len) == (pytest.approx(640.07 * scale), 3000)
    with pytest.raises(InputError, match="a row time to first token"):
        read_file(tmp_path, "\n".join(GENAI_PERF.splitlines()[::5]), "other.csv")


def test_a_scrape_of_metrics_has_quartiles_without_the_queue(tmp_path: Path) -> None:
    rows, notes = read_file(tmp_path, METRICS, "metrics.txt")
    assert [row.context_len for row in rows] == [1625, 3500, 6875], "interpolated as by histogram_quantile"
    assert [row.ttft_s for row in rows] == pytest.approx([0.0925 - 0.01, 0.175 - 0.01, 0.34375 - 0.01])
    assert {row.queued_s for row in rows} == {0.01}
    assert "between 0.1 and 0.25 s" in notes
    assert "50% of the prompts' tokens came from the prefix cache" in notes
    two = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    doubled, _ = read_file(tmp_path, two, "metrics.txt")
    assert [row.ttft_s for row in doubled] == pytest.approx([row.ttft_s for row in rows]), "engines are added"
    with pytest.raises(InputError, match="the metrics of one model"):
        read_file(tmp_path, METRICS + METRICS.replace("Llama-3.1-8B", "Llama-3.1-70B"), "metrics.txt")
    with pytest.raises(InputError, match="request_prompt_tokens"):
        read_file(tmp_path, "\n".join(METRICS.splitlines()[:9]), "metrics.txt")


def test_an_sglang_scrape(tmp_path: Path) -> None:
    text = METRICS.replace("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram").replace("vllm:", "sglang:")
    rows, _ = read_file(tmp_path, text, "metrics.txt")
    assert len(rows) == 3
