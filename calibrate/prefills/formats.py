"""What each benchmark writes, and what of it is a time to first token.

Sources, each as of the commit read:
- `vllm bench latency --output-json`: vllm-project/vllm vllm/benchmarks/latency.py at 00cae07;
- `vllm bench serve --save-result [--save-detailed]`: vllm-project/vllm vllm/benchmarks/serve.py at 009e6d4;
- `python -m sglang.bench_one_batch --result-filename`: sgl-project/sglang python/sglang/bench_one_batch.py at 0094415;
- AIPerf profile_export_aiperf.json and profile_export.jsonl: ai-dynamo/aiperf aiperf/common/models/export_models.py and
  docs/tutorials/working-with-profile-exports.md at db4f639 (October 2025), and its page on the schema (0.13);
- GenAI-Perf profile_export_genai_perf.json: triton-inference-server/perf_analyzer
  genai-perf/genai_perf/export_data/json_exporter.py at 263c5f6 (0.0.16).
"""

from __future__ import annotations

import statistics

from calibrate.prefills.outputs import Output, OutputFormat, add_requests, in_name, known_model, seconds_of
from calibrate.prefills.rows import PrefillRow
from kvrsim.io.schema import JsonObject
from kvrsim.units import MAX_TOKENS

_BUSY = 0.1  # share of the time that prefills take of a server; above it requests queue noticeably
_MIXED = 0.05  # spread of prompt lengths, relative, above which one mean stands for unlike prompts


def _vllm_latency(data: JsonObject, output: Output) -> None:
    """Seconds of whole batches, of which only those with one output token are a TTFT.

    Keys: avg_latency, std_latency, latencies (seconds, one a repetition), percentiles ("10" to "99"). The command's
    --input-len, --output-len and --batch-size are not in the file: its name or the options say them.
    """
    latencies = data.numbers("latencies")
    seconds = statistics.median(latencies) if latencies else data.number("avg_latency")
    output_len = in_name(output.path).get("output_len")
    if output_len is None:
        output.note("taken as times to first token; that holds for `vllm bench latency --output-len 1` only")
    elif output_len != 1:
        accepted = "a run with --output-len 1, whose latency is the time to first token"
        raise data.error("avg_latency", f"{accepted} (the name of the file says {output_len} output tokens)")
    output.add(PrefillRow(ttft_s=seconds, where=data.where))


def _vllm_serve(data: JsonObject, output: Output) -> None:
    """TTFTs at the client, in seconds a request (ttfts, input_lens) or as statistics in milliseconds.

    A failed request has a TTFT of 0. Without --save-detailed there is only the mean length of all prompts.
    """
    model = known_model(data.fields.get("model_id"))
    if data.has("ttfts"):
        pairs = _requests(data)
        add_requests(output, pairs, data.where, model)
        typical_s = statistics.median(seconds for _, seconds in pairs)
    else:
        key = data.first_of("median_ttft_ms", "mean_ttft_ms")
        typical_s = data.number(key) * 1e-3
        tokens = data.integer("total_input_tokens", maximum=MAX_TOKENS**2) / data.integer("completed")
        output.note("saved without --save-detailed: all prompts are taken to have the mean length")
        output.add(
            PrefillRow(
                ttft_s=typical_s, where=data.where, context_len=max(1, round(tokens)), batch=1, likely_model=model
            )
        )
    _tell_of_queues(data.fields.get("request_rate"), data.fields.get("max_concurrency"), typical_s, output)


def _requests(data: JsonObject) -> list[tuple[int, float]]:
    """Prompt tokens and TTFT of each request that was answered."""
    seconds = data.numbers("ttfts", allow_zero=True)
    lengths = data.numbers("input_lens")
    if len(seconds) != len(lengths):
        raise data.error("input_lens", f"an array with a length for each of the {len(seconds)} ttfts")
    pairs = [(round(length), one) for length, one in zip(lengths, seconds, strict=True) if one > 0]
    if not pairs:
        raise data.error("ttfts", "an array with a time above 0: that of a request that was answered")
    return pairs


