"""Made-up measurements of one machine: rows of every operation with the times of known rates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from calibrate.data import Measurement, Provenance
from calibrate.fit.attention import AttentionRows
from kvrsim.hardware import GpuSpec
from kvrsim.io.schema import JsonObject
from kvrsim.kernels.attention import AttentionRates, BlockedRates, EagerRates
from kvrsim.kernels.elementwise import after_mixer, before_mixer
from kvrsim.model.load import read_config

CONFIG = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}
MODEL = read_config(JsonObject(fields=CONFIG, where="test"), "small")
GPU = {
    "name": "a-cpu",
    "memory_bytes": 8_000_000_000,
    "hbm_bytes_per_s": 20e9,
    "peak_flops": {"fp32": 100e9},
    "num_sms": 1,
    "source": "made up",
}
LINK = {"name": "measured", "bandwidth_bytes_per_s": 2e9, "latency_s": 1e-4, "source": "made up"}
ORIGIN: dict[str, Any] = {
    "gpu": GPU,
    "model": CONFIG,
    "model_name": "small",
    "threads": 1,
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "command": "kvrsim calibrate compute -m small",
    "date": "2026-01-01",
}
LINKS: dict[str, Any] = {"link": LINK, "topology": "bus", "num_gpus": 2, "gpus_per_node": None}
CHUNKS = (64, 128, 256, 512, 1024, 2048)
PREFIXES = (0, 64, 512, 1024, 2048)
BYTES_PER_S = {"norm": 50e9, "rotary": 15e9, "activation": 14e9, "residual": 16e9, "embedding": 6e9}
SDPA = BlockedRates(
    causal_flops_per_s=65e9, rectangle_flops_per_s=56e9, start_s=2e-4, query_s=1e-7, key_block=512, skips_masked=False
)
MERGED = replace(SDPA, rectangle_flops_per_s=60e9, key_block=64, skips_masked=True, join_s=2e-7)
EAGER = EagerRates(flops_per_s=80e9, bytes_per_s=20e9, start_s=1.5e-4)
START_S, COPY, HEAD, REQUEST_S, MASK_S = 1e-5, 12e9, 9e9, 6e-4, 8e-10


def row(operation: str, seconds: float, **fields: Any) -> Measurement:
    """A measurement on a CPU; `fields` replace the defaults."""
    defaults = {"kernel": "torch", "device": "A CPU, 1 thread", "dtype": "fp32", "source": "made up"}
    return Measurement(operation=operation, median_s=float(seconds), **(defaults | fields))


def timed(rows: Sequence[Measurement], seconds: Iterable[float]) -> list[Measurement]:
    """The rows with these median times."""
    return [replace(one, median_s=float(time)) for one, time in zip(rows, seconds, strict=True)]


def attention_rows(rates: AttentionRates, shapes: Iterable[dict[str, int]], **fields: Any) -> list[Measurement]:
    """Attention rows of these shapes; their times follow from the rates."""
    rows = [row("attention", 1.0, **shape, **fields) for shape in shapes]
    return timed(rows, AttentionRows.of(rows).predicted_s(rates))


def cpu() -> GpuSpec:
    spec = Provenance.of([ORIGIN]).gpu
    assert spec is not None
    return spec


def gemm_s(tokens: float, fan_in: int, fan_out: int) -> float:
    """Seconds of a matrix product: nearly proportional to the tokens, slower per token for few tokens."""
    return 2 * tokens * fan_in * fan_out / 80e9 * (1 + 0.3 * math.exp(-tokens / 200)) + 2e-5


def gemm_rows(chunks: tuple[int, ...] = CHUNKS) -> list[Measurement]:
    layer = MODEL.layers[0]
    gemms = (*layer.mixer.projections, *layer.mixer.output, *layer.mlp)
    shapes = {(gemm.in_features, gemm.out_features) for gemm in gemms}
    return [
        row("gemm", gemm_s(chunk, *shape), tokens=chunk, in_features=shape[0], out_features=shape[1])
        for chunk in chunks
        for shape in sorted(shapes)
    ]


def calls(rates: AttentionRates, kernel: str) -> list[Measurement]:
    """Attention rows of the small model."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    shapes = [heads | {"chunk": chunk, "prefix": prefix} for chunk in CHUNKS for prefix in PREFIXES]
    return attention_rows(rates, shapes, kernel=kernel)


def elementwise_rows() -> list[Measurement]:
    before = before_mixer(MODEL, MODEL.layers[0], fused=False)
    after = after_mixer(MODEL, MODEL.layers[0], fused=False, intermediate=1376)
    steps = {step.op: step for step in (*before, *after) if step.op != "copy"}
    rows = []
    for chunk in CHUNKS:
        for op, step in steps.items():
            nbytes = round(step.nbytes * chunk * 2)
            seconds = step.kernels * START_S + nbytes / BYTES_PER_S[op]
            rows.append(row(op, seconds, tokens=chunk, bytes=nbytes))
        nbytes = 4 * chunk * 512 * 2
        rows.append(row("embedding", START_S + nbytes / BYTES_PER_S["embedding"], tokens=chunk, bytes=nbytes))
        nbytes = 2 * chunk * MODEL.layer_cache_bytes(1, 4)
        rows.append(row("cache_append", START_S + nbytes / COPY, chunk=chunk, prefix=0, bytes=nbytes))
    return rows


def prepare_rows() -> list[Measurement]:
    return [
        row("prepare", REQUEST_S + MASK_S * chunk * (chunk + prefix), kernel="sdpa", chunk=chunk, prefix=prefix)
        for chunk in CHUNKS
        for prefix in PREFIXES
    ]


def other_rows() -> list[Measurement]:
    head = row("head", 512 * 32000 * 4 / HEAD, in_features=512, out_features=32000)
    return [*gemm_rows(), *elementwise_rows(), *prepare_rows(), head]


def link_rows() -> list[Measurement]:
    return [
        row("send_recv", 1e-4 + nbytes / 2e9, dtype=None, bytes=nbytes, ranks=2, nodes=1, src=0, dst=1)
        for nbytes in (2**power for power in range(10, 27, 2))
    ]
