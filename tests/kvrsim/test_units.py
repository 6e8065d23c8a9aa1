from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.errors import InputError
from kvrsim.hardware import load_cluster
from kvrsim.kernels.profile import load_profile
from kvrsim.model.load import load_model
from kvrsim.units import (
    MAX_TOKENS,
    format_bandwidth,
    format_bytes,
    format_count,
    format_seconds,
    format_tokens,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_lengths,
    parse_seconds,
    parse_tokens,
    scale,
)

PARSERS: list[Callable[[str, str], float]] = [parse_tokens, parse_count, parse_bandwidth, parse_seconds, parse_bytes]
NEVER_VALID = [
    *("", " ", "1 2", "1\n2", "\0", "9" * 5000, "٣", "5 parsecs", "-1", "-1k", "-1GB/s", "-5us", "--5us"),
    *("nan", "inf", "-inf", "NaNGB", "infs", "k", "GB/s", "abc", "1,000", "1_000", "0x10", "1kk", ".5k"),
    *("1e", "1e99", "1e999s", "1e-99", "0", "0k", "0s", "0B", "0GB/s"),
]


def check_refused(parse: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text, "--flag")
    message = str(caught.value)
    assert message.startswith("--flag: got '")
    assert "\n" not in message
    assert len(message) < 300


VALUES: list[tuple[Callable[[str, str], float], dict[str, float]]] = [
    (
        parse_tokens,
        {"16k": 16384, "16K": 16384, "1m": 2**20, "1M": 2**20, "16000": 16000, "10.5k": 10752, " 8k ": 8192},
    ),
    (parse_tokens, {"1": 1, "1e3": 1000, str(MAX_TOKENS): MAX_TOKENS}),
    (parse_bandwidth, {"10GB/s": 1e10, "10 GB/s": 1e10, "400Gb/s": 5e10, "400Gbps": 5e10, "1.5TB/s": 1.5e12}),
    (parse_bandwidth, {"1GiB/s": 2.0**30, "8b/s": 1.0, "1e10B/s": 1e10, "100MB/s": 1e8, "2kB/s": 2e3}),
    (parse_seconds, {"5us": 5e-6, "5µs": 5e-6, "5μs": 5e-6, "2ms": 2e-3, "1s": 1.0, "1.5 s": 1.5, "300ns": 3e-7}),
    (parse_bytes, {"80GB": 80e9, "1MiB": 2**20, "1.5KiB": 1536, "1B": 1, "0.5kB": 500, "40 GiB": 40 * 2**30}),
]
REFUSED: dict[Callable[[str, str], float], list[str]] = {
    parse_tokens: ["10.3k", "0.5", "16g", "16 tokens", str(MAX_TOKENS + 1)],
    parse_bandwidth: ["10", "10GB", "10gb/s", "10g", "1e30TB/s", "0.1B/s", "10 GB /s", "5us"],
    parse_seconds: ["5", "5m", "1h", "1e20s"],
    parse_bytes: ["80", "80G", "80Gb", "0.5B", "99EB", "1e30GB"],
}


@pytest.mark.parametrize(("parse", "values"), VALUES)
def test_values(parse: Callable[[str, str], float], values: dict[str, float]) -> None:
    assert {text: parse(text, "--flag") for text in values} == values


@pytest.mark.parametrize("parse", REFUSED)
def test_what_is_refused(parse: Callable[[str, str], float]) -> None:
    for text in [*NEVER_VALID, *REFUSED[parse]]:
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


def test_zero_seconds_only_where_allowed() -> None:
    assert parse_seconds("0us", "--link-latency", allow_zero=True) == 0
    check_refused(parse_seconds, "0us")
    with pytest.raises(InputError, match="at least 0"):
        parse_seconds("0", "--link-latency", allow_zero=True)


def test_count() -> None:
    assert parse_count("8", "--gpus") == 8
    assert parse_count("3", "--gpus", maximum=3) == 3
    with pytest.raises(InputError, match="from 1 to 3"):
        parse_count("4", "--gpus", maximum=3)
    check_refused(parse_count, "1.5")
    check_refused(parse_count, "8k")


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
        (0.9996, "1.00 s"),
        (1.5, "1.50 s"),
        (123.4, "123 s"),
        (5e-6, "5.00 us"),
        (0.0, "0 s"),
        (-0.002, "-2.00 ms"),
        (math.inf, "inf s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


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


def test_lengths() -> None:
    texts = {"1k:4k:1k": (1024, 2048, 3072, 4096), "8k,4k": (4096, 8192), "100:250:100": (100, 200, 250)}
    texts |= {"1k:2k:1k,1k,5000": (1024, 2048, 5000), "1k:6k:x2": (1024, 2048, 4096, 6144)}
    assert {text: parse_lengths(text, "--ctx") for text in texts} == texts
    for text in ("", "1k:2k", "2k:1k:1k", "1k:2k:0", "1k,,2k", "1:1m:1", "x", "1k:2k:1k:1", "1k:2k:x1"):
        check_refused(parse_lengths, text)


def test_a_count_has_its_noun_in_the_plural_unless_it_is_one() -> None:
    assert [format_count(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
