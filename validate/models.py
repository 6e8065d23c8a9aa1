"""Which model types kvrsim describes: `python -m validate.models` rewrites docs/results/support.md.

Each type of transformers with a causal language model is built with the defaults of its configuration. It is read, or
refused with the name of the submodule that kvrsim cannot describe. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.metadata import version

from kvrsim.model.spec import ModelSpec, describe_mixers, describe_parameters
from kvrsim.model.template import model_type_data
from validate.report import RESULTS, fill, table, write_page

PAGE = RESULTS / "support.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """One model type."""

    model_type: str
    model: ModelSpec | None  # None: the type is refused
    reason: str = ""  # reason of the refusal

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the type's row on the page."""
        if self.model is None:
            return self.model_type, f"refused: {self.reason}", "", ""
        origin = "catalogue" if model_type_data(self.model.model_type) is not None else "class"
        notes = "".join(f"; {note}" for note in self.model.approximations)
        parameters = describe_parameters(self.model.num_parameters)
        return self.model_type, origin, parameters, describe_mixers(self.model) + notes


def support(model_type: str) -> Support:
    """Read a type with the defaults of its configuration, and with the values that the defaults lack."""
    from calibrate.catalogue import required_values
    from kvrsim.model.reader import RefusedError, read_class

    fields = {"model_type": model_type, **required_values(model_type)}
    try:
        return Support(model_type=model_type, model=read_class(fields, model_type))
    except RefusedError as error:
        reason = " ".join(str(error).split()).replace("|", "/")[:160]
        by_hand = "; the catalogue describes it by hand" if model_type_data(model_type) is not None else ""
        return Support(model_type=model_type, model=None, reason=f"{reason}{by_hand}")


def page(rows: list[Support]) -> list[str]:
    """Lines of the page."""
    return fill(
        "support",
        version=version("transformers"),
        read=sum(row.model is not None for row in rows),
        count=len(rows),
        types=table(("type", "read from", "parameters", "layers"), [row.cells for row in rows]),
    )


def main() -> None:
    """Rewrite the page."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    from kvrsim.model.reader import causal_types

    rows = [support(model_type) for model_type in causal_types()]
    write_page(PAGE, page(rows))
    print(f"docs/results/support.md: {sum(row.model is not None for row in rows)} of {len(rows)} types read")


if __name__ == "__main__":
    main()
