"""Profiling CSVs of vidur (https://github.com/microsoft/vidur, data/profiling, MIT): times in ms, half precision.

compute/GPU/MODEL/mlp.csv        a decoder layer without attention: gemm, norm, rotary, activation, residual, embedding
compute/GPU/MODEL/attention.csv  the prefill rows: attention
network/NETWORK/send_recv.csv    send_recv; the `size` column is in bytes

Times are those of the GPU's kernels, without the launch. With n tensor-parallel workers one worker was timed, which
holds 1/n of the heads. The device is the folder under compute/ or network/, which the files themselves do not say;
elsewhere it is the folder that the file lies in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calibrate.data import CsvRow, CsvTable, Layout, Measurement, measured, one_line


def _place(table: CsvTable) -> tuple[str, ...]:
    """The file's path from compute/ or network/ on, which names device and model; else its folder and its name."""
    parts = table.path.absolute().parts
    starts = [index for index, name in enumerate(parts[:-2]) if name in ("compute", "network")]
    return parts[starts[-1] :] if starts else parts[-2:]


def _device(table: CsvTable) -> str:
    place = _place(table)
    return one_line(place[1] if len(place) > 2 else place[0])


def _source(table: CsvTable) -> str:
    return one_line("vidur " + "/".join(_place(table)))


def _read_mlp(table: CsvTable) -> list[Measurement]:
    table.need(("use_gated_mlp", *SHAPE_COLUMNS))
    device, source = _device(table), _source(table)
    rows = []
    for row in table.rows:
        # Where attention and MLP run side by side (phi) there is no second norm, and `add` times two additions.
        adds = 2 if not row.has("time_stats.post_attention_layernorm.median") else 1
        layer = ProfiledLayer.from_row(row, gated=row.flag("use_gated_mlp"), residual_adds=adds)
        for name, fields in layer.operations().items():
            if name == "post_attention_layernorm" and adds == 2:
                continue
            times = _times(row, name)
            rows.append(measured(row, kernel=name, device=device, dtype="fp16", source=source, **times, **fields))
    return rows


def _read_attention(table: CsvTable) -> list[Measurement]:
    counts = ("num_tensor_parallel_workers", "batch_size", "prefill_chunk_size", "kv_cache_size")
    table.need(("n_embd", "n_q_head", "n_kv_head", "is_prefill", *counts))
    device, source = _device(table), _source(table)
    return [_attention(row, device, source) for row in table.rows if row.flag("is_prefill")]


def _attention(row: CsvRow, device: str, source: str) -> Measurement:
    heads, kv_heads, workers = (row.whole(name) for name in ("n_q_head", "n_kv_head", "num_tensor_parallel_workers"))
    if heads % workers or kv_heads % workers:
        raise row.error("num_tensor_parallel_workers", "a divisor of n_q_head and n_kv_head")
    if row.whole("n_embd") % heads:
        raise row.error("n_q_head", "a divisor of n_embd")
    backend = row.text("attention_backend") if row.has("attention_backend") else "attention"
    return measured(
        row,
        operation="attention",
        kernel=backend.removeprefix("AttentionBackend.").lower(),
        device=device,
        dtype="fp16",
        chunk=row.whole("prefill_chunk_size"),
        prefix=row.whole("kv_cache_size", minimum=0),
        num_attention_heads=heads // workers,
        num_key_value_heads=kv_heads // workers,
        head_dim=row.whole("n_embd") // heads,
        batch=row.whole("batch_size"),
        source=source,
        **_times(row, "attn_prefill"),
    )


def _read_send_recv(table: CsvTable) -> list[Measurement]:
    table.need(("num_workers", "size", "devices_per_node"))
    device, source = _device(table), _source(table)
    return [
        measured(
            row,
            operation="send_recv",
            kernel="nccl",
            device=device,
            bytes=row.whole("size"),
            ranks=row.whole("num_workers"),
            nodes=nodes(row, "num_workers"),
            source=source,
            **_times(row, "send_recv"),
        )
        for row in table.rows
    ]


def nodes(row: CsvRow, ranks_column: str) -> int:
    """1 where all ranks are in one node, else 2."""
    return 1 if row.whole("devices_per_node") >= row.whole(ranks_column) else 2


