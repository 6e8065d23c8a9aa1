"""compare_profiles: typical operations by two profiles, and whether they differ significantly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from calibrate.fit.profile import layer_costs
from kvrsim.kernels.gemm import Product
from kvrsim.kernels.profile import DEVIATES_OF_80_PERCENT, CalibrationProfile, LinkRates
from kvrsim.kernels.sensitivity import Part, WeightedCost
from kvrsim.model.spec import ModelSpec
from kvrsim.program import Array
from kvrsim.units import format_bytes, format_tokens

_MESSAGES = (2**16, 2**20, 2**26)  # bytes
_GATHER_RANKS = 2
_LEAST_CHUNK = 64

Kind = str  # of an operation in a profile


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffRow:
    """One operation by two profiles."""

    operation: str  # in a few words
    a_s: float  # seconds by the first profile
    b_s: float  # by the second
    log_sd: float  # of the logarithm of their ratio, from the errors of both profiles

    @property
    def ratio(self) -> float | None:
        """Of the second to the first; None where the first takes no time."""
        return self.b_s / self.a_s if self.a_s else None

    @property
    def differs(self) -> bool:
        """Whether the ratio lies outside of the 80 % interval that both profiles' own errors leave around 1."""
        if not self.a_s or not self.b_s:
            return self.a_s != self.b_s
        return abs(math.log(self.b_s / self.a_s)) > DEVIATES_OF_80_PERCENT * self.log_sd


def compare_profiles(a: CalibrationProfile, b: CalibrationProfile, model: ModelSpec) -> tuple[DiffRow, ...]:
    """A layer of the model and its parts, logits, messages and what comes once, each by both profiles.

    Chunks are a quarter of the longest context in both valid ranges, at its beginning and at its end; the dtype is the
    first that both have, or else the first of each profile.
    """
    return (*_layers(a, b, model), *_messages(a, b), *_constants(a, b))


def dtypes_of(a: CalibrationProfile, b: CalibrationProfile) -> tuple[str, str]:
    """The dtypes to compare in."""
    common = [dtype for dtype in a.valid.dtypes if dtype in b.valid.dtypes]
    return (common[0], common[0]) if common else (a.valid.dtypes[0], b.valid.dtypes[0])


Parts = list[tuple[Kind, float]]  # seconds of each part


