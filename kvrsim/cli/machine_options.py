"""Options of the commands that run models on this machine: `run` and `confirm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvrsim.choices import DEVICES, RANK_BACKENDS, RankBackend
from kvrsim.cli.options import MeasuredOptions, Seed
from kvrsim.cli.parsing import parse_choice, parse_seed
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware

Device = Annotated[str, typer.Option("--device", metavar="|".join(DEVICES), help="Device that computes.")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="|".join(RANK_BACKENDS),
        help="Backend of torch.distributed. Default: nccl where each rank has a GPU, else gloo.",
    ),
]
Threads = Annotated[
    str | None, typer.Option("--threads", metavar="N", help="CPU threads of each rank. Default: the profile's, or 1.")
]
Repeats = Annotated[str, typer.Option("--repeats", metavar="N", help="Measured prefills of each candidate.")]
Warmups = Annotated[
    str, typer.Option("--warmups", metavar="N", help="Unmeasured prefills of each candidate before them.")
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout", metavar="TIME", help="Longest wait of a rank for a message. Default: from the prediction."
    ),
]
SideTraffic = Annotated[
    str | None,
    typer.Option(
        "--side-traffic",
        metavar="SHARE",
        help="Share of the emulated links' time (--link-bandwidth) that other traffic takes, such as 0.3.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareOptions:
    """How ranks run, as text; `hardware` parses it."""

    device: Device = "auto"
    backend: Backend = None
    threads: Threads = None
    repeats: Repeats = "5"
    warmups: Warmups = "1"
    side_traffic: SideTraffic = None
    timeout: Timeout = None
    seed: Seed = "0"

    def hardware(self, options: MeasuredOptions, scenario: Scenario) -> Hardware:
        """The values, with what torch finds on this machine; links are emulated where the user gives them."""
        require_torch()
        from kvrsim.runtime.host import chosen_device
        from kvrsim.units import parse_count, parse_seconds, parse_share
        from planner.confirm.hardware import Hardware

        parse_choice(self.backend, "backend", RANK_BACKENDS)
        emulated = options.link_bandwidth is not None or options.link_latency is not None
        device = chosen_device(self.device)
        if self.backend == "nccl" and (device == "cpu" or emulated):
            raise InputError("backend", self.backend, "gloo, on a CPU and over emulated links")
        return Hardware(
            config=options.model,
            device=device,
            backend=cast("RankBackend | None", self.backend),
            threads=self._threads(scenario, device),
            repeats=parse_count(self.repeats, "repeats", maximum=10_000),
            warmups=parse_count(self.warmups, "warmups", minimum=0, maximum=10_000),
            seed=parse_seed(self.seed),
            emulated=emulated,
            traffic_share=parse_share(self.side_traffic or "0", "side_traffic", below=1),
            timeout_s=None if self.timeout is None else parse_seconds(self.timeout, "timeout"),
        )

    def _threads(self, scenario: Scenario, device: str) -> int:
        """CPU threads of a rank: by default as many as when the profile was measured."""
        from kvrsim.units import parse_count

        if self.threads is not None:
            return parse_count(self.threads, "threads", maximum=1024)
        profile = scenario.profile
        measured = profile.cluster if profile is not None else None
        return measured.gpu.num_sms if device == "cpu" and measured is not None else 1


def require_torch() -> None:
    """InputError where torch or transformers is not installed."""
    from importlib.util import find_spec

    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            accepted = "torch and transformers, by pip install '.[hardware]' in a checkout of kvrsim"
            raise InputError(name, "no such module", accepted)
