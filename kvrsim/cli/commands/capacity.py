"""`kvrsim capacity`: the fleet that a workload needs to meet a TTFT target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from click.exceptions import Exit

from kvrsim.arguments import OF_REQUESTS, BudgetArgs, DeploymentArgs, FleetArgs, Help, StrategyList
from kvrsim.cli.commands.plan import show_deployment
from kvrsim.cli.options import DeployArgs, OutputArgs, PictureOrPagePath, pool_of, with_options
from kvrsim.cli.output import print_answer, write_files
from kvrsim.cli.progress import Progress
from kvrsim.cli.text import Part, Row, facts, header, limit_text, note_rows, rests_on_line
from kvrsim.cli.text import headline as emphasised
from kvrsim.units import format_seconds

if TYPE_CHECKING:
    from planner.capacity.result import CapacityPlan


class AnswerArgs(OutputArgs):
    """What groups may run, and how the answer is printed and drawn."""

    strategies: Annotated[
        StrategyList | None,
        Help(
            "Strategies that groups may run; each group uses its fastest. Default: all that need no long search.",
            metavar="NAME,NAME,...|all",
            section="Question",
        ),
    ] = None
    plot: Annotated[
        PictureOrPagePath | None,
        Help(
            "Draw the fleets by cost and TTFT: FILE.png, FILE.svg, FILE.pdf, or the page FILE.html.",
            metavar="FILE",
            spelling=("--plot", "--html"),
        ),
    ] = None


@with_options(fixed=OF_REQUESTS)
def capacity(
    args: DeploymentArgs, fleet: FleetArgs, workers: BudgetArgs, deploy: DeployArgs, output: AnswerArgs
) -> None:
    """Find the smallest or cheapest fleet for a TTFT target.

    The answer includes the rule that assigns prompts to groups. If no fleet meets the target, the exit code is 1, and
    the nearest miss and the reasons are printed. With --tpot, fleets that prefill and decode on the same GPUs are
    compared with fleets that split them; the TTFT of the latter includes the transfer of the KV cache.

    Example: kvrsim capacity --requests synthetic:poisson,rate=4 --slo-ttft 2s llama-3.1-8b 8xh100
    """
    output.check(emit=deploy.emit)
    from planner.api import capacity_of

    engines = [name for name in (deploy.emit, deploy.only_deployable) if name is not None]
    with pool_of(workers) as pool, Progress() as progress:
        result = capacity_of(
            args,
            fleet,
            strategies=output.strategies,
            engines=engines,
            emit=deploy.emit,
            pool=pool,
            on_progress=progress,
        )
    deployment = None
    if deploy.emit is not None and result.answer is not None:
        from planner.capacity.deployment import fleet_deployment

        deployment = fleet_deployment(result, deploy.emit, model=str(args.model))
    if deployment is not None and not output.json:
        show_deployment(deployment)
    print_answer(output, (deployment or result).to_dict, result.rows, lambda: capacity_screen(result))
    write_files((output.plot, result.write_plot))
    if not result.feasible:
        raise Exit(1)


_SHOWN = 6  # number of fleets shown
_FIRST = (
    "price:",
    "withstands:",
    "clusters:",
    "interval:",
    "TPOT:",
    "prefix cache:",
    "split or not:",
    "engines:",
    "traffic:",
    "serves more:",
    "would meet:",
)  # labels of the details that are next to the answer


def capacity_screen(plan: CapacityPlan) -> list[Part]:
    """Screen of a fleet: the answer, the request, the alternatives, and the basis of the answer."""
    from kvrsim.views.capacity import details, fleet_table, fleet_words, group_table, headline, signature, verdict

    first: list[Row] = [("no answer:", emphasised(verdict(plan)))]
    if plan.feasible:
        first = [("answer:", emphasised(signature(plan))), ("fleet:", fleet_words(plan))]
    first.append(("target:", headline(plan)))
    below: list[Row] = []
    is_served = plan.first.unserved < plan.first.requests
    if is_served:
        for tokens, groups, strategies, requests in group_table(plan).texts():
            times = f"time by strategy: {strategies}"
            first.append(("groups:", f"{tokens} new tokens: {groups}; {times}; {requests} of the requests"))
        for label, line in details(plan):
            row = (f"{label}:", line)
            if row[0] in _FIRST:
                first.append(row)
            else:
                below.append(row)
    table = facts(
        *below,
        *(("why not:", reason) for reason in plan.reasons()),
        ("memory:", limit_text(plan.scenario.memory_limit)),
        *((f"{label}:", plan.assumptions()[label]) for label in ("decoding", "dispatch")),
        ("search:", f"{plan.simulated_requests} requests simulated in {format_seconds(plan.seconds)}"),
        ("rests on:", rests_on_line(plan.question)),
        *note_rows(plan.warnings),
    )
    parts: list[Part] = [facts(*first), ""]
    parts += [*header(plan.question, plan.cluster, f"Fleet for {plan.scenario.model.name}"), ""]
    if is_served:
        fleets = fleet_table(plan)
        fleets.rows = fleets.rows[:_SHOWN]
        fleets.styles = fleets.styles[:_SHOWN]
        parts += [fleets, ""]
    return [*parts, table]
