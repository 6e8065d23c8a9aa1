"""The package's estimates as they are stored: validate/data/estimates.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvrsim.io.files import write_atomically
from validate.estimates.cases import FRAMEWORKS, Case, Framework, cases
from validate.estimates.matrices import MODELS, package_weights
from validate.estimates.package import DISTRIBUTION, estimate, installed_version

STORED = Path(__file__).parents[1] / "data" / "estimates.json"
_ABOUT = (
    "Prefills on eight GPUs, batch 1, as {package} (Apache-2.0) estimates them on a CPU from its tables of measured"
    " kernels: EngineHandle.compile with tp_size 8 and moe_tp_size or moe_ep_size 8, evaluate_context_ops of each"
    " operation; microseconds, null where its tables lack the operation. Names that begin with divided: are what it"
    " falls back to for the operation before them. weights: that a token meets on one GPU in products and in experts."
    " Estimates, not measurements. python -m validate.estimates --package writes this file."
)
Key = tuple[str, str, str, int, str]  # model, system, experts, tokens, framework


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """Seconds by the package's names of operations, see estimate; None: its tables lack the operation."""

    version: str  # of the package
    seconds: Mapping[Key, Mapping[str, float | None]]
    weights: Mapping[str, tuple[float, float]]  # by kvrsim's name of a model, see matrices.Weights

    @classmethod
    def from_package(cls) -> Estimates:
        """All cases, asked of the installed package; InputError without it."""
        version = installed_version()
        asked = [(case, framework) for case in cases() for framework in FRAMEWORKS]
        return cls(
            version=version,
            seconds={key_of(*one): estimate(*one) for one in asked},
            weights={model: package_weights(model) for model in MODELS},
        )

    @classmethod
    def read(cls, path: Path = STORED) -> Estimates:
        """As they are stored."""
        data = json.loads(path.read_text("utf-8"))
        rows = {
            (row["model"], row["system"], row["experts"], row["tokens"], row["framework"]): row["us"]
            for row in data["rows"]
        }
        return cls(
            version=data["version"],
            seconds={key: {name: _scaled(value, 1e-6) for name, value in us.items()} for key, us in rows.items()},
            weights={model: (products, experts) for model, (products, experts) in data["weights"].items()},
        )

    def write(self, path: Path = STORED) -> None:
        """One row a line, five digits."""
        lines = []
        for (model, system, experts, tokens, framework), seconds in self.seconds.items():
            us = {name: _rounded(value) for name, value in seconds.items()}
            row = dict(model=model, system=system, experts=experts, tokens=tokens, framework=framework, us=us)
            lines.append(json.dumps(row))
        head = {"_about": _ABOUT.format(package=f"{DISTRIBUTION} {self.version}"), "version": self.version}
        weights = ",\n".join(f"{json.dumps(model)}: {json.dumps(found)}" for model, found in self.weights.items())
        text = json.dumps(head)[:-1] + ', "weights": {\n' + weights + '\n}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"
        write_atomically(path, text.encode(), argument="estimates")

    def of(self, case: Case, framework: Framework) -> Mapping[str, float | None]:
        """One estimate."""
        return self.seconds[key_of(case, framework)]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{1e6 * seconds:.5g}")


def key_of(case: Case, framework: Framework) -> Key:
    """What a row is found by."""
    return case.model.name, case.gpu.system, case.experts, case.tokens, framework
