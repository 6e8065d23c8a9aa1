"""Measured prefills from files: CSV files, and outputs of engines' benchmarks, recognised by their content.

A CSV file has the columns model, gpu, num_gpus, strategy, context_len, batch, cached_prefix, dtype and ttft_s, or usual
names of other tools for them, such as prompt_tokens and ttft_ms; a user may name them. Only
ttft_s is required; the options of the command give the rest. With `concurrency` above 1, ttft_s is the mean TTFT of
that number of users, each of whom waits for an answer before the next request; `tpot_s` and `output_tokens` describe
their decoding, and kvrsim.closed_loop computes the seconds of one prefill. A benchmark's output has one JSON object, or
one per line; its keys identify the tool that wrote it. Sources of the formats, each with the commit that was read:

- `vllm bench latency --output-json`: vllm-project/vllm vllm/benchmarks/latency.py at 00cae07;
- `vllm bench serve --save-result [--save-detailed]`: vllm-project/vllm vllm/benchmarks/serve.py at 009e6d4;
- `python -m sglang.bench_one_batch --result-filename`: sgl-project/sglang python/sglang/bench_one_batch.py at 0094415;
- `python -m sglang.bench_serving --output-file [--output-details]`: the keys of `vllm bench serve`;
- InferenceX agg_*.json: SemiAnalysisAI/InferenceX utils/process_result.py at 00e51cc and its newer fields isl and osl;
- genai-perf profile_export_genai_perf.csv: triton-inference-server/perf_analyzer
  genai-perf/genai_perf/export_data/csv_exporter.py at 09628cd; AIPerf's CSV has the same form;
- /metrics of vLLM and SGLang: histograms of Prometheus, vllm-project/vllm vllm/v1/metrics/loggers.py at 005a810;
- `kvrsim calibrate prefills --share`: calibrate/prefills/share.py;
- AIPerf profile_export_aiperf.json and profile_export.jsonl: ai-dynamo/aiperf aiperf/common/models/export_models.py
  and docs/tutorials/working-with-profile-exports.md at db4f639 (October 2025), and its page on the schema (0.13).
"""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from calibrate.data import CsvTable, parse_cells
from calibrate.prefills.histograms import is_metrics, read_metrics
from kvrsim.arguments import tokens_or_none
from kvrsim.choices import DTYPES
from kvrsim.closed_loop import OUTPUT_TOKENS, ClosedLoop
from kvrsim.errors import ABSENT, InputError
from kvrsim.io.columns import CACHED_TOKENS, PROMPT_TOKENS, RoleColumn, Usual, find_columns, parse_columns, split_unit
from kvrsim.io.columns import OUTPUT_TOKENS as OUTPUT_TOKEN_NAMES
from kvrsim.io.files import open_regular, read_text
from kvrsim.io.schema import JsonObject, NonNegative, Whole, parse_json
from kvrsim.model.load import known_shape
from kvrsim.strategies import get_strategy
from kvrsim.strategies.load import is_file
from kvrsim.units import MAX_SECONDS, MAX_TOKENS, parse_count, parse_tokens

if TYPE_CHECKING:
    import pandas

