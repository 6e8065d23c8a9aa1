"""Fit the shipped profiles of serving engines again: `python -m calibrate.shipped.recipes [NAME ...] --vidur CLONE`.

recipes.json lists the sources of each profile and the operations taken from each. NVIDIA's tables come from the
package aisimulate (installed, a wheel or its folder), vidur's files from the history of a git clone. The command
writes kvrsim/data/profiles/NAME.json, and the errors of each operation in build/profiles/NAME.json.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated, Any

from calibrate.data import OPERATIONS, Measurement
from calibrate.fit.attention import fit_latent_section
from calibrate.fit.experts import fit_experts_section
from calibrate.fit.fit import FitResult
from calibrate.fit.gemm import builtin_shapes, fit_types_section
from calibrate.fit.profile import ElementwiseAssumption, FitChoices, FitReport, Label, fit_profile
from calibrate.fit.recurrence import fit_recurrence_section
from calibrate.fit.sparse import fit_sparse_section
from calibrate.importers import read_source
from kvrsim.engine import PRIOR_ENGINE
from kvrsim.errors import InputError, KvrsimError
from kvrsim.hardware import load_gpu, load_link
from kvrsim.io.schema import JsonObject, Range, read, write_json
from kvrsim.kernels.profile import OPERATION_KINDS, CalibrationProfile

VIDUR_URL = "https://github.com/microsoft/vidur"
_VIDUR_FILE = re.compile(r"vidur@([0-9a-f]{7,40}):([^?]+)((?:\?.*)?)")
_UNFILLED = re.compile(r"aisimulate:(?:.*:)?[^/:]+/vllm\b")
_RECIPES = Path(__file__).with_suffix(".json")
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeTable:
    """A source, and the operations that a recipe takes from it."""

    source: str
    operations: tuple[str, ...]  # some of OPERATIONS

    def __post_init__(self) -> None:
        for operation in self.operations:
            if operation not in OPERATIONS:
                raise InputError("operations", operation, ", ".join(OPERATIONS))
        if "gemm" in self.operations and _UNFILLED.match(self.source):
            raise InputError("source", self.source, "for gemm a table of random data (sglang, trtllm)")

    def rows(self, vidur: Path) -> list[Measurement]:
        """The rows of the operations; `vidur`: a clone of microsoft/vidur."""
        return [row for row in read_public(self.source, vidur) if row.operation in self.operations]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The sources and settings of one shipped profile."""

    gpu: str
    link: str
    attention_kernel: str
    description: str
    not_covered: str
    sources: tuple[RecipeTable, ...]
    compare: tuple[RecipeTable, ...] = ()  # other tables of the GPU, which are not fitted
    hidden_size: tuple[int, int] | None = None
    elementwise: ElementwiseAssumption | None = None
    message_sms: Annotated[int, Range(least=0)] = 0
    engine: str = PRIOR_ENGINE
    sections: Mapping[str, Any] = field(default_factory=dict)  # sources by name in SECTIONS

    @classmethod
    def read(cls, name: str, aisimulate: Path | None = None) -> Recipe:
        """Read a recipe. `aisimulate`: wheel or folder; None: the installed package. InputError for an unknown name."""
        if name not in recipe_names():
            raise InputError("NAME", name, ", ".join(recipe_names()))
        text = _RECIPES.read_text("utf-8")
        if aisimulate is not None:
            text = text.replace("aisimulate:", f"aisimulate:{aisimulate}:")
        return read(cls, JsonObject(fields=json.loads(text), where="recipes").child(name))

    def fit(self, name: str, vidur: Path) -> FitReport:
        """Fit the profile; `vidur`: a clone of microsoft/vidur."""
        assumed = "host clock (a dozen launches of 5 us a layer); messages beside computation"
        if self.message_sms > 0:
            assumed += f", which hold {self.message_sms} multiprocessors"
        label = Label(
            name=name,
            description=self.description,
            not_covered=self.not_covered,
            provenance={"command": f"python -m calibrate.shipped.recipes {name} --vidur CLONE", "assumed": assumed},
        )
        choices = FitChoices(
            attention_kernel=self.attention_kernel,
            keep_shapes=builtin_shapes(),
            others=_rows_of(self.compare, vidur),
            hidden_size=self.hidden_size,
            elementwise=self.elementwise,
        )
        profile, report = fit_profile(
            _rows_of(self.sources, vidur),
            label,
            gpu=load_gpu(self.gpu),
            link=load_link(self.link),
            choices=choices,
            argument=name,
        )
        links = replace(profile.links, message_sms=self.message_sms)
        return fit_sections(replace(report, profile=replace(profile, links=links, engine=self.engine)), self.sections)


