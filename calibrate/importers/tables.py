"""Three plain layouts of kernel times in ms, each known by its header; half precision, one row one shape.

attention    source,gpu,kernel,q_heads,kv_heads,head_dim,batch,chunk,kv_prefix,ms,std_ms
             std_ms may be empty
layers       gpu,model,num_tokens,num_tensor_parallel_workers,n_embd,n_expanded_embd,n_head,n_kv_head, then in ms
             emb,input_layernorm,attn_pre_proj,attn_rope,attn_post_proj,post_attention_layernorm,mlp_up_proj,mlp_act,
             mlp_down_proj,add, each name ending in _ms
             one decoder layer with a gated MLP, as vidur times it (calibrate.importers.profiled_layer)
collectives  source,gpu,op,gpus,devices_per_node,bytes,ms
             op all_gather (bytes: gathered in all) and send_recv; rows of other collectives are passed over

No column says the dtype: rows count as fp16, which on the GPUs of this kind runs as fast as bf16.
"""

from __future__ import annotations

from calibrate.data.csv import CsvRow, CsvTable, one_line
from calibrate.data.measurement import Layout, Measurement, measured
from calibrate.importers.profiled_layer import SHAPE_COLUMNS, ProfiledLayer
from calibrate.importers.vidur import nodes

_ATTENTION_COLUMNS = (
    *("source", "gpu", "kernel", "q_heads", "kv_heads", "head_dim"),
    *("batch", "chunk", "kv_prefix", "ms", "std_ms"),
)
_LAYER_TIMES = (
    *("emb_ms", "input_layernorm_ms", "attn_pre_proj_ms", "attn_rope_ms", "attn_post_proj_ms"),
    *("post_attention_layernorm_ms", "mlp_up_proj_ms", "mlp_act_ms", "mlp_down_proj_ms", "add_ms"),
)
_LAYER_COLUMNS = ("gpu", "model", *SHAPE_COLUMNS, *_LAYER_TIMES)
_COLLECTIVE_COLUMNS = ("source", "gpu", "op", "gpus", "devices_per_node", "bytes", "ms")
_COLLECTIVES = ("all_gather", "send_recv")
_PASSED_OVER = ("all_reduce", "reduce_scatter", "alltoall", "broadcast")


def _read_attention(table: CsvTable) -> list[Measurement]:
    return [
        measured(
            row,
            operation="attention",
            kernel=row.text("kernel"),
            device=row.text("gpu"),
            dtype="fp16",
            chunk=row.whole("chunk"),
            prefix=row.whole("kv_prefix", minimum=0),
            num_attention_heads=row.whole("q_heads"),
            num_key_value_heads=row.whole("kv_heads"),
            head_dim=row.whole("head_dim"),
            batch=row.whole("batch"),
            median_s=row.number("ms") / 1000,
            spread_s=row.number("std_ms", allow_zero=True) / 1000 if row.has("std_ms") else None,
            source=row.text("source"),
        )
        for row in table.rows
    ]


def _read_layers(table: CsvTable) -> list[Measurement]:
    file = one_line(table.path.name)
    return [operation for row in table.rows for operation in _layer(row, file)]


def _layer(row: CsvRow, file: str) -> list[Measurement]:
    layer = ProfiledLayer.from_row(row, gated=True, residual_adds=1)
    device, source = row.text("gpu"), f"{file} {row.text('model')}"
    return [
        measured(
            row,
            kernel=name,
            device=device,
            dtype="fp16",
            median_s=row.number(f"{name}_ms") / 1000,
            source=source,
            **fields,
        )
        for name, fields in layer.operations().items()
    ]


def _read_collectives(table: CsvTable) -> list[Measurement]:
    for row in table.rows:
        if row.text("op") not in (*_COLLECTIVES, *_PASSED_OVER):
            raise row.error("op", ", ".join((*_COLLECTIVES, *_PASSED_OVER)))
    return [_collective(row) for row in table.rows if row.text("op") in _COLLECTIVES]


def _collective(row: CsvRow) -> Measurement:
    return measured(
        row,
        operation=row.text("op"),
        kernel="nccl",
        device=row.text("gpu"),
        bytes=row.whole("bytes"),
        ranks=row.whole("gpus"),
        nodes=nodes(row, "gpus"),
        median_s=row.number("ms") / 1000,
        source=row.text("source"),
    )


LAYOUTS = (
    Layout(name="attention table", signature=_ATTENTION_COLUMNS, read=_read_attention),
    Layout(name="layer table", signature=_LAYER_COLUMNS, read=_read_layers),
    Layout(name="collectives table", signature=_COLLECTIVE_COLUMNS, read=_read_collectives),
)
