"""Options of the commands whose work other processes or machines can share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import POOL_BACKENDS
from kvrsim.cli.parsing import parse_choice

if TYPE_CHECKING:
    from planner.processes import Pool

_MOST_JOBS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOptions:
    """Who works, as text; `pool` parses it."""

    jobs: Annotated[
        str | None,
        typer.Option(
            "--jobs",
            metavar="N",
            help="Number of processes. Default: 1; with --backend dask or ray, one per core.",
        ),
    ] = None
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            metavar="|".join(POOL_BACKENDS),
            help="Backend of joblib; loky runs processes of this machine.",
        ),
    ] = "loky"
    dask_address: Annotated[
        str | None,
        typer.Option("--dask-address", metavar="ADDRESS", help="A Dask scheduler. Default: start a local cluster."),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether any of them was."""
        return self != type(self)()

    def pool(self) -> Pool:
        """The workers; InputError names the option."""
        from kvrsim.units import parse_count
        from planner.processes import Pool, cores

        parse_choice(self.backend, "backend", POOL_BACKENDS)
        if self.jobs is not None:
            number = parse_count(self.jobs, "jobs", maximum=_MOST_JOBS)
        else:
            number = 1 if self._alone and self.backend == "loky" else cores()
        return Pool(jobs=number, backend=self.backend, dask_address=self.dask_address)

    @property
    def _alone(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions(PoolOptions):
    """The same where starting processes always pays."""

    jobs: Annotated[
        str | None, typer.Option("--jobs", metavar="N", help="Number of processes. Default: one per core.")
    ] = None

    @property
    def _alone(self) -> bool:
        return False
