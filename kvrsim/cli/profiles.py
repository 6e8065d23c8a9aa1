"""`kvrsim profiles`: the calibration profiles that ship, and what is in one."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrsim.cli.options import Json, print_json

app = typer.Typer(help="Calibration profiles: what machines were measured to do.")


@app.command("list")
def list_profiles(json: Json = False) -> None:
    """The profiles that ship with kvrsim."""
    from kvrsim.profile import builtin_profiles, load_profile

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
    if json:
        print_json({"profiles": rows})
        return
    from kvrsim.cli.tables import show_profiles

    show_profiles(profiles)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A built-in profile or a file.")],
    json: Json = False,
) -> None:
    """One profile: its rates, where they hold, how well, and where they come from."""
    from kvrsim.profile import load_profile

    profile = load_profile(name, argument="NAME|PATH")
    if json:
        print_json(profile.to_dict())
        return
    from kvrsim.cli.tables import show_tree

    content = profile.to_dict()
    content["kernels"]["gemm"]["measured"] = [
        f"{shape.in_features}→{shape.out_features}: {len(shape.rows)} row counts, {shape.rows[0]} to {shape.rows[-1]}"
        for shape in profile.kernels.gemm.measured
    ]
    show_tree(profile.name, content)
