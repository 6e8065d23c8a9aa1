"""PrefillRow: one measured time to first token, and what rows are about where their file does not say."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvrsim.errors import InputError

COLUMNS = ("model", "gpu", "num_gpus", "strategy", "context_len", "batch", "cached_prefix", "dtype", "ttft_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillRow:
    """One measured prefill; None: the file does not say."""

    ttft_s: float  # seconds from the request to its first token
    where: str  # the argument, the file and the line or key, for messages
    model: str | None = None  # built-in name or path of a config.json
    gpu: str | None = None  # name of the GPU, as the user or a datasheet calls it
    num_gpus: int | None = None
    strategy: str | None = None  # as --strategy names one; None after `filled`: see `strategy_name`
    context_len: int | None = None  # tokens of each sequence, the cached prefix included
    batch: int | None = None  # sequences prefilled together
    cached_prefix: int | None = None  # tokens whose K and V were cached
    dtype: str | None = None  # of weights, activations and KV cache; None: the profile's
    likely_model: str | None = None  # built-in model that the name in a benchmark's output seems to mean

    def filled(self, defaults: PrefillDefaults) -> PrefillRow:
        """The same row with what it does not say from the defaults; InputError where both are silent."""
        missing = {name: getattr(defaults, name) for name in COLUMNS[:-1] if getattr(self, name) is None}
        row = replace(self, **missing)
        row = row if row.model else replace(row, model=row.likely_model)
        for name, option in (("model", "model"), ("context_len", "ctx")):
            if getattr(row, name) is None:
                raise InputError(f"{self.where}: {name}", "nothing", f"a value, or one for all rows: `{option}`")
        return row

    @property
    def strategy_name(self) -> str:
        """The row's strategy; without one, tensor parallelism, or a single GPU: what engines do by default."""
        return self.strategy or ("tp" if (self.num_gpus or 1) > 1 else "single")

    @property
    def case(self) -> str:
        """The row in words."""
        gpus = self.num_gpus or 1
        parts = [f"{self.model} {self.context_len} {self.strategy_name} on {gpus} GPU{'s' * (gpus > 1)}"]
        parts += [f"batch {self.batch}"] if (self.batch or 1) > 1 else []
        parts += [f"{self.cached_prefix} cached"] if self.cached_prefix else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillDefaults:
    """What rows are about where their file does not say; None: it has to."""

    model: str | None = None
    gpu: str | None = None
    num_gpus: int | None = 1
    strategy: str | None = None
    context_len: int | None = None
    batch: int | None = 1
    cached_prefix: int | None = 0
    dtype: str | None = None
