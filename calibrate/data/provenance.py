"""Provenance: the machine, model and software that all rows of measurement files have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from calibrate.data.measurement import read_origin
from kvrsim.choices import TOPOLOGIES, Topology
from kvrsim.hardware import Cluster, GpuSpec, LinkSpec
from kvrsim.io.schema import JsonObject
from kvrsim.model.architectures import read_config
from kvrsim.model.spec import ModelSpec

_TABLES = "aiconfigurator:"  # what a source that is no file begins with
_MAX_TEXT = 300  # of a line of provenance
_TOLD = ("command", "date", "threads", "kvrsim", "model_name", "device_state")  # that provenance repeats


def read_origins(sources: Iterable[str], argument: str) -> list[dict[str, Any]]:
    """The origins that the files among some SOURCEs (see calibrate.importers) have."""
    files = (source.partition("?")[0] for source in sources if not source.startswith(_TABLES))
    return [origin for file in files if (origin := read_origin(file, argument)) is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The origins of several files, merged: for each key the value of the first file that has it."""

    data: JsonObject

    @classmethod
    def of(cls, origins: Sequence[Mapping[str, Any]], argument: str = "compute") -> Provenance:
        """From the results of read_origin; may be empty."""
        merged: dict[str, Any] = {}
        for origin in origins:
            merged |= {key: value for key, value in origin.items() if key not in merged}
        return cls(data=JsonObject(fields=merged, where=f"{argument} origin"))

    @property
    def gpu(self) -> GpuSpec | None:
        """The device, as gpus.json has one; InputError for what is not."""
        return GpuSpec.read(self.data.child("gpu")) if self.data.has("gpu") else None

    @property
    def link(self) -> LinkSpec | None:
        """The link, as links.json has one."""
        return LinkSpec.read(self.data.child("link")) if self.data.has("link") else None

    @property
    def is_hugging_face(self) -> bool:
        """Whether layers of a Hugging Face model were timed."""
        return self.data.has("model")

    @property
    def model(self) -> ModelSpec | None:
        """The model whose layers were timed."""
        if not self.data.has("model"):
            return None
        name = self.data.text("model_name", "measured model")
        return read_config(JsonObject(fields=self.data.child("model").fields, where=f"{self.data.where}: model"), name)

    def cluster(self, name: str, gpu: GpuSpec, link: LinkSpec, ranks: int) -> Cluster | None:
        """The measured machine, with at least so many ranks; None where the files do not describe it."""
        if self.gpu is None or self.gpu.name != gpu.name:
            return None
        topology = self._topology()
        return Cluster(
            name=name,
            gpu=gpu,
            num_gpus=max(ranks, self.data.integer("num_gpus", 1)),
            link=link,
            topology=topology,
            gpus_per_node=self.data.integer("gpus_per_node") if topology == "nodes" else None,
            network=LinkSpec.read(self.data.child("network")) if topology == "nodes" else None,
        )

    def _topology(self) -> Topology:
        if not self.data.has("topology"):
            return "switch"
        found = next((known for known in TOPOLOGIES if known == self.data.text("topology")), None)
        if found is None:
            raise self.data.error("topology", ", ".join(TOPOLOGIES))
        return found

    def provenance(self) -> dict[str, str]:
        """Versions, threads, command and date, as text."""
        return dict(self._told())

    def _told(self) -> Iterator[tuple[str, str]]:
        versions = self.data.fields.get("versions")
        if isinstance(versions, Mapping) and versions:
            yield "versions", _text(", ".join(f"{name} {value}" for name, value in versions.items()))
        for key in _TOLD:
            if self.data.has(key):
                yield f"measured: {key}", _text(self.data.fields[key])


def _text(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text[:_MAX_TEXT] or "nothing"
