"""How many products of one table take longer than another's: `python -m calibrate.shipped.slow_cells`.

The rule by which recipes choose between SGLang's and TensorRT-LLM's products of a GPU: of half-precision products of 50
to 500 us, which are timed at the burst clock in both, at most a tenth may take over 15 % longer in SGLang's table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from calibrate.data import Measurement
from calibrate.importers import read_source

SYSTEMS = (
    *("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm", "gb200", "b300_sxm", "gb300", "l40s"),
    "rtx_pro_6000_server",
)
MOST_SLOW = 0.1
_SLOWER = 1.15
_FROM_S, _TO_S = 50e-6, 500e-6
_LEAST_TOKENS = 128


def slow_share(rows: Sequence[Measurement], others: Sequence[Measurement]) -> float:
    """Of the products that both have, the share that takes over 15 % longer in `rows`; NaN without any."""
    own, other = _by_shape(rows), _by_shape(others)
    common = [shape for shape in own.keys() & other.keys() if _FROM_S < other[shape] < _TO_S]
    return float(np.mean([own[shape] > _SLOWER * other[shape] for shape in common])) if common else float("nan")


def _by_shape(rows: Sequence[Measurement]) -> dict[tuple[int | None, ...], float]:
    return {
        (row.tokens, row.in_features, row.out_features): row.median_s
        for row in rows
        if row.operation == "gemm" and row.dtype in ("fp16", "bf16") and (row.tokens or 0) >= _LEAST_TOKENS
    }


def main() -> int:
    """Print the share of each GPU's tables, and whose products are taken."""
    for system in SYSTEMS:
        sglang, trtllm = (read_source(f"aiconfigurator:{system}/{name}") for name in ("sglang", "trtllm"))
        share = slow_share(sglang, trtllm)
        print(f"{system}: {share:.1%} slow, products of {'SGLang' if share <= MOST_SLOW else 'TensorRT-LLM'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
