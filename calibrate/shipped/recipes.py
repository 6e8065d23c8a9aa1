"""Fit the shipped profiles of serving engines anew: `python -m calibrate.shipped.recipes [NAME ...] --tables FOLDER`.

shipped.json beside this file has each profile's recipe: which operations come from which source. The tables of
NVIDIA come from the installed package aiconfigurator-core, the others from CSV files in FOLDER. Written are, in the
checkout, kvrsim/data/profiles/NAME.json, docs/profiles/NAME.md with its picture, and docs/results/profiles.md.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from calibrate.data.measurement import OPERATIONS, Measurement
from calibrate.fit.attention import HeldOut
from calibrate.fit.gemm_rows import builtin_shapes
from calibrate.fit.profile import DEFAULT_HOST, FitChoices, Label, fit_profile
from calibrate.fit.report import FitReport
from calibrate.importers import aiconfigurator, read_source
from calibrate.shipped.page import write_page
from kvrsim.errors import InputError, KvrsimError
from kvrsim.hardware.cluster import load_gpu, load_link
from kvrsim.io.json_text import JsonObject
from kvrsim.profile.profile import CalibrationProfile

_RECIPES = Path(__file__).with_suffix(".json")
_ROOT = Path(__file__).parents[2]
_KEYS = (
    *("gpu", "link", "attention_kernel", "hidden_size", "sources", "held_out"),
    *("description", "not_covered"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What one shipped profile is fitted to."""

    name: str
    data: JsonObject  # as in shipped.json
    tables: Path  # folder of the CSV files

    @classmethod
    def read(cls, name: str, tables: Path) -> Recipe:
        """InputError for a name that has none."""
        known = JsonObject.read(_RECIPES, "recipes")
        if name not in recipe_names():
            raise InputError("NAME", name, ", ".join(recipe_names()))
        data = known.child(name)
        data.only(_KEYS)
        return cls(name=name, data=data, tables=tables)

    def rows(self) -> list[Measurement]:
        """Of each source the operations that it is there for."""
        found = []
        for part in self.data.children("sources"):
            part.only(("source", "operations", "cite"))
            wanted = part.sequence("operations")
            if not set(wanted) <= set(OPERATIONS):
                raise part.error("operations", ", ".join(OPERATIONS))
            found += [_cited(row, part) for row in self._read(part) if row.operation in wanted]
        return found

    def _read(self, part: JsonObject) -> list[Measurement]:
        text = part.text("source")
        place = text if text.startswith(aiconfigurator.PREFIX) else str(self.tables / text)
        return read_source(place, "tables")

    def fit(self) -> tuple[CalibrationProfile, FitReport]:
        """The profile as it ships, and its report."""
        data = self.data
        held_out = None
        if data.has("held_out"):
            part = data.child("held_out")
            held_out = HeldOut(rows=self._read(part), kernel=part.text("kernel"))
        rows = self.rows()
        sizes = [int(size) for size in data.numbers("hidden_size")] if data.has("hidden_size") else []
        return fit_profile(
            rows,
            Label(
                name=self.name,
                description=data.text("description"),
                not_covered=data.text("not_covered"),
                provenance={
                    **({"compared": "; ".join(sorted({row.source for row in held_out.rows}))} if held_out else {}),
                    "command": f"python -m calibrate.shipped.recipes {self.name} --tables FOLDER",
                    "assumed": "host clock (a dozen launches of 5 us a layer); messages beside computation",
                },
            ),
            gpu=load_gpu(data.text("gpu")),
            link=load_link(data.text("link")),
            host=DEFAULT_HOST,
            choices=FitChoices(
                attention_kernel=data.text("attention_kernel"),
                keep_shapes=builtin_shapes(),
                held_out=held_out,
                hidden_size=(sizes[0], sizes[1]) if len(sizes) == 2 else None,
            ),
            argument=self.name,
        )


def _cited(row: Measurement, part: JsonObject) -> Measurement:
    """The row with its publication in the place of its file's name, where the recipe says so."""
    if not part.has("cite"):
        return row
    file = part.text("source").split("?")[0]
    return replace(row, source=row.source.replace(file, part.text("cite")))


def recipe_names() -> tuple[str, ...]:
    """Of the profiles that shipped.json has."""
    return tuple(name for name in JsonObject.read(_RECIPES, "recipes").fields if not name.startswith("_"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write the profiles named, by default all."""
    parser = ArgumentParser(prog="python -m calibrate.shipped.recipes", description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "names", metavar="NAME", nargs="*", help="a profile of calibrate/shipped/recipes.json; default: all"
    )
    parser.add_argument("--tables", metavar="FOLDER", type=Path, required=True, help="where the CSV files are")
    options = parser.parse_args(arguments)
    pages = _ROOT / "docs" / "results" / "profiles"
    try:
        for name in options.names or recipe_names():
            profile, report = Recipe.read(name, options.tables).fit()
            pages.mkdir(parents=True, exist_ok=True)
            profile.write(_ROOT / "kvrsim" / "data" / "profiles" / f"{name}.json")
            report.write(pages / f"{name}.md", picture=f"{name}.png")
            report.plot(pages / f"{name}.png")
            errors = (f"{kind} {fit.mape:.1%}" for kind, fit in profile.operations.items() if fit.num_rows)
            print(f"{name}: {', '.join(errors)}", file=sys.stderr)
        write_page()
    except KvrsimError as error:
        print(f"calibrate.shipped.recipes: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