def _times(row: CsvRow, name: str) -> dict[str, float | None]:
    """Median and standard deviation in seconds of what vidur calls `name`."""
    deviation = f"time_stats.{name}.std"
    return {
        "median_s": row.number(f"time_stats.{name}.median") / 1000,
        "spread_s": row.number(deviation, allow_zero=True) / 1000 if row.has(deviation) else None,
    }


def _layout(name: str, column: str, read: Callable[[CsvTable], list[Measurement]]) -> Layout:
    return Layout(name=f"vidur {name}", signature=(f"time_stats.{column}.median",), read=read)


LAYOUTS = (
    _layout("mlp.csv", "mlp_up_proj", _read_mlp),
    _layout("attention.csv", "attn_prefill", _read_attention),
    _layout("send_recv.csv", "send_recv", _read_send_recv),
    # Known, so that the complaint is about what it holds: no strategy here has an all-reduce.
    _layout("all_reduce.csv", "all_reduce", lambda table: []),
)


# -- ProfiledLayer: what the columns of a decoder layer's profile time, as vidur takes it.
#
# Read from vidur/profiling/mlp/mlp_impl.py: QKV is one product, and so are gate and up; with n tensor-parallel workers
# one worker is timed, which holds 1/n of the heads and of the intermediate size, and all of the hidden size. Bytes are
# counted plainly, two an element: a kernel reads its inputs and writes its output once. For one token these are, in
# elements: norm and embedding 2 of the hidden size, rotary 2 of Q and K, a gated activation 3 of the intermediate size
# (else 2), an addition 3 of the hidden size.

ELEMENT_BYTES = 2  # fp16
SHAPE_COLUMNS = ("num_tokens", "num_tensor_parallel_workers", "n_embd", "n_expanded_embd", "n_head", "n_kv_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledLayer:
    """The shapes of one profiled decoder layer, of the whole model."""

    tokens: int  # rows
    workers: int  # tensor-parallel workers
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    gated: bool  # whether the MLP has a gate, fused with up
    residual_adds: int  # additions that the `add` column times

    @classmethod
    def from_row(cls, row: CsvRow, *, gated: bool, residual_adds: int) -> ProfiledLayer:
        tokens, workers, hidden, intermediate, heads, kv_heads = (row.whole(name) for name in SHAPE_COLUMNS)
        if heads % workers or kv_heads % workers or intermediate % workers:
            raise row.error("num_tensor_parallel_workers", "a divisor of n_head, n_kv_head and n_expanded_embd")
        if hidden % heads:
            raise row.error("n_head", "a divisor of n_embd")
        return cls(
            tokens=tokens,
            workers=workers,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            gated=gated,
            residual_adds=residual_adds,
        )

    def operations(self) -> dict[str, dict[str, Any]]:
        """By the name of the profiled column what it timed: fields of Measurement."""
        head_dim = self.hidden_size // self.num_attention_heads
        q_width = self.num_attention_heads * head_dim // self.workers
        kv_width = self.num_key_value_heads * head_dim // self.workers
        width = self.intermediate_size // self.workers
        fused = 2 if self.gated else 1
        norm = self._elementwise("norm", 2 * self.hidden_size)
        return {
            "emb": self._elementwise("embedding", 2 * self.hidden_size),
            "input_layernorm": norm,
            "attn_pre_proj": self._gemm(self.hidden_size, q_width + 2 * kv_width),
            "attn_rope": self._elementwise("rotary", 2 * (q_width + kv_width)),
            "attn_post_proj": self._gemm(q_width, self.hidden_size),
            "post_attention_layernorm": norm,
            "mlp_up_proj": self._gemm(self.hidden_size, fused * width),
            "mlp_act": self._elementwise("activation", (fused + 1) * width),
            "mlp_down_proj": self._gemm(width, self.hidden_size),
            "add": self._elementwise("residual", 3 * self.residual_adds * self.hidden_size),
        }

    def _gemm(self, in_features: int, out_features: int) -> dict[str, Any]:
        return dict(operation="gemm", tokens=self.tokens, in_features=in_features, out_features=out_features)

    def _elementwise(self, operation: str, elements: int) -> dict[str, Any]:
        """`elements`: read and written for one token."""
        return dict(operation=operation, tokens=self.tokens, bytes=self.tokens * elements * ELEMENT_BYTES)