def _layers(a: CalibrationProfile, b: CalibrationProfile, model: ModelSpec) -> Iterator[DiffRow]:
    longest = min(a.valid.context_len[1], b.valid.context_len[1])
    chunk = max(_LEAST_CHUNK, longest // 4)
    kernels = [kernel for kernel in a.attention_kernels if kernel in b.attention_kernels]
    pairs: list[tuple[str | None, str | None]] = [(kernel, kernel) for kernel in kernels] or [(None, None)]
    dtypes = dtypes_of(a, b)
    for kernel_a, kernel_b in pairs:
        names = kernel_a or a.attention_kernels[0], kernel_b or b.attention_kernels[0]
        shown = names[0] if names[0] == names[1] else f"{names[0]} and {names[1]}"
        for prefix in dict.fromkeys((0, max(0, longest - chunk))):
            one, other = (
                _parts(profile, model, name, dtype, chunk, prefix)
                for profile, name, dtype in zip((a, b), names, dtypes, strict=True)
            )
            where = f"{format_tokens(chunk)} tokens behind {format_tokens(prefix)}"
            yield _row(f"layer of {model.name}, {shown}, {where}", (a, one), (b, other))
            for kind, what in (("gemm", "products"), ("attention", "attention"), ("elementwise", "the rest")):
                picked = [[part for part in parts if part[0] == kind] for parts in (one, other)]
                if kind == "attention" or prefix == 0:
                    yield _row(f"- of it {what}", (a, picked[0]), (b, picked[1]))
    heads = [_head_s(profile, model, dtype) for profile, dtype in zip((a, b), dtypes, strict=True)]
    yield _row("logits of one token", (a, [("gemm", heads[0])]), (b, [("gemm", heads[1])]))


class _Products(dict[Part, Array]):
    """Weights that leave matrix products alone."""

    def __missing__(self, part: Part) -> Array:
        return np.ones(1) if part.kind == "gemm" else np.zeros(1)


def _parts(profile: CalibrationProfile, model: ModelSpec, kernel: str, dtype: str, chunk: int, prefix: int) -> Parts:
    """Of a layer: its products, attention, and all else."""
    costs = layer_costs(profile, model, kernel, dtype)
    products = replace(costs, cost=WeightedCost(cost=costs.cost, weights=_Products()))
    tokens, before = np.array([float(chunk)]), np.array([float(prefix)])
    gemm_s, around_s = (_float(one.qkv_s(tokens) + one.output_mlp_s(tokens)) for one in (products, costs))
    attention_s = _float(costs.attention_s(tokens, before))
    rest_s = max(0.0, around_s - gemm_s) + _float(costs.append_s(tokens, before))
    return [("gemm", gemm_s), ("attention", attention_s), ("elementwise", rest_s)]


def _head_s(profile: CalibrationProfile, model: ModelSpec, dtype: str) -> float:
    head = model.lm_head
    costs = layer_costs(profile, model, profile.attention_kernels[0], dtype)
    return _float(costs.cost.head_s(np.ones(1), Product(head.in_features, head.out_features)))


def _messages(a: CalibrationProfile, b: CalibrationProfile) -> Iterator[DiffRow]:
    for nbytes in _MESSAGES:
        times = [[("send_recv", _message_s(profile.links, nbytes))] for profile in (a, b)]
        yield _row(f"message of {format_bytes(nbytes)}", (a, times[0]), (b, times[1]))
    gathers = a.links.gather, b.links.gather
    if gathers[0] is None or gathers[1] is None:
        return
    for nbytes in _MESSAGES:
        size = np.array([float(nbytes)])
        times = [[("all_gather", _float(one.seconds(size, _GATHER_RANKS)))] for one in gathers if one is not None]
        yield _row(f"all-gather of {format_bytes(nbytes)}, {_GATHER_RANKS} ranks", (a, times[0]), (b, times[1]))


def _message_s(links: LinkRates, nbytes: int) -> float:
    """From send to arrival, as in kvrsim.hardware.Path."""
    long_s = nbytes / links.bandwidth_bytes_per_s
    if links.short_bytes_per_s is None:
        return links.latency_s + long_s
    return max(links.latency_s + nbytes / links.short_bytes_per_s, long_s)


def _constants(a: CalibrationProfile, b: CalibrationProfile) -> Iterator[DiffRow]:
    named = {
        "layer_s": "host issuing a layer",
        "kernel_s": "host issuing a kernel",
        "message_s": "host issuing a message",
        "prepare_s": "host before the layers",
        "step_s": "before the layers, in each step",
        "request_s": "before the layers, once a request",
    }
    for key, what in named.items():
        values = [float(getattr(profile.host, key) or 0.0) for profile in (a, b)]
        if any(values):
            yield _row(what, (a, [("host", values[0])]), (b, [("host", values[1])]))


def _row(operation: str, a: tuple[CalibrationProfile, Parts], b: tuple[CalibrationProfile, Parts]) -> DiffRow:
    (a_s, a_sd), (b_s, b_sd) = (_summed(*one) for one in (a, b))
    return DiffRow(operation=operation, a_s=a_s, b_s=b_s, log_sd=math.hypot(a_sd, b_sd))


def _summed(profile: CalibrationProfile, parts: Parts) -> tuple[float, float]:
    """Seconds, and the standard deviation of their logarithm if parts err independently."""
    total = sum(seconds for _, seconds in parts)
    fits = profile.operations
    known = [(seconds, fits[kind].log_sd) for kind, seconds in parts if kind in fits]
    return total, math.hypot(*(seconds / total * log_sd for seconds, log_sd in known)) if total else 0.0


def _float(seconds: Array) -> float:
    return float(seconds[0])
