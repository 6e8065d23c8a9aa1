"""Latent attention in NVIDIA's tables: systems/data/SYSTEM/mla/FRAMEWORK/VERSION/context_mla_perf.parquet.

One call of a prefill without a prefix, between its products: isl tokens of each of batch_size sequences, num_heads
heads on the GPU, BF16. Collectors differ in what they run (github.com/ai-dynamo/aiconfigurator,
collector/*/collect_mla.py): TensorRT-LLM expanded heads, and SGLang on Blackwell; SGLang elsewhere latents, to which
all heads attend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from calibrate.data.measurement import Measurement
from calibrate.importers.tables import merge_rows, read_table

LatentForm = Literal["expanded", "absorbed"]
# Width of keys and of values of DeepSeek-V3, in either form.
WIDTHS: dict[LatentForm, tuple[int, int]] = {"expanded": (192, 128), "absorbed": (576, 512)}
_SHAPE = ["batch_size", "isl", "step", "num_heads"]


def mean_head_dim(form: LatentForm) -> int:
    """Of keys and values, as AttentionCall has it."""
    return sum(WIDTHS[form]) // 2


def read_latent(
    text: str, form: LatentForm, argument: str = "measurements", root: Path | None = None
) -> list[Measurement]:
    """Calls with a BF16 cache, as attention with heads of the mean width.

    `text`: aiconfigurator:SYSTEM/FRAMEWORK[/VERSION]; `form`: what its collector ran; `root` as of read_aiconfigurator.
    Raises InputError as read_table does.
    """
    texts = ["kernel_source", "mla_dtype", "kv_cache_dtype"]
    frame, source = read_table(text, "mla", "context_mla_perf.parquet", _SHAPE, texts, argument=argument, root=root)
    frame = frame[(frame["mla_dtype"] == "bfloat16") & (frame["kv_cache_dtype"] == "bfloat16")]
    return [
        Measurement(
            operation="attention",
            kernel=f"{form} {kernel}",
            device=device,
            dtype="bf16",
            chunk=chunk,
            prefix=prefix,
            num_attention_heads=heads,
            num_key_value_heads=heads if form == "expanded" else 1,
            head_dim=mean_head_dim(form),
            batch=batch,
            source=source,
            median_s=times["median_s"] or 0.0,
            spread_s=times["spread_s"],
        )
        for (device, kernel, batch, chunk, prefix, heads), times in merge_rows(frame, _SHAPE)
    ]
