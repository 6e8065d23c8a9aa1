"""TableSetting: what a table's partitions were searched for, and whether a scenario is that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvrsim.engine import NO_ENGINE
from kvrsim.io.schema import NonNegative, Whole
from kvrsim.scenario import Scenario
from kvrsim.strategies import KVR_S
from kvrsim.units import format_bandwidth, format_seconds

_NO_FIGURES = {
    *("name", "model_type", "max_position_embeddings", "method"),  # of a model
    *("source", "profile", "memory_source", "memory_bytes"),  # of GPUs and links
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSetting:
    """Everything that the entries of a table share."""

    model: str
    profile: str  # its name, or "roofline"
    cluster: str  # its name
    gpu: str
    topology: str
    link: str  # between GPUs; under nodes, inside a node
    link_bandwidth_bytes_per_s: float
    link_latency_s: NonNegative
    attention: str  # kernel
    dtype: str
    batch: int
    cached_prefix: Whole  # tokens
    prefix_placement: str = "all"  # where its K and V lie
    engine: str = NO_ENGINE  # its name, or "none"
    strategy: str = KVR_S.name  # whose partitions were searched
    expert_parallel: str = "off"  # or its imbalance
    fingerprint: str  # of the model's shapes, the profile's rates, the cluster: two that differ predict other times

    @classmethod
    def of(cls, scenario: Scenario, strategy: str = KVR_S.name) -> TableSetting:
        """A scenario's, whatever its number of GPUs and its context; `strategy`: the name of the searched one."""
        cluster, request = scenario.cluster, scenario.request
        return cls(
            model=scenario.model.name,
            profile=scenario.profile_name,
            cluster=cluster.name,
            gpu=cluster.gpu.name,
            topology=cluster.topology,
            link=cluster.link.name,
            link_bandwidth_bytes_per_s=cluster.link.bandwidth_bytes_per_s,
            link_latency_s=cluster.link.latency_s,
            attention=scenario.kernel,
            dtype=request.dtype,
            batch=request.batch,
            cached_prefix=request.cached_prefix,
            prefix_placement=scenario.prefix_placement.describe(),
            engine=scenario.engine_name,
            strategy=strategy,
            expert_parallel=_told(scenario),
            fingerprint=_fingerprint(scenario),
        )

    def differences(self, scenario: Scenario, strategy: str = KVR_S.name) -> list[str]:
        """What the scenario and the strategy have other than the table, in a few words each; empty where all agree."""
        asked, told = TableSetting.of(scenario, strategy)._shown(), []
        for what, made in self._shown().items():
            if made != asked[what]:
                told.append(f"{what} {made}, not {asked[what]}")
        if not told and self.fingerprint != TableSetting.of(scenario).fingerprint:
            told.append("files of the same names with other figures in them, or another version of kvrsim")
        return told

    def _shown(self) -> dict[str, str]:
        link = f"{format_bandwidth(self.link_bandwidth_bytes_per_s)}, {format_seconds(self.link_latency_s)}"
        return {
            "model": self.model,
            "profile": self.profile,
            "cluster": self.cluster,
            "GPU": self.gpu,
            "topology": self.topology,
            "link": f"{self.link} ({link})",
            "engine": self.engine,
            "attention": self.attention,
            "dtype": self.dtype,
            "batch": str(self.batch),
            "cached prefix": str(self.cached_prefix),
            "prefix placement": self.prefix_placement,
            "expert parallelism": self.expert_parallel,
            "strategy": self.strategy,
        }


def _told(scenario: Scenario) -> str:
    """Whether experts are spread, and how unevenly tokens are."""
    if not scenario.expert_parallel:
        return "off"
    imbalance = scenario.expert_imbalance
    return "on, imbalance of a power law" if imbalance is None else f"on, imbalance {imbalance:g}"


def _fingerprint(scenario: Scenario) -> str:
    """A hash of all figures that times depend on, and of nothing else: not of names, dates or citations."""
    return hashlib.sha256(json.dumps(_figures(scenario), sort_keys=True).encode()).hexdigest()[:16]


def _figures(scenario: Scenario) -> dict[str, Any]:
    """Shapes of the model, rates of the profile and of the links, the layout, and the request but for its length."""
    profile, request = scenario.profile, scenario.request
    calibrated = profile and {
        "kernels": _numbers(asdict(profile.kernels)),
        "host": _numbers(asdict(scenario.host)),
        "scale": scenario.kernel_scale,
        "sends": [profile.links.sends, profile.links.sends_over_bus],
    }
    cluster = _numbers(asdict(scenario.cluster.with_num_gpus(1)))
    datasheet = cluster.pop("gpu")
    return {
        "model": _numbers(asdict(scenario.model)),
        "rates": calibrated or datasheet,
        "cluster": cluster,
        "kernel": scenario.kernel,
        **({"experts": _told(scenario)} if scenario.expert_parallel else {}),
        "request": [request.batch, request.cached_prefix, request.dtype],
    }


def _numbers(value: Any) -> Any:
    """The same without what no time depends on; whole numbers and others alike."""
    if isinstance(value, Mapping):
        return {str(key): _numbers(one) for key, one in value.items() if key not in _NO_FIGURES}
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value
