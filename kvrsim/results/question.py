"""Question: what an answer is about, with every default filled in, so that it can be asked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.engine.engine import NO_ENGINE
from kvrsim.io.schema import fields_to_json
from kvrsim.units import format_tokens
from kvrsim.version import __version__

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """The scenario's part of a question, and what the command adds to it."""

    model: str
    profile: str
    cluster: str  # its name
    num_gpus: int
    context_len: int  # tokens, the cached prefix included
    batch: int
    cached_prefix: int  # tokens
    prefix_placement: str  # where their K and V lie, as it is asked for
    dtype: str
    quantization: str | None  # how the model's weights are quantised, such as "awq, 4 bits"; None: they are not
    attention: str  # kernel
    memory_fraction: float  # share of each GPU's memory that the prefill may use
    engine: str  # what serves the model; "none": the kernels, and the host that the profile has
    seed: int
    options: tuple[tuple[str, Any], ...] = ()  # what else was asked, plain JSON values by name

    @classmethod
    def of(cls, scenario: Scenario, *, seed: int = 0, **options: Any) -> Question:
        """What a scenario asks; `options`: the command's own, plain JSON values."""
        request, quantization = scenario.request, scenario.model.quantization
        return cls(
            model=scenario.model.name,
            profile=scenario.profile_name,
            cluster=scenario.cluster.name,
            num_gpus=scenario.num_gpus,
            context_len=request.context_len,
            batch=request.batch,
            cached_prefix=request.cached_prefix,
            prefix_placement=scenario.prefix_placement.describe(),
            dtype=request.dtype,
            quantization=None if quantization is None else quantization.describe(),
            attention=scenario.kernel,
            memory_fraction=scenario.memory_fraction,
            engine=scenario.engine_name,
            seed=seed,
            options=tuple(options.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        content = fields_to_json(self)
        del content["options"]
        return content | dict(self.options)

    def header(self) -> dict[str, Any]:
        """What every answer begins with, as plain JSON values."""
        return {"question": self.to_dict(), "version": __version__}

    def request(self) -> str:
        """The request in words: "16k (16384) tokens, 4k (4096) of them cached, batch 2"."""
        return ", ".join((f"{_length(self.context_len)} tokens", *self._about_request(_length)))

    def short(self) -> str:
        """The same for a chart: "16k tokens, 4k of them cached, batch 2"."""
        return ", ".join((f"{format_tokens(self.context_len)} tokens", *self._about_request(format_tokens)))

    def kernels(self) -> tuple[str, ...]:
        """Element type and attention kernel, and the profile, in words."""
        engine = () if self.engine == NO_ENGINE else (f"engine {self.engine}",)
        return f"{self.dtype}, {self.attention} attention", f"profile {self.profile}", *engine

    def _about_request(self, length: Callable[[int], str]) -> Iterator[str]:
        if self.cached_prefix:
            place = "" if self.prefix_placement == "all" else f" ({self.prefix_placement})"
            yield f"{length(self.cached_prefix)} of them cached{place}"
        if self.batch > 1:
            yield f"batch {self.batch}"


def _length(tokens: int) -> str:
    """As it may be written, and as a number where that differs: "16k (16384)"."""
    shown = format_tokens(tokens)
    return shown if shown == str(tokens) else f"{shown} ({tokens})"
