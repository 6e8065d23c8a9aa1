"""How often NVIDIA's collectors of kernel tables run an operation in a row: github.com/ai-dynamo/aiconfigurator.

collector/helper.py, benchmark_with_power: warm-up runs of a CUDA graph, then timed runs of it, without a pause. A graph
of collect_gemm.py holds the product several times, each with its own matrices: up to 6 times for SGLang and for vLLM
(once for vLLM's fp8_block and nvfp4), and for TensorRT-LLM as often as the weights fit into the L2 cache, at most 5
times. One of collect_attn.py holds one call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from calibrate.data.measurement import Measurement
from kvrsim.kernels.gemm import GEMM_TYPES

# Runs of a graph before and during timing.
_GEMM_RUNS = (3, 6)
_ATTENTION_RUNS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"sglang": (3, 20), "trtllm": (10, 6), "vllm": (3, 6)}
)
_MOST_COPIES = 5  # of TensorRT-LLM's weights
_COPIES = 6  # of SGLang's and vLLM's
_HALF_BYTES = 2

# Of the L2 cache, from NVIDIA's architecture whitepapers and datasheets.
_L2_MIB: Mapping[str, int] = MappingProxyType(
    {
        **{"a100_sxm": 40, "h100_sxm": 50, "h200_sxm": 50, "l40s": 96, "rtx_pro_6000_server": 128},
        **{"b200_sxm": 126, "gb200": 126, "b300_sxm": 126, "gb300": 126},
    }
)


def with_loop(row: Measurement, framework: str, system: str) -> Measurement:
    """The row with its warm-ups and repeats, as far as they are known."""
    if row.operation == "gemm":
        copies = _copies(row, framework, system)
        return row if copies is None else replace(row, warmups=_GEMM_RUNS[0] * copies, repeats=_GEMM_RUNS[1] * copies)
    if row.operation == "attention" and framework in _ATTENTION_RUNS:
        warmups, repeats = _ATTENTION_RUNS[framework]
        return replace(row, warmups=warmups, repeats=repeats)
    return row


def _copies(row: Measurement, framework: str, system: str) -> int | None:
    """Products in one graph; None where that is not known."""
    if framework == "sglang":
        return _COPIES
    if framework == "vllm":
        return 1 if row.dtype in ("fp8_block", "nvfp4") else _COPIES
    if framework != "trtllm" or system not in _L2_MIB:
        return None
    width = GEMM_TYPES.get(row.dtype or "")
    element_bytes = _HALF_BYTES if width is None else math.floor(2 * width.weight) / 2  # without scales
    nbytes = (row.in_features or 1) * (row.out_features or 1) * element_bytes
    return min(_MOST_COPIES, math.ceil(_L2_MIB[system] * 2**20 / nbytes))
