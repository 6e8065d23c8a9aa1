"""The wait model of closed-loop users against published benchmarks, and its page.

`python -m validate.closed_loop ROWS.csv` takes rows as `silicon_sample.csv` of NVIDIA AISimulate 0.13 has them: one
mean TTFT per model, GPU, engine, precision, layout and number of users. The runs of a setting with 4 users give its
prefill, and that gives the mean TTFT of more users. Rewrites
docs/results/closed_loop.md. The file is not part of kvrsim.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from calibrate.data import CsvRow, CsvTable
from kvrsim.closed_loop import DISAGGREGATED, HALF_STEP, ClosedLoop, prefill_of_means
from kvrsim.errors import InputError
from validate.report import RESULTS, fill, numbers_table, run_command, write_page

PAGE = RESULTS / "closed_loop.md"
FROM_USERS = 4
TO_USERS = (8, 16, 32)
NOMINAL = 0.9  # mean length over the nominal one: lengths are uniform on 0.8 to 1.0 of it
_LONG = 4096  # nominal tokens of a prompt, from which one prompt fills a step of the engine
# Decode steps that a prompt waits for SGLang, whose launch scripts in that benchmark let it receive in every tenth
# step, and from 16 users on in every thirtieth (--scheduler-recv-interval; InferenceX, benchmarks/single_node).
_POLLED, _POLLED_RARELY, _MANY_USERS = 5.5, 15.5, 16
_RUN = ("id", "concurrency", "silicon_ttft_ms", "silicon_tpot_ms")  # columns that a setting's runs differ in


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One measured mean TTFT."""

    setting: tuple[str, ...]  # all other columns
    engine: str
    prompt_len: int  # nominal tokens
    loop: ClosedLoop
    mean_ttft_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A run of more users, predicted from the runs with few."""

    run: Run
    predicted_s: float

    @property
    def rel_error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.run.mean_ttft_s - 1


def read_runs(path: str | Path) -> list[Run]:
    """Every row. Raises InputError naming the file, the line and the column."""
    table = CsvTable.read(path, "rows")
    table.need([*_RUN, "isl", "osl", "mode", "backend", "system"])
    return [_run(row) for row in table.rows]


def _run(row: CsvRow) -> Run:
    polled = (row.text("backend"), row.text("system")) == ("sglang", "b200_sxm")
    users = row.whole("concurrency")
    polled_steps = _POLLED_RARELY if users >= _MANY_USERS else _POLLED
    return Run(
        setting=tuple(value for name, value in row.values.items() if name not in _RUN),
        engine=row.text("backend"),
        prompt_len=row.whole("isl"),
        loop=ClosedLoop(
            users=users,
            tpot_s=row.number("silicon_tpot_ms") / 1e3,
            output_tokens=NOMINAL * row.whole("osl"),
            prompt_tokens=NOMINAL * row.whole("isl"),
            wait_steps=DISAGGREGATED if row.text("mode") == "disagg" else polled_steps if polled else HALF_STEP,
        ),
        mean_ttft_s=row.number("silicon_ttft_ms") / 1e3,
    )


def checks(runs: Sequence[Run]) -> list[Check]:
    """Every run of TO_USERS whose setting has runs of FROM_USERS, too; its own TPOT is given."""
    known: dict[tuple[str, ...], list[tuple[ClosedLoop, float]]] = {}
    for run in runs:
        if run.loop.users == FROM_USERS:
            known.setdefault(run.setting, []).append((run.loop, run.mean_ttft_s))
    prefills = {setting: prefill_of_means(means) for setting, means in known.items()}
    return [
        Check(run=run, predicted_s=run.loop.mean_ttft_s(prefill_s))
        for run in runs
        if run.loop.users in TO_USERS and (prefill_s := prefills.get(run.setting)) is not None
    ]


def page(found: Sequence[Check], num_rows: int) -> list[str]:
    """Markdown lines."""
    used = [one for one in found if one.run.loop.users != TO_USERS[-1]]
    groups = {
        "all": found,
        "prompts of 8k": [one for one in found if one.run.prompt_len >= _LONG],
        "prompts of 1k": [one for one in found if one.run.prompt_len < _LONG],
    }
    groups |= {engine: [one for one in found if one.run.engine == engine] for engine in _engines(found)}
    rows = (
        (title, users, *_cells([one for one in members if one.run.loop.users == users]))
        for title, members in groups.items()
        for users in TO_USERS
    )
    bare = [replace(one, predicted_s=one.predicted_s * _without_queue(one)) for one in used]
    return fill(
        "closed_loop",
        num_rows=num_rows,
        error=f"{_median(used):.1%}",
        ratio=f"{np.median([1 + one.rel_error for one in used]):.3f}",
        bare=f"{_median(bare):.1%}",
        rows=numbers_table(("runs", "users", "number", "predicted over measured", "median error"), rows),
    )


def _without_queue(one: Check) -> float:
    """What is left of the prediction where the mean is taken for the prefill, as with FROM_USERS."""
    few = replace(one.run.loop, users=FROM_USERS)
    prefill_s = one.run.loop.prefill_s(one.predicted_s)
    return few.mean_ttft_s(prefill_s or 0.0) / one.predicted_s


def _engines(found: Iterable[Check]) -> list[str]:
    return sorted({one.run.engine for one in found})


def _median(found: Iterable[Check]) -> float:
    return float(np.median([abs(one.rel_error) for one in found]))


def _cells(found: Sequence[Check]) -> tuple[object, ...]:
    if not found:
        return 0, "", ""
    return len(found), f"{np.median([1 + one.rel_error for one in found]):.3f}", f"{_median(found):.1%}"


def main() -> None:
    """Rewrite the page."""
    if len(sys.argv) != 2:
        raise InputError("rows", " ".join(sys.argv[1:]) or "nothing", "one CSV file")
    runs = read_runs(sys.argv[1])
    lines = page(checks(runs), len(runs))
    write_page(PAGE, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(run_command(main))
