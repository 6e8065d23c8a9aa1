from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.hardware import load_cluster
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.profile import load_profile
from kvrsim.model.load import load_model
from kvrsim.units import (
    MAX_TOKENS,
    format_bandwidth,
    format_bytes,
    format_seconds,
    format_tokens,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_seconds,
    parse_tokens,
    scale,
)

PARSERS: list[Callable[[str, str], float]] = [
    parse_tokens,
    parse_count,
    parse_bandwidth,
    parse_seconds,
    parse_bytes,
]
NEVER_VALID = [
    "",
    " ",
    "-1",
    "-1k",
    "-1GB/s",
    "-5us",
    "nan",
    "inf",
    "-inf",
    "NaNGB",
    "infs",
    "k",
    "GB/s",
    "abc",
]
NEVER_VALID += [
    "1,000",
    "1_000",
    "0x10",
    "1 2",
    "1kk",
    "1e",
    "1e999s",
    "9" * 5000,
    "٣",
    "1\n2",
    "\0",
    "0",
    "0k",
]
NEVER_VALID += ["0s", "0B", "0GB/s", "1e99", "--5us", "1e-99", "5 parsecs", ".5k"]


def check_refused(parse: Callable[[str, str], float], text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "--flag")
    message = str(caught.value)
    assert message.startswith("--flag: got '")
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("16k", 16384),
        ("16K", 16384),
        ("1m", 1048576),
        ("1M", 1048576),
        ("16000", 16000),
        ("10.5k", 10752),
        (" 8k ", 8192),
        ("1", 1),
        ("1e3", 1000),
        (str(MAX_TOKENS), MAX_TOKENS),
    ],
)
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--ctx") == tokens


@pytest.mark.parametrize("text", [*NEVER_VALID, "10.3k", "0.5", "16g", "16 tokens", str(MAX_TOKENS + 1)])
def test_tokens_refused(text: str) -> None:
    check_refused(parse_tokens, text)


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", NEVER_VALID)
def test_nonsense_is_refused_by_all(parse: Callable[[str, str], float], text: str) -> None:
    check_refused(parse, text)


@pytest.mark.parametrize("parse", PARSERS)
@given(text=st.text(max_size=100))
def test_any_text_is_a_positive_finite_number_or_an_input_error(parse: Callable[[str, str], float], text: str) -> None:
    message, value = "", 1.0
    try:
        value = parse(text, "--flag")
    except InputError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1
    assert 0 < value < math.inf


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10GB/s", 1e10),
        ("10 GB/s", 1e10),
        ("400Gb/s", 5e10),
        ("400Gbps", 5e10),
        ("1.5TB/s", 1.5e12),
        ("1GiB/s", 2.0**30),
        ("8b/s", 1.0),
        ("1e10B/s", 1e10),
        ("100MB/s", 1e8),
        ("2kB/s", 2e3),
    ],
)
def test_bandwidth(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text, "--link-bandwidth") == bytes_per_s


@pytest.mark.parametrize("text", ["10", "10GB", "10gb/s", "10g", "1e30TB/s", "0.1B/s", "10 GB /s", "5us"])
def test_bandwidth_refused(text: str) -> None:
    check_refused(parse_bandwidth, text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5us", 5e-6),
        ("5µs", 5e-6),
        ("5μs", 5e-6),
        ("2ms", 2e-3),
        ("1s", 1.0),
        ("1.5 s", 1.5),
        ("300ns", 3e-7),
    ],
)
def test_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--link-latency") == seconds


@pytest.mark.parametrize("text", ["5", "5m", "1h", "1e20s"])
def test_seconds_refused(text: str) -> None:
    check_refused(parse_seconds, text)


def test_zero_seconds_only_where_allowed() -> None:
    assert parse_seconds("0us", "--link-latency", allow_zero=True) == 0
    check_refused(parse_seconds, "0us")
    with pytest.raises(InputError, match="at least 0"):
        parse_seconds("0", "--link-latency", allow_zero=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("1MiB", 2**20),
        ("1.5KiB", 1536),
        ("1B", 1),
        ("0.5kB", 500),
        ("40 GiB", 40 * 2**30),
    ],
)
def test_bytes(text: str, size: int) -> None:
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["80", "80G", "80Gb", "0.5B", "99EB", "1e30GB"])
def test_bytes_refused(text: str) -> None:
    check_refused(parse_bytes, text)


def test_count() -> None:
    assert parse_count("8", "--gpus") == 8
    assert parse_count("3", "--gpus", maximum=3) == 3
    with pytest.raises(InputError, match="from 1 to 3"):
        parse_count("4", "--gpus", maximum=3)
    check_refused(parse_count, "1.5")
    check_refused(parse_count, "8k")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [(16384, "16k"), (1048576, "1M"), (16000, "16000"), (10752, "10.5k"), (1, "1"), (512, "512"), (0, "0")],
)
def test_format_tokens(tokens: int, text: str) -> None:
    assert format_tokens(tokens) == text


@given(st.one_of(st.integers(1, MAX_TOKENS), st.integers(1, 2**20).map(lambda n: 512 * n)))
def test_tokens_round_trip(tokens: int) -> None:
    assert parse_tokens(format_tokens(tokens), "--ctx") == tokens


