"""Read the flags of a launch as an engine would, and check each against the documented option."""

from __future__ import annotations

from collections.abc import Sequence

from planner.deploy import Deployment
from planner.deploy_engines import deploy_engine

READERS = {"int": int, "float": float, "str": str}


def options(launch: Deployment) -> dict[str, str | None]:
    """Values of a launch's flags; None for a flag without a value."""
    return read_flags(launch.engine, launch.args)


def read_flags(engine: str, given: Sequence[str]) -> dict[str, str | None]:
    """Values of the flags in the arguments that follow the launcher; None for a flag without a value."""
    known, args = deploy_engine(engine).options, list(given)
    if engine != "sglang":
        assert not args.pop(0).startswith("-")  # the argument that names the model
    result: dict[str, str | None] = {}
    while args:
        flag = args.pop(0)
        kind = known[flag]
        assert flag not in result
        result[flag] = None if kind == "flag" else args.pop(0)
        if isinstance(kind, str) and kind != "flag":
            READERS[kind](result[flag])
        elif kind != "flag":
            assert result[flag] in kind
    return result