COLUMNS = ("model", "gpu", "num_gpus", "strategy", "context_len", "batch", "cached_prefix", "dtype", "ttft_s")
Defaults = Mapping[str, Any]  # value of a column for rows without one
_PERCENTILES = ("median", "p50", "mean", "avg")
_USUAL: Usual = {  # usual names of columns, by role; the last three are for measurements with several users
    **{name: (name,) for name in COLUMNS},
    "model": ("model", "model_id", "model_name"),
    "gpu": ("gpu", "gpu_name", "gpu_type", "accelerator"),
    "num_gpus": ("num_gpus", "gpus", "n_gpus", "gpu_count"),
    "context_len": PROMPT_TOKENS,
    "batch": ("batch", "batch_size"),
    "cached_prefix": CACHED_TOKENS,
    "ttft_s": (
        *("ttft", "time_to_first_token", "first_token_latency", "first_token_time", "prefill_latency", "prefill_time"),
        *("prefill", *(f"{share}_ttft" for share in _PERCENTILES), *(f"ttft_{share}" for share in _PERCENTILES)),
    ),
    "concurrency": ("concurrency", "max_concurrency", "users"),
    "tpot_s": ("tpot", "time_per_output_token", *(f"{share}_tpot" for share in _PERCENTILES)),
    "output_tokens": OUTPUT_TOKEN_NAMES,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """One measured prefill; None: the file has no value."""

    ttft_s: float  # seconds from the request to its first token
    where: str  # the argument, the file and the line or key, for messages
    model: str | None = None  # built-in name or path of a config.json
    gpu: str | None = None  # name of the GPU, as the user or a datasheet calls it
    num_gpus: int | None = None
    strategy: str | None = None  # strategy as --strategy names it; None after `fill`: see `strategy_name`
    context_len: int | None = None  # tokens of each sequence, the cached prefix included
    batch: int | None = None  # sequences prefilled together
    cached_prefix: int | None = None  # number of cached tokens
    dtype: str | None = None  # dtype of weights, activations and KV cache; None: the profile's
    # CSV column of ttft_s without a unit, whose values were taken as seconds; None: the unit is known.
    unitless: str | None = None
    likely_model: str | None = None  # built-in model that the name in a benchmark's output probably means
    queued_s: float | None = None  # wait in the server's queue, not part of ttft_s; None: the file does not tell

    def fill(self, defaults: Defaults) -> PrefillRow:
        """The row with missing values from the defaults. Raises InputError for a required value that both lack."""
        missing: dict[str, Any] = {name: defaults.get(name) for name in COLUMNS[:-1] if getattr(self, name) is None}
        row = replace(self, **missing)
        if not row.model:
            row = replace(row, model=row.likely_model)
        for name, option in (("model", "model"), ("context_len", "ctx")):
            if getattr(row, name) is None:
                raise InputError(f"{self.where}: {name}", ABSENT, f"a value, or one for all rows: `{option}`")
        return row

    @property
    def strategy_name(self) -> str:
        """The row's strategy; by default `tp`, as in engines, or `single` on one GPU."""
        if self.strategy:
            return self.strategy
        if (self.num_gpus or 1) > 1:
            return "tp"
        return "single"

    @property
    def case(self) -> str:
        """Description of the row's case."""
        gpus = self.num_gpus or 1
        parts = [f"{self.model} {self.context_len} {self.strategy_name} on {gpus} GPU{'s' * (gpus > 1)}"]
        if (self.batch or 1) > 1:
            parts.append(f"batch {self.batch}")
        if self.cached_prefix:
            parts.append(f"{self.cached_prefix} cached")
        return ", ".join(parts)


# -- one file that a benchmark wrote

SHARED = "kvrsim shared prefills"  # format of calibrate/prefills/share.py
MOST_GROUPS = 24  # a run with more prompt lengths becomes this number of rows: neighbouring lengths share a row

_UNITS_S = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class TimedRequest(NamedTuple):
    """One request of a benchmark."""

    tokens: int  # length of the prompt
    ttft_s: float  # seconds to the first token, without the wait in the queue if that is known
    queued_s: float | None = None  # wait in the server's queue; None: unknown


@dataclass(slots=True)
class Output:
    """What a reader collects from one file of a benchmark: rows, and notes for the user."""

    path: Path
    rows: list[PrefillRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    requests: list[TimedRequest] = field(default_factory=list)  # single requests

    def add(self, where: str, ttft_s: float, **sizes: Any) -> None:
        """Add one row."""
        self.rows.append(PrefillRow(ttft_s=ttft_s, where=where, **sizes))

    def note(self, text: str) -> None:
        """Add a note for the user about this file."""
        self.notes.append(f"{self.path.name}: {text}")


def add_requests(output: Output, requests: Sequence[TimedRequest], where: str, model: str | None = None) -> None:
    """Add one row per prompt length, the median of its requests; if there are many lengths, neighbours are grouped."""
    ordered = sorted(requests, key=itemgetter(0, 1))
    lengths = sorted({request.tokens for request in ordered})
    if len(lengths) <= MOST_GROUPS:
        groups = [list(group) for _, group in groupby(ordered, key=itemgetter(0))]
    else:
        size = -(-len(ordered) // MOST_GROUPS)
        groups = [ordered[first : first + size] for first in range(0, len(ordered), size)]
        output.note(f"{len(lengths)} prompt lengths, put into {len(groups)} groups of up to {size} requests")
    for group in groups:
        length = statistics.median(request.tokens for request in group)
        seconds = statistics.median(request.ttft_s for request in group)
        waits = [request.queued_s for request in group if request.queued_s is not None]
        queued_s = statistics.median(waits) if waits else None
        output.add(where, seconds, context_len=round(length), batch=1, likely_model=model, queued_s=queued_s)


def seconds_of(metric: JsonObject, *statistics_: str) -> float:
    """The first of these statistics that the metric has, converted to seconds."""
    unit = metric.text("unit", "ms")
    if unit not in _UNITS_S:
        raise metric.error("unit", ", ".join(_UNITS_S))
    return metric.number(metric.first_of(*statistics_)) * _UNITS_S[unit]


def known_model(name: object) -> str | None:
    """The built-in model with the shape of an id such as meta-llama/Llama-2-70b-chat-hf; None if it is unknown.

    An id that names a quantisation, such as Qwen/Qwen3-32B-FP8, stays as it is.
    """
    if not isinstance(name, str):
        return None
    shape = known_shape(name)
    if shape is None:
        return None
    if shape.suffix is None:
        return shape.shape
    return name


# -- readers of each benchmark's output

_MOST_RATE = 1e9  # requests per second; a larger number of a file is shown as it is
_BUSY = 0.1  # share of a server's time that prefills take; above this share requests wait noticeably
_MIXED = 0.05  # relative spread of prompt lengths above which a note is given


def _vllm_latency(data: JsonObject, output: Output) -> None:
    """Read seconds of whole batches; they are TTFTs only for one output token.

    Keys: avg_latency, std_latency, latencies (seconds, one per repetition), percentiles ("10" to "99"). The file lacks
    the command's --input-len and --batch-size: the user gives them as `--ctx` and `--batch`.
    """
    latencies = data.numbers("latencies")
    if latencies:
        seconds = statistics.median(latencies)
    else:
        seconds = data.number("avg_latency")
    output.note("taken as times to first token; that holds for `vllm bench latency --output-len 1` only")
    output.add(data.where, seconds)


def _vllm_serve(data: JsonObject, output: Output) -> None:
    """Read TTFTs at the client, in seconds per request (ttfts, input_lens) or as statistics in milliseconds.

    A failed request has a TTFT of 0. Without --save-detailed there is only the mean length of all prompts. Waits in the
    server's queue (server_queue_times, seconds per request) are subtracted. If --max-concurrency users sent requests
    without a rate, the wait model derives the seconds of one prefill from the mean TTFT.
    """
    model = known_model(data.fields.get("model_id"))
    rate = data.fields.get("request_rate")
    users = data.fields.get("max_concurrency")
    if data.has("ttfts"):
        pairs = _requests(data)
        add_requests(output, pairs, data.where, model)
        typical_s = statistics.median(request.ttft_s for request in pairs)
        if _waits(data, len(data.numbers("ttfts", allow_zero=True))):
            output.note("server_queue_times are subtracted from the times to first token")
            return
    else:
        key = data.first_of("median_ttft_ms", "mean_ttft_ms")
        typical_s = data.number(key) * 1e-3
        if (alone_s := _alone_s(data, rate, users)) is not None:
            output.note(f"one prefill from the mean TTFT of {users} users, by the wait model")
            typical_s = alone_s
            users = 1
        tokens = data.integer("total_input_tokens", maximum=MAX_TOKENS**2) / data.integer("completed")
        output.note("saved without --save-detailed: all prompts are taken to have the mean length")
        output.add(data.where, typical_s, context_len=max(1, round(tokens)), batch=1, likely_model=model)
    _note_queues(rate, users, typical_s, output)


def _alone_s(data: JsonObject, rate: object, users: object) -> float | None:
    """Seconds of one prefill from the mean TTFT of several users without a rate; None without mean_tpot_ms."""
    if rate not in ("inf", None) or not isinstance(users, int) or users < 2 or not data.has("mean_tpot_ms"):
        return None
    completed = data.integer("completed")
    loop = ClosedLoop(
        users=users,
        tpot_s=data.number("mean_tpot_ms") * 1e-3,
        output_tokens=data.integer("total_output_tokens", maximum=MAX_TOKENS**2) / completed,
        prompt_tokens=data.integer("total_input_tokens", maximum=MAX_TOKENS**2) / completed,
    )
    return loop.prefill_s(data.number("mean_ttft_ms") * 1e-3)


def _requests(data: JsonObject) -> list[TimedRequest]:
    """Prompt tokens and TTFT of each answered request, without its wait in the queue."""
    seconds = data.numbers("ttfts", allow_zero=True)
    lengths = data.numbers("input_lens")
    if len(seconds) != len(lengths):
        raise data.error("input_lens", f"an array with a length for each of the {len(seconds)} ttfts")
    queued: Sequence[float | None] = _waits(data, len(seconds)) or [None] * len(seconds)
    pairs = []
    for length, ttft_s, wait_s in zip(lengths, seconds, queued, strict=True):
        if ttft_s > (wait_s or 0.0):
            pairs.append(TimedRequest(tokens=round(length), ttft_s=ttft_s - (wait_s or 0.0), queued_s=wait_s))
    if not pairs:
        raise data.error("ttfts", "an array with a time above 0: that of a request that was answered")
    return pairs


def _waits(data: JsonObject, count: int) -> list[float] | None:
    """Seconds of each request in the server's queue, 0 where the value is null; None if the file has no values."""
    seconds: list[float | None] = data.get("server_queue_times", list[NonNegative | None], [])
    if all(wait_s is None for wait_s in seconds):
        return None
    if len(seconds) != count:
        raise data.error("server_queue_times", f"an array with seconds, or null, for each of the {count} ttfts")
    return [wait_s or 0.0 for wait_s in seconds]


def _note_queues(rate: object, concurrency: object, typical_s: float, output: Output) -> None:
    """Add a note if TTFTs include waits under load: an engine has no term for waits."""
    if concurrency == 1:
        return
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool) and abs(rate) < _MOST_RATE
    text = f"request rate {str(rate or 'unknown')[:20]}"
    if is_number:
        assert isinstance(rate, int | float)
        if rate * typical_s <= _BUSY:
            return
        text = f"{rate:g} requests/s"
    output.note(
        f"{text}: TTFTs hold waiting in queues, which is fitted as if it were the engine's;"
        " measure with --max-concurrency 1"
    )


def _sglang(data: JsonObject, output: Output) -> None:
    """Read prefill_latency, the seconds of one batch inside the process, without server, tokeniser and HTTP."""
    output.add(
        data.where,
        data.number("prefill_latency"),
        context_len=data.integer("input_len"),
        batch=data.integer("batch_size"),
    )
    text = "times inside the engine: the time of a request that clients see is not in them"
    if f"{output.path.name}: {text}" not in output.notes:
        output.note(text)


def _aiperf(data: JsonObject, output: Output) -> None:
    """Read statistics over all requests: {"unit": "ms", "avg", "p50", "std", ...} for each metric."""
    ttft = data.child("time_to_first_token")
    length = data.child("input_sequence_length")
    tokens = length.number(length.first_of("p50", "avg"), maximum=MAX_TOKENS)
    if length.has("std") and length.number("std", allow_zero=True) > _MIXED * tokens:
        output.note("prompts of unlike lengths: one mean stands for them; give profile_export.jsonl of AIPerf instead")
    seconds = seconds_of(ttft, "p50", "avg")
    settings = _inner(data.fields, "input_config")
    name = _inner(settings, "endpoint").get("model_names")
    if isinstance(name, list) and name:
        name = name[0]
    load = _inner(settings, "loadgen")
    model = known_model(name)
    output.add(data.where, seconds, context_len=max(1, round(tokens)), batch=1, likely_model=model)
    rate = load.get("request_rate")
    concurrency = load.get("concurrency")
    if rate is not None or concurrency is not None:  # by default AIPerf sends one request at a time
        _note_queues(rate, concurrency, seconds, output)


def _aiperf_request(data: JsonObject, output: Output) -> None:
    """Read one request of profile_export.jsonl; a failed request has an error or no TTFT."""
    metrics = data.child("metrics")
    if data.has("error") or not metrics.has("time_to_first_token"):
        return
    tokens = metrics.child("input_sequence_length").integer("value")
    seconds = seconds_of(metrics.child("time_to_first_token"), "value")
    output.requests.append(TimedRequest(tokens=tokens, ttft_s=seconds))


def _inferencex(data: JsonObject, output: Output) -> None:
    """Read one configuration of InferenceX, whose times are in seconds; its application stores some in milliseconds.

    mean_intvty, tokens a second per user, is the inverse of mean_tpot in seconds and tells the unit. Several users wait
    for each other: the wait model derives one prefill from their mean TTFT. Servers that only prefill are left out.
    """
    if str(data.fields.get("disagg")).lower() == "true" or str(data.fields.get("is_multinode")).lower() == "true":
        output.note("rows of disaggregated serving and of several nodes are left out: their TTFT has a transfer in it")
        return
    unit_s = 1.0
    if data.has("mean_intvty") and data.has("mean_tpot"):
        product = data.number("mean_intvty") * data.number("mean_tpot")
        unit_s = 1e-3 if product > _BETWEEN_UNITS else 1.0
    if unit_s != 1:
        output.note("times are in milliseconds: mean_intvty is the inverse of mean_tpot in seconds")
    users = data.integer("conc")
    seconds: float | None = data.number(data.first_of("median_ttft", "mean_ttft")) * unit_s
    context_len = data.get("isl", int | None, None)
    if users > 1:
        loop = ClosedLoop(
            users=users,
            tpot_s=data.number("mean_tpot") * unit_s,
            output_tokens=data.get("osl", int | None, None) or OUTPUT_TOKENS,
            prompt_tokens=context_len,
        )
        seconds = loop.prefill_s(data.number("mean_ttft") * unit_s)
        output.note("one prefill from the mean TTFT of several users, by the wait model")
    if seconds is None:
        output.note(f"a row of {users} users is left out: their TTFT is less than the wait for a running decode step")
        return
    precision = str(data.fields.get("precision", "")).lower()
    chip, _, _ = data.text("hw").partition("-")
    output.add(
        data.where,
        seconds,
        gpu=chip,
        num_gpus=data.integer("tp"),
        context_len=context_len,
        batch=1,
        dtype=precision if precision in DTYPES else None,
        likely_model=known_model(data.fields.get("model")),
    )


def _statistics_table(text: str, where: str, output: Output) -> None:
    """Read the CSV file of genai-perf or AIPerf: a row per metric, a column per statistic, thousands with commas."""
    rows = list(csv.reader(text.splitlines()))
    header = rows[0]
    values: dict[str, dict[str, str]] = {}
    units_s: dict[str, float] = {}
    for row in rows[1:]:
        if len(row) != len(header):
            break  # an empty line ends the first table
        name, unit_s = split_unit(row[0])
        name = name.removesuffix("_tokens")
        values[name] = dict(zip(header[1:], row[1:], strict=True))
        units_s[name] = 1e-3 if unit_s is None else unit_s

    def number(name: str) -> float:
        if name not in values:
            raise InputError(f"{where}: Metric", ", ".join(values) or ABSENT, f"a row {name.replace('_', ' ')}")
        column = next((column for column in ("p50", "avg") if column in values[name]), header[-1])
        value = values[name][column].replace(",", "")
        try:
            result = float(value)
        except ValueError:
            result = 0.0
        if not 0 < result <= MAX_TOKENS:
            raise InputError(f"{where}: {name} {column}", values[name][column], "a number above 0")
        return result

    tokens = number("input_sequence_length")
    seconds = number("time_to_first_token") * units_s["time_to_first_token"]
    output.add(where, seconds, context_len=max(1, round(tokens)), batch=1)
    output.note("one row, of the median TTFT and the median prompt length; load and model are not in the file")


def _metrics(text: str, where: str, output: Output) -> None:
    """Read a scrape of /metrics. TTFT and prompt lengths have a histogram each, not a common one.

    TTFT rises with the prompt's length: the quartiles of one histogram belong to those of the other. The mean wait in
    the queue is subtracted.
    """
    metrics = read_metrics(text, where)
    found = {}
    for role, names in _HISTOGRAMS.items():
        found[role] = next((metrics.histograms[name] for name in names if name in metrics.histograms), None)
    times, lengths, queue = found["ttft"], found["prompt"], found["queue"]
    if times is None or lengths is None:
        missing = [names[0] for role, names in _HISTOGRAMS.items() if role != "queue" and found[role] is None]
        accepted = f"histograms {' and '.join(missing)} with observations"
        raise InputError(where, ", ".join(metrics.histograms) or ABSENT, accepted)
    queued_s = None if queue is None or math.isnan(queue.mean) else queue.mean
    wait_s = queued_s or 0.0
    shares = [share for share in _QUARTILES if times.quantile(share) > 2 * wait_s] or [0.5]
    if lengths.quantile(shares[-1]) < _ALIKE * lengths.quantile(shares[0]):
        shares = [0.5]
    for share in shares:
        seconds = times.quantile(share) - wait_s
        if seconds <= 0:
            raise InputError(f"{where}: queue", f"{wait_s:.3g} s", "a shorter mean wait than the median TTFT")
        tokens = max(1, round(lengths.quantile(share)))
        model = known_model(metrics.model)
        output.add(where, seconds, context_len=tokens, batch=1, likely_model=model, queued_s=queued_s)
    low, high = times.bucket(0.5)
    output.note(f"TTFT is known to its bucket: the median lies between {low:g} and {high:g} s")
    if len(shares) > 1:
        output.note("quartiles of TTFT are taken to belong to quartiles of the prompt lengths")
    if queued_s:
        output.note(f"the mean wait in the queue, {queued_s:.3g} s, is subtracted")
    hits, queries = (metrics.counters.get(f"prefix_cache_{name}_total", 0.0) for name in ("hits", "queries"))
    if queries and hits / queries > _BUSY:
        output.note(f"{hits / queries:.0%} of the prompts' tokens came from the prefix cache: give --cached-prefix")


_HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",),
    "prompt": ("request_prompt_tokens", "prompt_tokens_histogram"),
    "queue": ("request_queue_time_seconds", "queue_time_seconds"),
}
_QUARTILES = (0.25, 0.5, 0.75)
_ALIKE = 1.25  # ratio of two lengths below which their rows would say the same
_BETWEEN_UNITS = 30.0  # of mean_intvty times mean_tpot: 1 in seconds, 1000 in milliseconds


def _inner(outer: Mapping[str, object], key: str) -> Mapping[str, object]:
    value = outer.get(key)
    if isinstance(value, dict):
        return value
    return {}


def _shared(data: JsonObject, output: Output) -> None:
    """Read rows that a user has shared. kvrsim cannot predict a row again if it does not ship the row's model."""
    if data.text("format") != SHARED:
        raise data.error("format", f'"{SHARED}"')
    unknown = 0
    for row in data.children("rows"):
        strategy = row.text("strategy")
        if not row.has("model") or strategy == "other":
            unknown += 1
            continue
        sizes = {name: row.integer(name) for name in ("num_gpus", "context_len", "batch")}
        texts = {name: row.text(name) for name in ("model", "gpu", "dtype")}
        if texts["dtype"] not in DTYPES:
            raise row.error("dtype", ", ".join(DTYPES))
        cached = row.get("cached_prefix", Whole, 0)
        get_strategy(strategy, f"{row.where}: strategy")
        output.add(row.where, row.number("ttft_s"), **sizes, **texts, strategy=strategy, cached_prefix=cached)
    if unknown:
        output.note(f"{unknown} row{'s' * (unknown > 1)} of models or strategies that kvrsim does not ship left out")


Reader = Callable[[JsonObject, Output], None]
# Reader of a format by the tool that writes it; keys that identify the format come first, and all of them are required.
FORMATS: Mapping[str, tuple[tuple[str, ...], Reader]] = {
    "sglang.bench_one_batch": (("prefill_latency", "input_len"), _sglang),
    "vllm bench serve, detailed": (("ttfts", "input_lens"), _vllm_serve),
    "vllm bench serve": (("mean_ttft_ms", "completed"), _vllm_serve),
    "vllm bench latency": (("avg_latency", "percentiles"), _vllm_latency),
    "InferenceX": (("hw", "conc", "mean_ttft"), _inferencex),
    "AIPerf": (("time_to_first_token", "input_sequence_length"), _aiperf),
    "AIPerf, one request a line": (("metrics", "metadata"), _aiperf_request),
    "kvrsim --share": (("format", "rows"), _shared),
}


# -- files

MOST_ROWS = 500  # a fit to more rows takes many minutes
MAX_OUTPUT_BYTES = 2**28  # bytes of a detailed result with about ten thousand requests and their texts
_JSON_STARTS = ("{", "[")
_HEAD_CHARS = 4096  # of a file, by which its form is recognised


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRows:
    """Rows of all files, and notes about them."""

    rows: tuple[PrefillRow, ...]
    notes: tuple[str, ...]


def read_prefills(
    sources: Sequence[str | Path | pandas.DataFrame],
    defaults: Defaults,
    argument: str = "prefills",
    *,
    columns: str | None = None,
) -> PrefillRows:
    """Read CSV files, data frames and benchmark outputs, in their order; fill missing values with the defaults.

    columns: "ROLE=COLUMN,..." for CSV files and data frames, such as "ttft_s=latency". Raises InputError naming
    `argument`, the file, and the line, column or key.
    """
    named: Mapping[str, RoleColumn] = {}
    if columns is not None:
        named = parse_columns(columns, _USUAL)
    if named and all(isinstance(source, str | Path) and _form(source) for source in sources):
        raise InputError("columns", columns, "nothing without a CSV file or a data frame: keys of benchmarks are known")
    rows: list[PrefillRow] = []
    notes: list[str] = []
    for source in _files(sources, argument):
        if isinstance(source, str | Path) and _form(source) is not None:
            part = _output(source, argument)
            rows += part.rows
            notes += part.notes
        else:
            if isinstance(source, str | Path):
                table = CsvTable.read(source, argument)
            else:
                table = CsvTable.of_frame(source, argument)
            in_table = _table(table, named, defaults.get("context_len"))
            rows += in_table.rows
            notes += in_table.notes
    if not rows:
        raise InputError(argument, ", ".join(map(str, sources)) or ABSENT, "files with one measured prefill or more")
    if len(rows) > MOST_ROWS:
        raise InputError(argument, f"{len(rows)} rows", f"at most {MOST_ROWS}")
    guessed = set()
    for row in rows:
        if row.likely_model and not row.model and not defaults.get("model"):
            guessed.add(row.likely_model)
    notes += [f"the model is taken to be {model}, by its name in the file" for model in sorted(guessed)]
    return PrefillRows(rows=tuple(row.fill(defaults) for row in rows), notes=tuple(dict.fromkeys(notes)))


def _files(sources: Sequence[str | Path | pandas.DataFrame], argument: str) -> Iterator[str | Path | pandas.DataFrame]:
    """The sources, with a folder replaced by its JSON and CSV files. Raises InputError for a folder without one."""
    for source in sources:
        if not isinstance(source, str | Path) or not Path(source).is_dir():
            yield source
            continue
        inside = sorted(path for path in Path(source).iterdir() if path.suffix in _SUFFIXES)
        if not inside:
            raise InputError(argument, str(source), f"a folder with files {', '.join(_SUFFIXES)}")
        yield from inside


_SUFFIXES = (".json", ".jsonl", ".csv")  # suffixes of the files that are read from a folder


def _form(path: str | Path) -> str | None:
    """The form of a benchmark's file by its beginning; None for another CSV file, and for an unreadable file."""
    try:
        with open_regular(path, "prefills", what="a file") as file:
            return _form_of(file.read(_HEAD_CHARS).decode("utf-8-sig", errors="ignore"))
    except (InputError, OSError):
        return None


def _form_of(head: str) -> str | None:
    """ "json", "metrics" (of Prometheus), "statistics" (a CSV file with a row per metric), or None."""
    if head.lstrip().startswith(_JSON_STARTS):
        return "json"
    if is_metrics(head):
        return "metrics"
    if head.startswith("Metric,"):
        return "statistics"
    return None


def _table(table: CsvTable, named: Mapping[str, RoleColumn], context_len: int | None) -> PrefillRows:
    """Rows of a CSV file, and notes on its columns; `context_len` is that of rows without one."""
    columns = find_columns(table.columns, _USUAL, named)
    if "ttft_s" not in columns:
        accepted = "a column ttft_s (seconds) or ttft_ms among the others, or its name: `columns` ttft_s=COLUMN"
        raise InputError(f"{table.where}: header", ", ".join(table.columns), accepted)
    read = {column.name: role for role, column in columns.items()}
    renamed = [f"{name} as {role}" for name, role in read.items() if name != role]
    unread = [name for name in table.columns if name and name not in read]
    notes = []
    if renamed:
        notes.append(f"{table.path.name}: columns read: {', '.join(renamed)}")
    if unread:
        notes.append(f"{table.path.name}: columns that are not read: {', '.join(unread)}")
    rows = [_csv_row(CsvRow(row=row, columns=columns), context_len) for row in table.rows]
    return PrefillRows(rows=tuple(rows), notes=tuple(notes))


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvRow:
    """A line of a CSV file, whose values are read by the roles of their columns."""

    row: JsonObject  # texts by column
    columns: Mapping[str, RoleColumn]  # columns by role

    def has(self, role: str) -> bool:
        return role in self.columns and self.row.has(self.columns[role].name)

    def text(self, role: str) -> str:
        return self.row.text(self.columns[role].name)

    def place(self, role: str) -> str:
        """The file, line and column of a role, for messages."""
        return f"{self.row.where}: {self.columns[role].name}"

    def number(self, role: str) -> float:
        """A number above 0."""
        return parse_cells(self.row).number(self.columns[role].name)

    def seconds(self, role: str) -> float:
        """A time above 0 and at most MAX_SECONDS, in seconds; without a unit the values are seconds."""
        seconds = self.number(role)
        unit_s = self.columns[role].unit_s
        if unit_s is not None:
            seconds *= unit_s
        if not 0 < seconds <= MAX_SECONDS:
            raise self.error(role, f"a time above 0 and of at most {MAX_SECONDS:g} s")
        return seconds

    def error(self, role: str, accepted: str) -> InputError:
        """Error for the value of a role."""
        if role in self.columns:
            return self.row.error(self.columns[role].name, accepted)
        return self.row.error(role, accepted)


def _csv_row(row: CsvRow, context_len: int | None) -> PrefillRow:
    texts = {role: row.text(role) for role in ("model", "gpu", "strategy", "dtype") if row.has(role)}
    parsers: dict[str, Callable[[str, str], int]] = {
        **dict.fromkeys(("num_gpus", "batch"), parse_count),
        "context_len": parse_tokens,
        "cached_prefix": tokens_or_none,
    }
    sizes = {role: parse(row.text(role), row.place(role)) for role, parse in parsers.items() if row.has(role)}
    if texts.get("dtype", DTYPES[0]) not in DTYPES:
        raise row.error("dtype", ", ".join(DTYPES))
    if "strategy" in texts:
        if is_file(texts["strategy"]):  # a table of measurements must not name code to run
            raise row.error("strategy", "a strategy's name; one of a file: `strategy`")
        get_strategy(texts["strategy"], row.place("strategy"))
    values: dict[str, Any] = {**texts, **sizes}
    ttft_s = _prefill_s(row, sizes.get("context_len", context_len))
    unitless = None
    if row.columns["ttft_s"].unit_s is None:
        unitless = row.columns["ttft_s"].name
    return PrefillRow(ttft_s=ttft_s, where=row.row.where, unitless=unitless, **values)


def _prefill_s(row: CsvRow, context_len: int | None) -> float:
    """The row's TTFT; with several users, the seconds of one prefill, derived from their mean TTFT."""
    mean_s = row.seconds("ttft_s")
    users = 1
    if row.has("concurrency"):
        users = parse_count(row.text("concurrency"), row.place("concurrency"))
    if users == 1:
        return mean_s
    if not row.has("tpot_s"):
        raise row.error("tpot_s", f"seconds per output token, without which a mean TTFT of {users} users is no prefill")
    output_tokens: float = OUTPUT_TOKENS
    if row.has("output_tokens"):
        output_tokens = row.number("output_tokens")
    loop = ClosedLoop(users=users, tpot_s=row.seconds("tpot_s"), output_tokens=output_tokens, prompt_tokens=context_len)
    seconds = loop.prefill_s(mean_s)
    if seconds is None:
        raise row.error("ttft_s", "more than the wait for the running decode step, half of tpot_s")
    return seconds


def _output(path: str | Path, argument: str) -> Output:
    """Read rows and notes of one file; InputError names `argument`, the file and the key."""
    output = Output(path=Path(path))
    where = f"{argument} {' '.join(str(path).split())}"
    text = read_text(path, argument, what="a file", most_bytes=MAX_OUTPUT_BYTES)
    form = _form_of(text[:_HEAD_CHARS])
    if form == "metrics":
        _metrics(text, where, output)
    elif form == "statistics":
        _statistics_table(text, where, output)
    else:
        for data in _objects(text, where):
            reader = _reader_of(data)
            reader(data, output)
    if output.requests:
        add_requests(output, output.requests, where)
    return output


def _reader_of(data: JsonObject) -> Reader:
    """The reader of the first of FORMATS whose keys the object has; raises InputError if it has those of none."""
    for keys, reader in FORMATS.values():
        if all(map(data.has, keys)):
            return reader
    accepted = "; ".join(f"{title} ({', '.join(keys)})" for title, (keys, _) in FORMATS.items())
    raise InputError(f"{data.where}: keys", ", ".join(data.fields) or ABSENT, accepted)


def _objects(text: str, where: str) -> list[JsonObject]:
    """The JSON object of a file, the objects of its array, or those of its lines."""
    try:
        content = parse_json(text)
        if isinstance(content, list):
            return [_object(item, f"{where}[{place}]") for place, item in enumerate(content)]
        return [_object(content, where)]
    except ValueError as error:
        if not text.lstrip().startswith("{"):
            raise InputError(where, " ".join(str(error).split()), "valid JSON") from None
    objects = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            place = f"{where}, line {number}"
            try:
                objects.append(_object(parse_json(line), place))
            except ValueError as error:
                raise InputError(place, " ".join(str(error).split()), "valid JSON: one object, or one a line") from None
    return objects


def _object(value: object, where: str) -> JsonObject:
    if not isinstance(value, dict):
        raise InputError(where, json.dumps(value)[:60], "a JSON object ({...})")
    return JsonObject(fields=value, where=where)