def _tell_of_queues(rate: object, concurrency: object, typical_s: float, output: Output) -> None:
    """A TTFT under load holds waiting, which no term of an engine stands for."""
    if concurrency == 1:
        return
    if isinstance(rate, int | float) and not isinstance(rate, bool) and rate * typical_s <= _BUSY:
        return
    shown = f"{rate:g} requests/s" if isinstance(rate, int | float) else f"request rate {rate or 'unknown'}"
    output.note(
        f"{shown}: TTFTs hold waiting in queues, which is fitted as if it were the engine's;"
        " measure with --max-concurrency 1"
    )


def _sglang(data: JsonObject, output: Output) -> None:
    """prefill_latency, seconds of one batch inside the process: no server, tokeniser or HTTP is in it."""
    output.add(
        PrefillRow(
            ttft_s=data.number("prefill_latency"),
            where=data.where,
            context_len=data.integer("input_len"),
            batch=data.integer("batch_size"),
        )
    )
    text = "times inside the engine: the time of a request that clients see is not in them"
    if f"{output.path.name}: {text}" not in output.notes:
        output.note(text)


def _aiperf(data: JsonObject, output: Output) -> None:
    """Statistics over all requests: {"unit": "ms", "avg", "p50", "std", ...} for each metric."""
    ttft, length = data.child("time_to_first_token"), data.child("input_sequence_length")
    tokens = length.number(length.first_of("p50", "avg"), maximum=MAX_TOKENS)
    if length.has("std") and length.number("std", allow_zero=True) > _MIXED * tokens:
        output.note("prompts of unlike lengths: one mean stands for them; give profile_export.jsonl of AIPerf instead")
    seconds = seconds_of(ttft, "p50", "avg")
    config = data.fields.get("input_config")
    asked = config if isinstance(config, dict) else {}
    names = asked.get("model_names") or _inner(asked, "endpoint").get("model_names")
    output.add(
        PrefillRow(
            ttft_s=seconds,
            where=data.where,
            context_len=max(1, round(tokens)),
            batch=1,
            likely_model=known_model(_first(names)),
        )
    )
    load = _inner(asked, "loadgen")  # AIPerf's; GenAI-Perf has perf_analyzer: {"stimulus": {"concurrency": 1}}
    stimulus = _inner(_inner(asked, "perf_analyzer"), "stimulus")
    rate, concurrency = (load.get(key, stimulus.get(key)) for key in ("request_rate", "concurrency"))
    if rate is not None or concurrency is not None:  # both tools send one request at a time by default
        _tell_of_queues(rate, concurrency, seconds, output)


def _aiperf_request(data: JsonObject, output: Output) -> None:
    """One request of profile_export.jsonl; one that failed has no TTFT, or an error."""
    metrics = data.child("metrics")
    if data.has("error") or not metrics.has("time_to_first_token"):
        return
    tokens = metrics.child("input_sequence_length").integer("value")
    output.requests.append((tokens, seconds_of(metrics.child("time_to_first_token"), "value")))


def _inner(outer: dict[str, object], key: str) -> dict[str, object]:
    value = outer.get(key)
    return value if isinstance(value, dict) else {}


def _first(names: object) -> object:
    return names[0] if isinstance(names, list) and names else names


FORMATS = (
    OutputFormat(title="sglang.bench_one_batch", keys=("prefill_latency", "input_len"), read=_sglang),
    OutputFormat(title="vllm bench serve, detailed", keys=("ttfts", "input_lens"), read=_vllm_serve),
    OutputFormat(title="vllm bench serve", keys=("mean_ttft_ms", "completed"), read=_vllm_serve),
    OutputFormat(title="vllm bench latency", keys=("avg_latency", "percentiles"), read=_vllm_latency),
    OutputFormat(title="AIPerf or GenAI-Perf", keys=("time_to_first_token", "input_sequence_length"), read=_aiperf),
    OutputFormat(title="AIPerf, one request a line", keys=("metrics", "metadata"), read=_aiperf_request),
)
