"""`kvrsim profiles`: the calibration profiles that ship, and what is in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.cli.answers import AnswerOptions
from kvrsim.cli.options import Json, takes
from kvrsim.cli.outputs import print_json

if TYPE_CHECKING:
    from kvrsim.profile.rates.gemm import GemmRates

app = typer.Typer()


@app.command("list")
@takes(AnswerOptions)
def list_profiles(answers: AnswerOptions) -> None:
    """List the built-in profiles.

    Example: kvrsim profiles list
    """
    answers.check()
    from kvrsim.profile.profile import builtin_profiles, load_profile

    profiles = [load_profile(name) for name in builtin_profiles()]
    rows = [
        {
            "name": profile.name,
            "gpu": profile.gpu,
            "attention": list(profile.attention_kernels),
            "mape": profile.residual.mape if profile.residual else None,
            "description": profile.description,
        }
        for profile in profiles
    ]
    if not answers.printed(lambda: {"profiles": rows}, "profiles"):
        from kvrsim.cli.render.catalogue import show_profiles

        show_profiles(profiles)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in profile or a file.")],
    json: Json = False,
) -> None:
    """Print one profile: rates, measured range, errors, sources.

    Example: kvrsim profiles show h100-flash
    """
    from kvrsim.profile.profile import load_profile

    profile = load_profile(name, argument="NAME|PATH")
    if json:
        print_json(profile.to_dict())
        return
    from kvrsim.cli.render.layout import show_tree

    content = profile.to_dict()
    kernels = content["kernels"]
    kernels["gemm"]["measured"] = _shapes(profile.kernels.gemm)
    for kind, rates in profile.kernels.gemm_types.items():
        kernels["gemm_types"][kind]["measured"] = _shapes(rates)
    show_tree(profile.name, content)


def _shapes(rates: GemmRates) -> list[str]:
    """The measured shapes of products, a line each instead of their tables."""
    return [
        f"{shape.in_features}→{shape.out_features}: {len(shape.rows)} row counts, {shape.rows[0]} to {shape.rows[-1]}"
        for shape in rates.measured
    ]


@app.command("diff")
@takes(AnswerOptions)
def diff(
    answers: AnswerOptions,
    a: Annotated[str, typer.Argument(metavar="A", help="A built-in profile or a file.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another profile.")],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME|PATH", help="Model whose layers are compared.")
    ] = "llama-7b",
) -> None:
    """Compare the seconds of typical operations in two profiles.

    Operations that differ significantly are marked.

    Example: kvrsim profiles diff a100-eager a100-flash
    """
    answers.check()
    from calibrate.fit.report import compare_profiles, dtypes_of
    from kvrsim.model.load import load_model
    from kvrsim.profile.profile import load_profile

    first, second = load_profile(a, argument="A"), load_profile(b, argument="B")
    spec = load_model(model)
    rows = compare_profiles(first, second, spec)
    dtypes = dtypes_of(first, second)
    content = {
        "a": first.name,
        "b": second.name,
        "model": spec.name,
        "dtypes": list(dtypes),
        "operations": [
            {
                "operation": row.operation,
                "a_s": row.a_s,
                "b_s": row.b_s,
                "ratio": row.ratio,
                "differs": row.differs,
            }
            for row in rows
        ],
    }
    if answers.printed(lambda: content, "operations"):
        return
    from kvrsim.cli.render.layout import columns, show
    from kvrsim.units import format_seconds

    table = columns("operation")
    columns("A", "B", "B / A", numbers=True, into=table)
    columns("", into=table)
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.operation, format_seconds(row.a_s), format_seconds(row.b_s), ratio, "*" * row.differs)
    names = f"A: {first.name}, {dtypes[0]}, on {first.gpu}; B: {second.name}, {dtypes[1]}, on {second.gpu}"
    show(names, "", table, "", "*: the difference is larger than the 80 % interval of both profiles' errors")