@given(st.floats(1e-9, 1e8))
def test_seconds_round_trip_to_three_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds), "--t") == pytest.approx(seconds, rel=6e-3)


@given(st.floats(1, 1e15))
def test_bandwidth_round_trip_to_three_digits(bandwidth: float) -> None:
    assert parse_bandwidth(format_bandwidth(bandwidth), "--b") == pytest.approx(bandwidth, rel=6e-3)


@given(st.integers(1, 2**55))
def test_bytes_round_trip_to_three_digits(size: int) -> None:
    number, unit = format_bytes(size).split()
    scale = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert float(number) * scale == pytest.approx(size, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00123, "1.23 ms"),
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (12.345, "12.3 s"),
        (123.4, "123 s"),
        (5e-6, "5.00 us"),
        (3e-7, "300 ns"),
        (0.0, "0 s"),
        (-0.002, "-2.00 ms"),
        (math.inf, "inf s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_sizes() -> None:
    assert format_bytes(13 * 2**30) == "13.0 GiB"
    assert format_bytes(1536) == "1.50 KiB"
    assert format_bytes(7) == "7 B"
    assert format_bandwidth(3e11) == "300 GB/s"
    assert format_bandwidth(1.5e12) == "1.50 TB/s"


# JSON


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    ["", "{", '{"a": 1', "[1]", "3", "null", b"\xff\xfe\x00", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"],
    ids=["empty", "brace", "truncated", "array", "number", "null", "not-utf8", "deep", "long-number"],
)
def test_json_that_is_not_an_object_is_refused(tmp_path: Path, content: str | bytes) -> None:
    path = written(tmp_path / "a.json", content)
    with pytest.raises(InputError) as caught:
        JsonObject.read(path, "model")
    assert str(caught.value).startswith("model: got '")
    assert "\n" not in str(caught.value)


def test_json_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json", Path("a\0b")):
        with pytest.raises(InputError, match=r"^model: "):
            JsonObject.read(path, "model")


def test_json_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrsim.io.schema.MAX_FILE_BYTES", 10)
    with pytest.raises(InputError, match="at most"):
        JsonObject.read(written(tmp_path / "a.json", '{"a": "0123456789"}'), "model")


def test_json_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", b'\xef\xbb\xbf{"a": 1}')
    assert JsonObject.read(path, "model").integer("a") == 1


def some_json(**fields: object) -> JsonObject:
    return JsonObject(fields=fields, where="model f.json")


@pytest.mark.parametrize("value", [0, -1, 1.5, 4096.0, "4096", True, None, math.nan, [1], {}, 2**41])
def test_json_integer_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^model f\.json: a: got"):
        some_json(a=value).integer("a")


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, -math.inf, "1", True, None, 10**400])
def test_json_number_refused(value: object) -> None:
    with pytest.raises(InputError, match=r"^model f\.json: a: got"):
        some_json(a=value).number("a")


def test_json_other_kinds_refused() -> None:
    content = some_json(a=1, b={"c": "x"})
    for read in (content.text, content.sequence, content.child, lambda key: content.flag(key, True)):
        with pytest.raises(InputError, match="got '1'"):
            read("a")
    with pytest.raises(InputError, match=r"f\.json: b\.c: got 'x'"):
        content.child("b").integer("c")
    with pytest.raises(InputError, match="got 'nothing'"):
        content.integer("absent")


def test_json_defaults_and_comments() -> None:
    content = some_json(_about="a comment", a=None, b=2)
    content.only(["a", "b"])
    assert content.integer("a", 7) == 7
    assert content.first_of("a", "b") == "b"
    assert content.sequence("a") == []
    with pytest.raises(InputError, match=r"got 'b', accepted: a$"):
        content.only(["a"])


@given(st.dictionaries(st.text(max_size=5), st.integers(1, MAX_TOKENS)))
def test_json_integers_round_trip(fields: dict[str, int]) -> None:
    content = some_json(**json.loads(json.dumps(fields)))
    assert {key: content.integer(key) for key in fields} == fields


def test_scaling_reads_units_from_names() -> None:
    link = load_cluster().link
    slower = scale(link, 2.0)
    assert slower.bandwidth_bytes_per_s == link.bandwidth_bytes_per_s / 2
    assert slower.latency_s == link.latency_s * 2
    assert scale(link, 2.0, only_rates=True).latency_s == link.latency_s
    assert scale(None, 2.0) is None
    model = load_model("llama-7b")
    assert scale(model, 2.0) is model, "nothing of it has a unit of time"
    rates = load_profile("a100-flash").kernels
    half = scale(rates, 2.0)
    assert half.elementwise.norm == rates.elementwise.norm / 2
    assert half.gemm.measured[0].seconds == tuple(2 * s for s in rates.gemm.measured[0].seconds)
    assert half.gemm.tiles[0].flops_share == rates.gemm.tiles[0].flops_share
    assert half.attention["flash"].launch_s == 2 * rates.attention["flash"].launch_s  # type: ignore[union-attr]
