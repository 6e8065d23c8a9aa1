"""Options of the commands that run models on this machine: `run` and `confirm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from kvrsim.cli.options import ScenarioOptions, Seed, parse_choice, parse_seed
from kvrsim.errors import InputError

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.confirm.hardware import Hardware

Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="What computes.")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="gloo|nccl", help="Who carries messages. Default: nccl where each rank has a GPU."
    ),
]
Threads = Annotated[
    str | None, typer.Option("--threads", metavar="N", help="Threads of a rank on a CPU. Default: the profile's, or 1.")
]
Repeats = Annotated[str, typer.Option("--repeats", metavar="N", help="Measured prefills of each candidate.")]
Warmups = Annotated[str, typer.Option("--warmups", metavar="N", help="Prefills of each before them.")]
Timeout = Annotated[
    str | None,
    typer.Option("--timeout", metavar="TIME", help="That a rank waits for a message. Default: by what is predicted."),
]
SideTraffic = Annotated[
    str | None,
    typer.Option(
        "--side-traffic",
        metavar="SHARE",
        help="Others' messages, on emulated links (--link-bandwidth), take this share of their time, such as 0.3.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareOptions:
    """The same as text; `checked` makes values of it."""

    device: Device = "auto"
    backend: Backend = None
    threads: Threads = None
    repeats: Repeats = "5"
    warmups: Warmups = "1"
    side_traffic: SideTraffic = None
    timeout: Timeout = None
    seed: Seed = "0"

    def checked(self, options: ScenarioOptions, scenario: Scenario) -> Hardware:
        """Checked, with what torch finds on this machine; links are emulated where the user gives them."""
        require_torch()
        from kvrsim.runtime.host import chosen_device
        from kvrsim.units import parse_count, parse_seconds, parse_share
        from planner.confirm.hardware import Hardware

        parse_choice(self.backend, "--backend", ("gloo", "nccl"))
        emulated = options.link_bandwidth is not None or options.link_latency is not None
        device = chosen_device(self.device)
        if self.backend == "nccl" and (device == "cpu" or emulated):
            raise InputError("--backend", self.backend, "gloo, on a CPU and over emulated links")
        return Hardware(
            config=options.model,
            device=device,
            backend=cast("Literal['gloo', 'nccl'] | None", self.backend),
            threads=self._threads(scenario, device),
            repeats=parse_count(self.repeats, "--repeats", maximum=10_000),
            warmups=0 if self.warmups == "0" else parse_count(self.warmups, "--warmups", maximum=10_000),
            seed=parse_seed(self.seed),
            emulated=emulated,
            traffic_share=0.0
            if self.side_traffic is None
            else parse_share(self.side_traffic, "--side-traffic", below=1),
            timeout_s=None if self.timeout is None else parse_seconds(self.timeout, "--timeout"),
        )

    def _threads(self, scenario: Scenario, device: str) -> int:
        """As many as the profile's ranks had."""
        from kvrsim.units import parse_count

        if self.threads is not None:
            return parse_count(self.threads, "--threads", maximum=1024)
        profile = scenario.profile
        measured = profile.cluster if profile is not None else None
        return measured.gpu.num_sms if device == "cpu" and measured is not None else 1


def require_torch() -> None:
    """One line where the extra is not installed."""
    from importlib.util import find_spec

    for name in ("torch", "transformers"):
        if find_spec(name) is None:
            accepted = "torch and transformers, by pip install '.[hardware]' in a checkout of kvrsim"
            raise InputError(name, "no such module", accepted)
