"""Options of `kvrsim capacity` about traffic, target and fleet."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvrsim.choices import DECODES, FLEET_OBJECTIVES, ORDERS
from kvrsim.cli.options import PackTokens, Seed
from kvrsim.cli.parsing import parse_seed

if TYPE_CHECKING:
    from kvrsim.scenario import Scenario
    from planner.capacity.request import CapacityRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetOptions:
    """What a fleet is planned for, as text; the fields are the arguments of planner.capacity.request.make_request."""

    requests: Annotated[
        str,
        typer.Option(
            "--requests",
            metavar="FILE|azure:FILE|mooncake:FILE|synthetic:SPEC",
            help="A trace, or random arrivals such as synthetic:poisson,rate=4.",
        ),
    ]
    slo_ttft: Annotated[str, typer.Option("--slo-ttft", metavar="TIME", help="Target TTFT, such as 2s.")]
    percentile: Annotated[
        str,
        typer.Option("--percentile", metavar="P", help="Percentage of requests that must meet the target, up to 100."),
    ] = "99"
    max_gpus: Annotated[
        str | None, typer.Option("--max-gpus", metavar="N", help="Largest fleet to consider. Default: 512.")
    ] = None
    group_sizes: Annotated[
        str | None,
        typer.Option(
            "--group-sizes",
            metavar="N,N,...",
            help="Group sizes to consider. Default: 1,2,4,8 or, where the cluster has nodes, up to two of them.",
        ),
    ] = None
    rate_scale: Annotated[
        str, typer.Option("--rate-scale", metavar="X", help="Multiply the number of requests in the same time.")
    ] = "1"
    price_per_gpu_hour: Annotated[
        str | None,
        typer.Option(
            "--price-per-gpu-hour",
            metavar="USD",
            help="Price of a GPU, one for all or by group size: 1=2.0,2=2.0,4=2.4,8=3.1.",
        ),
    ] = None
    objective: Annotated[
        str, typer.Option("--objective", metavar="|".join(FLEET_OBJECTIVES), help="What to minimise.")
    ] = "gpus"
    decode: Annotated[
        str,
        typer.Option(
            "--decode", metavar="|".join(DECODES), help="Decode on another fleet, or on the last GPU of each group."
        ),
    ] = "separate"
    tpot: Annotated[
        str | None,
        typer.Option(
            "--tpot",
            metavar="TIME",
            help="Time per output token, such as 30ms: the target of the fleet that decodes, or the last GPU's time.",
        ),
    ] = None
    kv_transfer_bandwidth: Annotated[
        str | None,
        typer.Option(
            "--kv-transfer-bandwidth",
            metavar="RATE",
            help="Count the KV-cache's way to the fleet that decodes; of each GPU, such as 50GB/s.",
        ),
    ] = None
    pack_tokens: PackTokens = None
    order: Annotated[
        str,
        typer.Option("--order", metavar="|".join(ORDERS), help="Order of the queue: first come, or fewest new tokens."),
    ] = "first-come"
    replications: Annotated[
        str, typer.Option("--replications", metavar="N", help="Number of independent draws of a synthetic workload.")
    ] = "5"
    sure: Annotated[
        bool,
        typer.Option("--sure", help="Require the upper confidence bound, not only the estimate, to meet the target."),
    ] = False
    uniform_only: Annotated[
        bool, typer.Option("--uniform-only", help="Consider only fleets of equal groups behind one queue.")
    ] = False
    seed: Seed = "0"

    def request(self, scenario: Scenario) -> CapacityRequest:
        """The values, with the requests read; InputError names the option."""
        from planner.capacity.request import make_request

        given = asdict(self) | {"seed": parse_seed(self.seed)}
        return make_request(**given, gpus_per_node=scenario.cluster.gpus_per_node)
