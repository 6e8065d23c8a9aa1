"""Question: what an answer is about, with every default filled in, so that the answer can be reproduced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvrsim.engine import NO_ENGINE
from kvrsim.io.schema import fields_to_json, to_json
from kvrsim.units import format_tokens
from kvrsim.version import __version__

if TYPE_CHECKING:
    from kvrsim.hardware import Cluster
    from kvrsim.scenario import Scenario

_LINK = ("name", "bandwidth_bytes_per_s", "latency_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A scenario as plain values, and the command's own options."""

    model: str
    profile: str
    cluster: Cluster  # cluster of the GPUs that take part
    num_gpus: int
    context_len: int  # tokens, the cached prefix included
    batch: int
    cached_prefix: int  # tokens of the cached prefix
    prefix_placement: str  # where the prefix's K and V are stored, as the option is written
    dtype: str
    quantization: str | None  # quantisation, such as "awq, 4 bits"; None: not quantised
    attention: str  # attention kernel
    memory_fraction: float  # share of each GPU's memory that the prefill may use
    engine: str  # engine that serves the model; "none": the kernels and the profile's host
    seed: int
    options: tuple[tuple[str, Any], ...] = ()  # the command's own options, plain JSON values by name

    def columns(self) -> dict[str, Any]:
        """What was asked, as scalar cells of a table."""
        link = self.cluster.link
        return {
            "model": self.model,
            "context_len": self.context_len,
            "batch": self.batch,
            "cached_prefix": self.cached_prefix,
            "dtype": self.dtype,
            "num_gpus": self.num_gpus,
            "cluster": self.cluster.name,
            "link": link.name,
            "link_bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
            "link_latency_s": link.latency_s,
            "profile": self.profile,
            "engine": self.engine,
        }

    @classmethod
    def of(cls, scenario: Scenario, *, seed: int = 0, **options: Any) -> Question:
        """Describe a scenario. options: the command's own options, plain JSON values."""
        request = scenario.request
        quantization = scenario.model.quantization
        return cls(
            model=scenario.model.name,
            profile=scenario.profile_name,
            cluster=scenario.cluster,
            num_gpus=scenario.num_gpus,
            context_len=request.context_len,
            batch=request.batch,
            cached_prefix=request.cached_prefix,
            prefix_placement=scenario.prefix_placement.describe(),
            dtype=request.dtype,
            quantization=quantization.describe() if quantization is not None else None,
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
        return content | {"cluster": self._cluster()} | dict(self.options)

    def _cluster(self) -> dict[str, Any]:
        """The cluster's values with the largest effect on times; answers contain the whole cluster."""
        network = self.cluster.network
        content = fields_to_json(self.cluster, "name", "num_gpus", "topology", "gpus_per_node")
        content |= {"gpu": self.cluster.gpu.name, "link": fields_to_json(self.cluster.link, *_LINK), "network": None}
        if network is not None:
            content["network"] = fields_to_json(network, *_LINK)
        return content

    def header(self) -> dict[str, Any]:
        """The first fields of every answer, as plain JSON values."""
        return {"question": self.to_dict(), "version": __version__}

    def measured_header(self, *, predicted: bool) -> dict[str, Any]:
        """First fields of a measurement; without a prediction, cluster, profile and engine are null."""
        content = self.to_dict()
        cluster = None
        if predicted:
            cluster = to_json(self.cluster)
        else:
            content |= dict.fromkeys(("cluster", "profile", "engine", "memory_fraction"))
        return {"question": content, "version": __version__, "cluster": cluster}

    def request(self) -> str:
        """The request in words, without the batch: "16k (16384) tokens, 4k (4096) of them cached"."""
        return ", ".join((f"{_length(self.context_len)} tokens", *self.prefix_text()))

    def prefix_text(self) -> tuple[str, ...]:
        """The cached prefix in words, if there is one: "4k (4096) of them cached"."""
        if not self.cached_prefix:
            return ()
        text = f"{_length(self.cached_prefix)} of them cached"
        if self.prefix_placement != "all":
            text += f" ({self.prefix_placement})"
        return (text,)

    def kernels(self) -> tuple[str, ...]:
        """Element type and attention kernel, the profile and the engine, in words."""
        return f"{self.dtype}, {self.attention} attention", f"profile {self.profile}", *self.engine_text()

    def engine_text(self) -> tuple[str, ...]:
        """The engine in words, if there is one."""
        if self.engine == NO_ENGINE:
            return ()
        return (f"engine {self.engine}",)

    def settings(self) -> tuple[str, ...]:
        """Batch, element type, kernel, seed and version, in words."""
        return f"batch {self.batch}", self.kernels()[0], f"seed {self.seed}", f"kvrsim {__version__}"


def _length(tokens: int) -> str:
    """Format a length as a user writes it, and the number if that differs: "16k (16384)"."""
    text = format_tokens(tokens)
    if text == str(tokens):
        return text
    return f"{text} ({tokens})"
