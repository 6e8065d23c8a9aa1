"""`kvrsim.confirm`: what the facade hands on."""

from __future__ import annotations

from os import PathLike
from typing import Any

from kvrsim.arguments import checked
from kvrsim.profile.profile import CalibrationProfile
from planner.confirm.result import Confirmation


@checked()
def confirm(
    *,
    ctx: int | str,
    model: str | PathLike[str],
    profile: str | PathLike[str] | CalibrationProfile,
    gpus: int | str = 2,
    top: int = 3,
    virtual: bool | None = None,
    hardware: dict[str, Any] | None = None,
    **scenario: Any,
) -> Confirmation:
    """Run a plan's candidates on this machine, interleaved, and say how far the plan was off.

    profile: of this machine, as `kvrsim calibrate all` makes one.
    top: partitions: the plan's, and the top - 1 best further ones.
    virtual: replay all ranks on one device, messages modelled; None: where there are too few devices.
    hardware: device, backend, threads, repeats and the other fields of planner.confirm.hardware.Hardware.
    scenario: the other arguments of make_scenario; links given here are emulated.

    It starts processes: a script needs `if __name__ == "__main__"`. Raises InputError naming the
    parameter, and RankError where a rank fails.
    """
    from kvrsim.setup import make_scenario
    from planner.confirm.confirm import confirm as run
    from planner.confirm.hardware import Hardware

    asked, warnings = make_scenario(ctx=ctx, gpus=gpus, model=model, profile=profile, **scenario)
    emulated = scenario.get("link_bandwidth") is not None or scenario.get("link_latency") is not None
    told: dict[str, Any] = {"config": str(model), "emulated": emulated} | (hardware or {})
    here = Hardware(**told)
    return run(asked, here, top=top, virtual=virtual, warnings=warnings)