def _rows_of(tables: Sequence[RecipeTable], vidur: Path) -> list[Measurement]:
    return list(chain.from_iterable(table.rows(vidur) for table in tables))


def read_public(text: str, vidur: Path) -> list[Measurement]:
    """Read one source of a recipe; vidur's files are read from the history of the clone `vidur`."""
    match = _VIDUR_FILE.fullmatch(text)
    if match is None:
        return read_source(text, "recipes")
    commit, path, query = match.groups()
    done = subprocess.run(["git", "-C", str(vidur), "show", f"{commit}:{path}"], capture_output=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.decode("utf-8", "replace").split())
        raise InputError("vidur", vidur, f"a clone of {VIDUR_URL} that has {commit}:{path} ({reason})")
    with TemporaryDirectory() as folder:
        file = Path(folder, commit, path)
        file.parent.mkdir(parents=True)
        file.write_bytes(done.stdout)
        return read_source(f"{file}{query}", "recipes")


SectionFit = Callable[[JsonObject, CalibrationProfile], FitResult[Any]]

# Fits of the sections of a profile's kernels that have their own tables, by field of KernelRates. recipes.json lists
# the sources of each section under "sections".
SECTIONS: Mapping[str, SectionFit] = MappingProxyType(
    {
        "gemm_types": fit_types_section,
        "experts": fit_experts_section,
        "latent": fit_latent_section,
        "sparse": fit_sparse_section,
        "recurrence": fit_recurrence_section,
    }
)


def fit_sections(
    report: FitReport, sections: Mapping[str, Any], fits: Mapping[str, SectionFit] = SECTIONS
) -> FitReport:
    """Fit the sections of a recipe, and return the report with the new profile.

    Raises InputError for an unknown section.
    """
    recipes = JsonObject(fields=sections, where="recipes: sections")
    recipes.only(tuple(fits))
    profile = report.profile
    rates: dict[str, Any] = {}
    operations = dict(profile.operations)
    lines = dict(report.lines)
    for name, fit_section in fits.items():
        if recipes.has(name):
            fit = fit_section(recipes.child(name), profile)
            rates[name] = fit.rates
            operations[name] = fit.operation
            lines[name] = fit.lines()
    profile = replace(
        profile,
        kernels=replace(profile.kernels, **rates),
        operations={kind: operations[kind] for kind in OPERATION_KINDS if kind in operations},
    )
    return replace(report, profile=profile, lines=lines)


def recipe_names() -> tuple[str, ...]:
    """Names of the profiles in recipes.json."""
    return tuple(name for name in JsonObject.read(_RECIPES, "recipes").fields if not name.startswith("_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the named profiles, by default all."""
    parser = ArgumentParser(prog="python -m calibrate.shipped.recipes", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="a profile of calibrate/shipped/recipes.json; default: all"
    )
    parser.add_argument("--vidur", metavar="CLONE", type=Path, required=True, help=f"a clone of {VIDUR_URL}")
    parser.add_argument("--aisimulate", metavar="PLACE", type=Path, help="a wheel or its folder; default: installed")
    options = parser.parse_args(arguments)
    details = _ROOT / "build" / "profiles"
    details.mkdir(parents=True, exist_ok=True)
    try:
        for name in options.names or recipe_names():
            report = Recipe.read(name, options.aisimulate).fit(name, options.vidur)
            report.profile.write(_ROOT / "kvrsim" / "data" / "profiles" / f"{name}.json")
            write_json(details / f"{name}.json", report)
            fits = report.profile.operations
            errors = (f"{kind} {fit.mape:.1%}" for kind, fit in fits.items() if fit.num_rows)
            print(f"{name}: {', '.join(errors)}", file=sys.stderr)
    except KvrsimError as error:
        print(f"calibrate.shipped.recipes: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
