"""Recurrences in NVIDIA's tables: systems/data/SYSTEM/TABLE/FRAMEWORK/VERSION.

    linear_attention/.../gdn_perf.parquet   the gated delta rule of Qwen3.5: convolution and chunked scan
    kda/.../kda_perf.parquet                Kimi delta attention: three convolutions (of Q, K and V) and chunked scan

Rows of phase `context` are a prefill's: seq_len tokens of each of batch_size sequences, BF16, without a state before
them; heads are those of the GPU. mamba2_perf.parquet holds convolutions and no scan; it is not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from calibrate.importers.tables import merge_rows, read_table
from kvrsim.kernels.recurrence import RecurrenceCall
from kvrsim.program import Array

# By kind: table and file.
TABLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"gated_delta": ("linear_attention", "gdn_perf.parquet"), "kda": ("kda", "kda_perf.parquet")}
)
_COLUMNS = {
    "batch": "batch_size",
    "tokens": "seq_len",
    "num_key_heads": "num_k_heads",
    "key_head_dim": "head_k_dim",
    "num_value_heads": "num_v_heads",
    "value_head_dim": "head_v_dim",
    "conv_kernel": "d_conv",
}
_ELEMENT_BYTES = 2  # BF16
_CONVOLUTION = "causal_conv1d"  # kernels whose name begins so; all others of a prefill are scans


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecurrenceRows:
    """As many measured kernels of one kind of recurrence as the arrays are long."""

    kind: str
    source: str
    kernel: npt.NDArray[Any]  # what ran
    batch: Array
    tokens: Array  # of each sequence
    num_key_heads: Array
    key_head_dim: Array
    num_value_heads: Array
    value_head_dim: Array
    conv_kernel: Array
    seconds: Array

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, some: npt.NDArray[Any]) -> RecurrenceRows:
        """Some of them, by index or mask."""
        names = ("kernel", *_COLUMNS, "seconds")
        return replace(self, **{name: getattr(self, name)[some] for name in names})

    @property
    def is_scan(self) -> npt.NDArray[np.bool_]:
        """Of each row; the others are convolutions."""
        return np.array([not str(name).startswith(_CONVOLUTION) for name in self.kernel], dtype=bool)

    @property
    def arguments(self) -> tuple[RecurrenceCall, Array, int]:
        """What the rates' formulas take: calls, sequences at once, bytes of an element."""
        return self.call, self.batch, _ELEMENT_BYTES

    @property
    def call(self) -> RecurrenceCall:
        """As the rates' formulas take it, which take arrays of shapes as well."""
        queries_keys = 2 * self.num_key_heads * self.key_head_dim
        return RecurrenceCall(
            tokens=self.tokens,
            kind=self.kind,
            num_key_heads=cast(Any, self.num_key_heads),
            num_value_heads=cast(Any, self.num_value_heads),
            key_head_dim=cast(Any, self.key_head_dim),
            value_head_dim=cast(Any, self.value_head_dim),
            conv_channels=cast(Any, queries_keys + self.num_value_heads * self.value_head_dim),
            conv_kernel=cast(Any, self.conv_kernel),
        )


def read_recurrence(text: str, kind: str, argument: str = "measurements", root: Path | None = None) -> RecurrenceRows:
    """The prefill rows of one kind, a key of TABLES; rows of the same shape become one, their median.

    `text`: aiconfigurator:SYSTEM/FRAMEWORK[/VERSION]; `root` as of read_aiconfigurator. Raises InputError as read_table
    does.
    """
    table, file = TABLES[kind]
    shape = list(_COLUMNS.values())
    frame, source = read_table(text, table, file, shape, ["kernel_source", "phase"], argument=argument, root=root)
    rows = [(key, times["median_s"]) for key, times in merge_rows(frame[frame["phase"] == "context"], shape)]
    sizes = np.array([key[2:] for key, _ in rows], dtype=float).reshape(-1, len(shape))
    return RecurrenceRows(
        kind=kind,
        source=source,
        kernel=np.array([key[1] for key, _ in rows], dtype=object),
        seconds=np.array([seconds for _, seconds in rows], dtype=float),
        **dict(zip(_COLUMNS, sizes.T, strict=True)),
    )
