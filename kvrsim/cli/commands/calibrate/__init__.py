"""`kvrsim calibrate`: from this machine, or from published measurements, to a profile."""

from __future__ import annotations

import typer

from kvrsim.cli.commands.calibrate.all import calibrate_all
from kvrsim.cli.commands.calibrate.fit import fit, import_
from kvrsim.cli.commands.calibrate.measure import compute, links
from kvrsim.cli.commands.calibrate.prefills import prefills

app = typer.Typer()


app.command("compute")(compute)
app.command("links")(links)
app.command("all")(calibrate_all)
app.command("fit")(fit)
app.command("import")(import_)
app.command("prefills")(prefills)
