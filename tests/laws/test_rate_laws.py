"""Laws for any rates: time never falls with size, respects the datasheet, and is inversely proportional to rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrsim.hardware import GpuSpec
from kvrsim.kernels.attention import AttentionCall, AttentionRates, EagerRates
from kvrsim.kernels.elementwise import ELEMENTWISE_OPS
from kvrsim.kernels.gemm import Product
from kvrsim.program import Array
from kvrsim.units import scale
from tests.building import (
    Draws,
    any_blocked,
    any_cluster,
    any_eager,
    any_elementwise,
    any_flash,
    any_gather_rates,
    any_gemm,
    any_gpu,
    any_sizes,
    draws,
    examples,
    log,
)

FACTORS = st.floats(1e-3, 1e3)
SLACK = 1e-12  # relative tolerance for rounding
KERNELS = ("eager", "measured eager", "sdpa", "merged", "flash")


def rises(seconds: Array) -> bool:
    """Whether no value is smaller than the previous one."""
    return bool((np.diff(seconds) >= -SLACK * seconds[1:]).all())


def sizes(rng: Draws) -> Array:
    """Increasing numbers of tokens: 1 to 199, and others up to a random largest number."""
    largest = 10 ** rng.uniform(1, 4.7)
    some = [*np.geomspace(1, largest, 190), *(rng.uniform(1, largest) for _ in range(10))]
    return np.unique([*range(1, 200), *map(round, some), *some]).astype(float)


# -- matrix products


def products(rng: Draws) -> tuple[Product, ...]:
    """One to three random products, each either of a dense layer or of the experts of a mixture."""
    widths = [8, 64, 300, 4096]
    share = rng.choice([1.0, 0.25])
    return tuple(
        Product(rng.choice(widths), rng.choice(widths), 1 if share == 1 else 8, share)
        for _ in range(rng.choice([1, 1, 2, 3]))
    )


@given(rng=draws(), element_bytes=st.sampled_from([1, 2]))
def test_products_never_take_less_with_rows(rng: Draws, element_bytes: int) -> None:
    gpu, shapes = any_gpu(rng), products(rng)
    rates = any_gemm(rng, gpu, shapes=shapes)
    rows = sizes(rng)
    seconds = rates.seconds(rows, shapes, element_bytes)
    assert rises(seconds)
    flops = sum(product.flops_per_row for product in shapes)
    assert (seconds >= rows * (flops / gpu.peak_flops["fp16"]) * (1 - SLACK)).all()


@given(rng=draws())
@examples(50)
def test_products_come_one_after_another(rng: Draws) -> None:
    """Products take at most the sum of their single times; products that are listed twice take twice the time."""
    shapes, rows = products(rng), sizes(rng)
    rates = any_gemm(rng, any_gpu(rng))
    apart = sum((rates.seconds(rows, (product,), 2) for product in shapes), np.zeros(1))
    assert (rates.seconds(rows, shapes, 2) <= apart * (1 + 1e-9)).all()
    twice = rates.seconds(rows, (*shapes, *shapes), 2)
    assert twice == pytest.approx(2 * rates.seconds(rows, shapes, 2), rel=1e-9)


@given(rng=draws())
@examples(50)
def test_measured_shapes_take_what_was_measured(rng: Draws) -> None:
    shapes = [Product(fan_in, fan_out) for fan_in in (64, 4096) for fan_out in (64, 128, 4096)]
    rates = any_gemm(rng, any_gpu(rng), shapes=shapes)
    for shape in rates.measured:
        product = Product(shape.in_features, shape.out_features)
        rows = np.array(shape.rows, dtype=float)
        assert rates.product_s(rows, product, 2) == pytest.approx(shape.seconds, rel=1e-9)


# -- attention


def caller(rng: Draws) -> Callable[[Array, Array], AttentionCall]:
    """A function that makes calls of attention for a random model, with or without a window."""
    kv_heads, queries, head_dim = rng.choice([1, 2, 3, 8, 71]), rng.choice([1, 2, 3, 8]), rng.choice([8, 64, 128, 256])
    window = rng.choice([np.inf, np.inf, 7, 64, 500, 4096])

    def seen(tokens: Array) -> Array:
        inside = np.minimum(tokens, window)
        return 0.5 * inside * inside + np.where(tokens > inside, (tokens - inside) * min(window, 1e12), 0.0)

    def call(chunk: Array, prefix: Array) -> AttentionCall:
        return AttentionCall(
            chunk=chunk,
            prefix=np.minimum(prefix, window),
            causal=seen(prefix + chunk) - seen(prefix),
            num_attention_heads=kv_heads * queries,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            score_bytes=28.0,
            reach=None if np.isinf(window) else int(window),
        )

    return call


def rates_of(rng: Draws, gpu: GpuSpec, kernel: str) -> AttentionRates:
    """Random rates of a kernel within the datasheet."""
    eager: EagerRates = any_eager(rng, gpu)
    sizes = any_sizes(rng, eager.flops_per_s / gpu.peak_flops["fp16"])
    result: dict[str, AttentionRates] = {
        "eager": eager,
        "measured eager": replace(eager, measured=sizes),
        "sdpa": replace(any_blocked(rng, gpu), skips_masked=False),
        "merged": replace(any_blocked(rng, gpu), skips_masked=True),
        "flash": any_flash(rng, gpu),
    }
    return result[kernel]


def attention(
    rng: Draws, kernel: str
) -> tuple[GpuSpec, AttentionRates, Callable[[Array, Array], AttentionCall], tuple[int, int]]:
    gpu = any_gpu(rng)
    rates = rates_of(rng, gpu, kernel)
    return gpu, rates, caller(rng), (rng.choice([1, 1, 3]), rng.choice([1, 2]))


@pytest.mark.parametrize("kernel", KERNELS)
@given(rng=draws())
@examples(200)
def test_attention_never_takes_less_with_queries_or_keys(kernel: str, rng: Draws) -> None:
    _, rates, call, (batch, element_bytes) = attention(rng, kernel)
    tokens = sizes(rng)
    for other in (0.0, 1.0, float(rng.randint(1, 5000))):
        fixed = np.full_like(tokens, other)
        assert rises(rates.seconds(call(tokens, fixed), batch, element_bytes)), "more queries"
        if other:
            assert rises(rates.seconds(call(fixed, tokens), batch, element_bytes)), "more keys"
    one, many = (rates.seconds(call(tokens, tokens[::-1]), batch, element_bytes) for batch in (1, 3))
    assert (many >= one * (1 - SLACK)).all(), "more sequences"


@given(rng=draws())
@examples(100)
def test_flash_skips_what_no_query_sees(rng: Draws) -> None:
    """A smaller window never costs more, and a very wide window costs as much as no window."""
    rates, tokens = any_flash(rng, any_gpu(rng)), sizes(rng)
    call = caller(rng)(tokens, 0.0 * tokens)
    whole = call._replace(reach=None, causal=0.5 * tokens * tokens)
    windows = [1, 64, 1024, 10**9]
    causals = [np.minimum(tokens, one) * (tokens - 0.5 * np.minimum(tokens, one)) for one in windows]
    calls = [call._replace(reach=one, causal=causal) for one, causal in zip(windows, causals, strict=True)]
    seconds = [rates.seconds(one, 1, 2) for one in (*calls, whole)]
    assert all((less <= more * (1 + SLACK)).all() for less, more in itertools.pairwise(seconds))
    assert seconds[-2] == pytest.approx(seconds[-1])


@pytest.mark.parametrize("kernel", KERNELS)
@given(rng=draws(), v_head_dim=st.integers(1, 1024))
@examples(50)
def test_keys_and_values_count_alike(kernel: str, rng: Draws, v_head_dim: int) -> None:
    """Heads whose keys and values have different widths take the time of heads with the mean width."""
    _, rates, call, (batch, element_bytes) = attention(rng, kernel)
    tokens = sizes(rng)
    plain = call(tokens, tokens[::-1])
    for time in (rates.seconds, rates.least_seconds):
        content = time(plain._replace(v_head_dim=plain.head_dim), batch, element_bytes)
        assert (content == time(plain, batch, element_bytes)).all()
        wide = plain._replace(head_dim=2 * plain.head_dim, v_head_dim=2 * v_head_dim)
        mean = plain._replace(head_dim=plain.head_dim + v_head_dim)
        assert time(wide, batch, element_bytes) == pytest.approx(time(mean, batch, element_bytes), rel=SLACK)


@pytest.mark.parametrize("kernel", KERNELS)
@given(rng=draws())
@examples(200)
def test_the_least_that_proofs_count_on(kernel: str, rng: Draws) -> None:
    """The lower bound is at most the time of the call; with a fixed end, a later start never raises the bound."""
    gpu, rates, call, (batch, element_bytes) = attention(rng, kernel)
    starts = sizes(rng) - 1
    for end in (starts[-1] + 1, starts[-1] + rng.choice([0.3, 64, 5000])):
        calls = call(end - starts, starts)
        least, seconds = (time(calls, batch, element_bytes) for time in (rates.least_seconds, rates.seconds))
        assert (least <= seconds * (1 + SLACK)).all()
        assert rises(least[::-1])
        flops = 4.0 * batch * calls.num_attention_heads * calls.head_dim * calls.causal
        assert (least >= flops / gpu.peak_flops["fp16"] * (1 - 1e-9)).all()
    tokens = sizes(rng)
    assert rises(rates.least_seconds(call(tokens, np.full_like(tokens, 7.0)), batch, element_bytes))


# -- links


@given(rng=draws(), num_ranks=st.integers(2, 64))
def test_gathering_takes_more_for_more(rng: Draws, num_ranks: int) -> None:
    rates = any_gather_rates(rng, log(rng, 7, 12))
    nbytes = np.concatenate([[0.0], np.geomspace(1, 1e10, 300)])
    seconds = rates.seconds(nbytes, num_ranks)
    assert rises(seconds)
    assert rises(rates.step_s(nbytes, num_ranks))
    assert rises(np.concatenate([rates.seconds(nbytes[-1:], ranks) for ranks in range(2, 40)]))
    fastest = max(rates.small_bytes_per_s, rates.large_bytes_per_s)
    crossing = (num_ranks - 1) / num_ranks * nbytes
    assert (seconds >= crossing / fastest * (1 - 1e-9)).all()


@given(rng=draws())
def test_short_messages_are_no_slower_end_to_end(rng: Draws) -> None:
    """Total time is at least n / bandwidth and at most latency + n / bandwidth."""
    cluster = any_cluster(rng, 4)
    nbytes = np.concatenate([[0.0], np.geomspace(1, 1e10, 300)])
    for src, dst in ((0, 1), (1, 2), (0, 3)):
        path = cluster.path(src, dst)
        busy_s = path.busy_s(nbytes)
        assert rises(busy_s)
        assert (busy_s >= 0).all()
        end_s, alone_s = busy_s + path.latency_s, nbytes / path.bandwidth_bytes_per_s
        assert (end_s >= alone_s * (1 - SLACK)).all()
        assert (end_s <= (alone_s + path.latency_s) * (1 + SLACK)).all()
        if path.short_bytes_per_s is not None:
            short_s = path.latency_s + nbytes / path.short_bytes_per_s
            assert end_s == pytest.approx(np.maximum(short_s, alone_s), rel=1e-9)


# -- all rates


def everything(rng: Draws, gpu: GpuSpec) -> list[Any]:
    return [
        any_gemm(rng, gpu, shapes=[Product(64, 128), Product(128, 64)]),
        any_eager(rng, gpu),
        rates_of(rng, gpu, rng.choice(["flash", "sdpa", "merged", "measured eager"])),
        any_elementwise(rng, gpu),
        any_gather_rates(rng, log(rng, 7, 12)),
    ]


@given(rng=draws(), factor=FACTORS)
@examples(50)
def test_every_rate_times_k_is_every_time_over_k(rng: Draws, factor: float) -> None:
    gpu = any_gpu(rng)
    gemm, eager, flash, elementwise, gather = everything(rng, gpu)
    tokens, call = sizes(rng), caller(rng)
    shapes = (Product(64, 128), Product(300, 100))
    times: list[Callable[[Any], Array]] = [lambda rates: rates.seconds(tokens, shapes, 2)]
    for prefix in (np.zeros_like(tokens), tokens[::-1]):
        calls = call(tokens, prefix)
        times += [lambda rates, c=calls: rates.seconds(c, 3, 2), lambda rates, c=calls: rates.least_seconds(c, 3, 2)]  # type: ignore[misc]
    for rates, forms in ((gemm, times[:1]), (eager, times[1:]), (flash, times[1:])):
        for form in forms:
            assert form(scale(rates, 1 / factor)) == pytest.approx(form(rates) / factor, rel=1e-9)
    faster = scale(elementwise, 1 / factor)
    assert faster.start_s == pytest.approx(elementwise.start_s / factor)
    for op in ELEMENTWISE_OPS:
        assert faster.bytes_per_s(op) == pytest.approx(elementwise.bytes_per_s(op) * factor)
    nbytes = np.geomspace(1, 1e10, 50)
    assert scale(gather, 1 / factor).seconds(nbytes, 5) == pytest.approx(gather.seconds(nbytes, 5) / factor, rel=1e-9)
