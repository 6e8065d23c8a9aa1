"""The campaign: random questions, their statements checked, a journal, and the page docs/results/statements.md.

    python -m validate.statements                             write the page (about 20 minutes of an idle core)
    python -m validate.statements --questions 5 --kinds best  print the result of a small part; write nothing
    python -m validate.statements --finish FILE...            write the page from journals of parts, such as of --kinds

After an interruption the same command resumes from its journal.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from kvrsim.errors import KvrsimError
from kvrsim.io.journal import Journal, read_results
from validate.report import RESULTS, fill, numbers_table, write_page
from validate.statements import fleets, launches, plans, promises
from validate.statements.claims import Claim, Options, command_of
from validate.statements.questions import draw_plan, draw_tight

QUESTIONS = 200  # questions of each kind of statement
SEED = 20261124
_MOST = 4  # times as many questions are drawn at most, where few make a statement of a kind
Check = Callable[[Any], Iterator[Claim]]


@dataclass(frozen=True, kw_only=True)
class StatementFamily:
    """Kinds of statements that answers to the same questions make."""

    command: str  # kvrsim's command that answers
    draw: Callable[[Generator], dict[str, str]]
    ask: Callable[[Options, Generator], Any]  # options and random numbers -> the case that checks read
    checks: Mapping[str, Check]  # the check of each kind


FAMILIES = {
    "plans": StatementFamily(
        command="plan",
        draw=draw_plan,
        ask=plans.PlannedCase.ask,
        checks={
            "fits": plans.check_fits,
            "best": plans.check_best,
            "tie": plans.check_tie,
            "bound": plans.check_bound,
            "extrapolated": plans.check_extrapolated,
            "promise": promises.check_idle,
            "advice": promises.check_advice,
            "launch": launches.check_launch,
        },
    ),
    "misfits": StatementFamily(
        command="plan", draw=draw_tight, ask=plans.PlannedCase.ask, checks={"nothing fits": plans.check_nothing_fits}
    ),
    "rates": StatementFamily(
        command="plan", draw=promises.draw_rate, ask=plans.PlannedCase.ask, checks={"at rate": promises.check_rate}
    ),
    "noise": StatementFamily(
        command="plan",
        draw=promises.draw_noise,
        ask=plans.PlannedCase.ask,
        checks={"under noise": promises.check_noise},
    ),
    "fleets": StatementFamily(
        command="capacity",
        draw=fleets.draw_fleet,
        ask=fleets.FleetCase.ask,
        checks={
            "percentile": fleets.check_percentile,
            "served share": fleets.check_served_share,
            "price": fleets.check_price,
            "growth": fleets.check_growth,
        },
    ),
}
KINDS = {kind: family for family in FAMILIES.values() for kind in family.checks}


@dataclass(frozen=True, kw_only=True)
class QuestionOutcome:
    """The statements of one question."""

    family: str
    number: int  # number of the question in its family
    command: str
    statements: Mapping[str, int]  # statements by kind
    false: Sequence[Mapping[str, Any]]  # false statements, as fields of Claim
    refusal: str | None = None  # the error that kvrsim answered; None: it answered


def outcome_of(name: str, number: int, seed: int, kinds: Sequence[str]) -> QuestionOutcome:
    """Ask a question of a family, and check its statements of some kinds."""
    family = FAMILIES[name]
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    options = family.draw(rng)
    command = command_of(family.command, options)
    try:
        case = family.ask(options, rng)
    except KvrsimError as error:
        return QuestionOutcome(family=name, number=number, command=command, statements={}, false=(), refusal=str(error))
    claims = [claim for kind in kinds for claim in family.checks[kind](case)]
    return QuestionOutcome(
        family=name,
        number=number,
        command=command,
        statements=dict(Counter(claim.kind for claim in claims)),
        false=[asdict(claim) | {"holds": False} for claim in claims if not claim.holds],
    )


def run(kinds: Sequence[str], questions: int, seed: int, journal: Path) -> list[QuestionOutcome]:
    """Ask until each kind has statements of this many questions; resumes the work in the journal."""
    about = {"kinds": list(kinds), "questions": questions, "seed": seed}
    with Journal(journal, about) as record:
        outcomes = [QuestionOutcome(**result) for result in record.results]
        for name, family in FAMILIES.items():
            done = [outcome for outcome in outcomes if outcome.family == name]
            for number in range(len(done), _MOST * questions):
                wanted = [kind for kind in family.checks if kind in kinds and _asked(done, kind) < questions]
                if not wanted:
                    break
                outcome = outcome_of(name, number, seed, wanted)
                record.append(asdict(outcome))
                done.append(outcome)
                outcomes.append(outcome)
                _report(f"{name} {number + 1}: {sum(map(len, (one.false for one in done)))} false")
    return outcomes


def _asked(outcomes: Sequence[QuestionOutcome], kind: str) -> int:
    """Questions whose answers make statements of a kind."""
    return sum(kind in outcome.statements for outcome in outcomes)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table_of(outcomes: Sequence[QuestionOutcome], kinds: Sequence[str]) -> list[str]:
    """One row per kind: what is checked, against what, questions, statements, false ones."""
    rows = []
    for kind in kinds:
        false = sum(claim["kind"] == kind for outcome in outcomes for claim in outcome.false)
        statements = sum(outcome.statements.get(kind, 0) for outcome in outcomes)
        rows.append((kind, _asked(outcomes, kind), statements, false))
    return numbers_table(("kind", "questions", "statements", "false"), rows)


def false_of(outcomes: Sequence[QuestionOutcome]) -> list[str]:
    """The false statements, each with its command."""
    lines = [
        f"- {claim['kind']}: `{outcome.command}` says: {claim['said']}. Found: {claim['found']}."
        for outcome in outcomes
        for claim in outcome.false
    ]
    return lines or ["None."]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; write the page if all of it ran, else print the result. 1: a statement is false."""
    parser = argparse.ArgumentParser(
        prog="python -m validate.statements", description=(__doc__ or "").split("\n", 1)[0]
    )
    journal = Path("statements.partial")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of statements, with commas between")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--journal", type=Path, default=journal, help="an interrupted campaign resumes from it")
    parser.add_argument("--finish", type=Path, nargs="+", metavar="FILE", help="ask nothing, read these journals")
    parser.add_argument("--commit", help="with --finish, the commit at which the questions were asked, if not this one")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds: got {unknown[0]}, accepted: {', '.join(KINDS)}")
    if options.finish is not None:
        outcomes = [QuestionOutcome(**result) for path in options.finish for result in read_results(path)]
    else:
        try:
            outcomes = run(kinds, options.questions, options.seed, options.journal)
        except KeyboardInterrupt:
            _report(f"interrupted; the same command resumes from {options.journal}")
            return 130
    is_whole = (kinds, options.questions, options.seed) == (list(KINDS), QUESTIONS, SEED)
    if is_whole or options.finish is not None:
        write_page(RESULTS / "statements.md", page(outcomes, kinds, options.commit))
    else:
        print("\n".join([*table_of(outcomes, kinds), *false_of(outcomes)]))
    if options.finish is None:
        options.journal.unlink(missing_ok=True)
    return 1 if any(outcome.false for outcome in outcomes) else 0


def page(outcomes: Sequence[QuestionOutcome], kinds: Sequence[str], commit: str | None) -> list[str]:
    """The page of results; commit: that at which the questions were asked, if it is not this one."""
    asked = "" if commit is None else f" The questions were asked at commit {commit} and shortly after it."
    if any(_asked(outcomes, kind) < QUESTIONS for kind in kinds):
        asked += f" The campaign has not asked all {QUESTIONS} questions of each kind yet."
    refused = Counter(outcome.refusal.partition(":")[0] for outcome in outcomes if outcome.refusal)
    return fill(
        "statements",
        questions=len(outcomes),
        seed=SEED,
        asked=asked,
        table=table_of(outcomes, kinds),
        false=false_of(outcomes),
        refused=", ".join(f"{name} {number}" for name, number in refused.most_common()) or "none",
    )
