"""Profiling CSVs of vidur (https://github.com/microsoft/vidur, data/profiling, MIT): times in ms, half precision.

compute/GPU/MODEL/mlp.csv        a decoder layer without attention: gemm, norm, rotary, activation, residual, embedding
compute/GPU/MODEL/attention.csv  the prefill rows: attention
network/NETWORK/send_recv.csv    send_recv; the `size` column is in bytes

Times are those of the GPU's kernels, without the launch. With n tensor-parallel workers one worker was timed: it holds
1/n of the heads and of the intermediate size, and all of the hidden size. The files do not name the device: it is the
folder under compute/ or network/, or else the folder of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrate.data import MAX_WHOLE, CsvFormat, CsvTable, Measurement, measurement_at, parse_cells
from kvrsim.io.schema import JsonObject

_ELEMENT_BYTES = 2  # bytes of an fp16 element
_LAYER_COLUMNS = ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head")
_ATTENTION_COLUMNS = ("num_tensor_parallel_workers", "batch_size", "prefill_chunk_size", "kv_cache_size")


def _origin(table: CsvTable) -> dict[str, str]:
    """Device and source from the path after compute/ or network/, else from the folder and the name of the file."""
    parts = table.path.absolute().parts
    starts = [index for index, name in enumerate(parts[:-2]) if name in ("compute", "network")]
    place = parts[starts[-1] :] if starts else parts[-2:]
    device = place[1] if len(place) > 2 else place[0]
    return {"device": _one_line(device), "source": _one_line("vidur " + "/".join(place))}


def _one_line(text: str) -> str:
    """Make a path's text fit into a CSV cell."""
    return "".join(letter if letter.isprintable() else " " for letter in text).strip() or "unknown"


def _read_mlp(table: CsvTable) -> list[Measurement]:
    table.need(("use_gated_mlp", *_LAYER_COLUMNS))
    origin = _origin(table)
    measurements = []
    for row in map(parse_cells, table.rows):
        for name, fields in _layer(row).items():
            times = _times(row, name)
            measurements.append(measurement_at(row.where, kernel=name, dtype="fp16", **origin, **times, **fields))
    return measurements


def _layer(row: JsonObject) -> dict[str, Mapping[str, Any]]:
    """Fields of Measurement, by the profiled column that holds the time.

    From vidur/profiling/mlp/mlp_impl.py: QKV is one product, and so are gate and up. Where attention and MLP run side
    by side (phi) there is no second norm, and `add` times two additions. Bytes assume that a kernel reads its inputs
    and writes its output once. In elements per token: norm and embedding 2 of the hidden size, rotary 2 of Q and K, a
    gated activation 3 of the intermediate size (else 2), an addition 3 of the hidden size.
    """
    tokens, workers, hidden, intermediate, heads, kv_heads = (row.integer(name) for name in _LAYER_COLUMNS)
    if heads % workers or kv_heads % workers or intermediate % workers:
        raise row.error("num_tensor_parallel_workers", "a divisor of n_head, n_kv_head and n_expanded_embd")
    if hidden % heads:
        raise row.error("n_head", "a divisor of n_embd")
    query = heads * (hidden // heads) // workers
    key = kv_heads * (hidden // heads) // workers
    width = intermediate // workers
    up_matrices = 1
    if row.get("use_gated_mlp", bool):
        up_matrices = 2
    is_parallel = not row.has("time_stats.post_attention_layernorm.median")

    def gemm(in_features: int, out_features: int) -> Mapping[str, Any]:
        return dict(operation="gemm", tokens=tokens, in_features=in_features, out_features=out_features)

    def elementwise(operation: str, elements: int) -> Mapping[str, Any]:
        return dict(operation=operation, tokens=tokens, bytes=tokens * elements * _ELEMENT_BYTES)

    norm = elementwise("norm", 2 * hidden)
    layer = {
        "emb": elementwise("embedding", 2 * hidden),
        "input_layernorm": norm,
        "attn_pre_proj": gemm(hidden, query + 2 * key),
        "attn_rope": elementwise("rotary", 2 * (query + key)),
        "attn_post_proj": gemm(query, hidden),
        "post_attention_layernorm": norm,
        "mlp_up_proj": gemm(hidden, up_matrices * width),
        "mlp_act": elementwise("activation", (up_matrices + 1) * width),
        "mlp_down_proj": gemm(width, hidden),
        "add": elementwise("residual", 3 * hidden),
    }
    if is_parallel:
        del layer["post_attention_layernorm"]
        layer["add"] = elementwise("residual", 2 * 3 * hidden)
    return layer


def _read_attention(table: CsvTable) -> list[Measurement]:
    table.need(("n_embd", "n_q_head", "n_kv_head", "is_prefill", *_ATTENTION_COLUMNS))
    origin = _origin(table)
    return [_attention(row, origin) for row in map(parse_cells, table.rows) if row.get("is_prefill", bool)]


def _attention(row: JsonObject, origin: Mapping[str, str]) -> Measurement:
    heads = row.integer("n_q_head")
    kv_heads = row.integer("n_kv_head")
    workers = row.integer("num_tensor_parallel_workers")
    if heads % workers or kv_heads % workers:
        raise row.error("num_tensor_parallel_workers", "a divisor of n_q_head and n_kv_head")
    if row.integer("n_embd") % heads:
        raise row.error("n_q_head", "a divisor of n_embd")
    backend = row.text("attention_backend") if row.has("attention_backend") else "attention"
    return measurement_at(
        row.where,
        operation="attention",
        kernel=backend.removeprefix("AttentionBackend.").lower(),
        dtype="fp16",
        chunk=row.integer("prefill_chunk_size"),
        prefix=row.integer("kv_cache_size", minimum=0),
        num_attention_heads=heads // workers,
        num_key_value_heads=kv_heads // workers,
        head_dim=row.integer("n_embd") // heads,
        batch=row.integer("batch_size"),
        **origin,
        **_times(row, "attn_prefill"),
    )


def _read_send_recv(table: CsvTable) -> list[Measurement]:
    table.need(("num_workers", "size", "devices_per_node"))
    origin = _origin(table)
    measurements = []
    for row in map(parse_cells, table.rows):
        ranks = row.integer("num_workers")
        nodes = 1
        if row.integer("devices_per_node") < ranks:
            nodes = 2
        measurement = measurement_at(
            row.where,
            operation="send_recv",
            kernel="nccl",
            bytes=row.integer("size", maximum=MAX_WHOLE),
            ranks=ranks,
            nodes=nodes,
            **origin,
            **_times(row, "send_recv"),
        )
        measurements.append(measurement)
    return measurements


def _times(row: JsonObject, name: str) -> dict[str, float | None]:
    """Median and standard deviation, in seconds, of the column that vidur calls `name`."""
    times: dict[str, float | None] = {"median_s": row.number(f"time_stats.{name}.median") / 1000, "spread_s": None}
    deviation = f"time_stats.{name}.std"
    if row.has(deviation):
        times["spread_s"] = row.number(deviation, allow_zero=True) / 1000
    return times


LAYOUTS = (
    CsvFormat(name="vidur mlp.csv", signature=("time_stats.mlp_up_proj.median",), read=_read_mlp),
    CsvFormat(name="vidur attention.csv", signature=("time_stats.attn_prefill.median",), read=_read_attention),
    CsvFormat(name="vidur send_recv.csv", signature=("time_stats.send_recv.median",), read=_read_send_recv),
)
