"""Launches, one behind the other on the same ranks: whole prompts, or packed steps that are filled when rank 0 is free.

Every rank runs the launches in order, as soon as it has done the one before. On links that nobody shares, when ranks
and links are free after a launch depends on when they were free before it by maxima and sums alone: x' = A (x) x in
max-plus algebra. One evaluation from every unit vector gives A; launches then cost a matrix-vector product each. The
largest mean weight of a cycle of A is the time that a launch takes in the long run (Karp, 1978; Baccelli et al.,
Synchronization and Linearity, 1992).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvrsim.executors.batch import BatchEvaluator, Start
from kvrsim.hardware import Cluster
from kvrsim.program import Array, Program
from planner.packing.rule import Begun, PackingRule, Piece
from planner.packing.steps import StepPrograms

_MOST_STATES = 256  # ranks and links, up to which the long run is worked out
_MOST_SUMS = 2e8  # of the matrices of all launches, multiplied


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One launch as a max-plus matrix."""

    matrix: Array  # [i, j]: when i is free again, if j alone were not free before 0; shape (states, states)
    num_ranks: int  # the first states; the others are links

    @classmethod
    def of(cls, program: Program, cluster: Cluster) -> Recurrence:
        """Evaluate the program once, with one column a state."""
        num_ranks = program.num_ranks
        edges = sorted(BatchEvaluator(program, cluster).links_s)
        units = np.where(np.eye(num_ranks + len(edges), dtype=bool), 0.0, -np.inf)
        start = Start(list(units[:num_ranks]), dict(zip(edges, units[num_ranks:], strict=True)))
        end = BatchEvaluator(program, cluster, start=start)
        return cls(np.stack([*end.finish_s, *(end.links_s[edge] for edge in edges)]), num_ranks)

    def run(self, arrivals_s: Sequence[float]) -> tuple[tuple[float, ...], float]:
        """When the last rank has finished each of these launches alike, and when all ranks are done."""
        ranks = Ranks(self.num_ranks)
        tokens = tuple(ranks.launch(self, arrival_s) for arrival_s in arrivals_s)
        return tokens, ranks.done_s


@dataclass(slots=True)
class Ranks:
    """When the ranks and links of a group are free."""

    num_ranks: int
    free_s: Array = field(init=False)

    def __post_init__(self) -> None:
        self.free_s = np.full(self.num_ranks, -np.inf)

    def launch(self, launched: Recurrence, release_s: float) -> float:
        """Run a launch, on each rank from `release_s` on; returns when the last rank has finished it."""
        if len(self.free_s) < len(launched.matrix):
            links = np.full(len(launched.matrix) - len(self.free_s), -np.inf)
            self.free_s = np.concatenate([self.free_s, links])
        self.free_s[: self.num_ranks] = np.maximum(self.free_s[: self.num_ranks], release_s)
        self.free_s = (launched.matrix + self.free_s).max(axis=1)
        return float(self.free_s[self.num_ranks - 1])

    @property
    def first_s(self) -> float:
        """When rank 0 is free."""
        return float(self.free_s[0])

    @property
    def done_s(self) -> float:
        """When all ranks are."""
        return float(self.free_s[: self.num_ranks].max())


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A program that all ranks run, and the prompts in it."""

    release_s: float
    program: Program
    recurrence: Recurrence | None  # None: the event executor ran it
    begins: tuple[int, ...]  # prompts whose first piece it holds
    ends: tuple[int, ...]  # prompts whose first token comes with it
    tokens: int  # new tokens in it
    prompts: int = 1  # that have tokens in it


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Prompts that were served, in the order of their arrival."""

    launches: tuple[Launch, ...]
    begin_s: tuple[float, ...]  # when rank 0 began each prompt
    first_token_s: tuple[float, ...]
    end_s: float  # when all ranks are done


class Recurrences:
    """Matrices of programs, each made once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.known: dict[Hashable, tuple[Program, Recurrence]] = {}

    def of(self, key: Hashable, make: Callable[[], Program]) -> tuple[Program, Recurrence]:
        """The program under that key, and its matrix."""
        if key not in self.known:
            program = make()
            self.known[key] = program, Recurrence.of(program, self.cluster)
        return self.known[key]


def serve_packed(programs: StepPrograms, rule: PackingRule, arrivals_s: Sequence[float]) -> Served:
    """Serve prompts in packed steps; a step is filled when rank 0 is free, with what has come by then."""
    known = Recurrences(programs.scenario.cluster)
    ranks = Ranks(programs.scenario.cluster.num_gpus)
    waiting: deque[int] = deque()
    begun: Begun | None = None
    launches: list[Launch] = []
    begin_s, token_s = [0.0] * len(arrivals_s), [0.0] * len(arrivals_s)
    come = 0
    while come < len(arrivals_s) or waiting or begun is not None:
        now = ranks.first_s
        if not waiting and begun is None:
            now = max(now, arrivals_s[come])
        while come < len(arrivals_s) and arrivals_s[come] <= now:
            waiting.append(come)
            come += 1
        pieces, begun = rule.step(begun, lambda: waiting[0] if waiting else None, waiting.popleft)
        program, recurrence = known.of(_key(pieces), lambda pieces=pieces: programs.of(pieces))  # type: ignore[misc]
        ended_s = ranks.launch(recurrence, now)
        launch = _launch(now, program, recurrence, pieces)
        launches.append(launch)
        for prompt in launch.begins:
            begin_s[prompt] = now
        for prompt in launch.ends:
            token_s[prompt] = ended_s
    return Served(launches=tuple(launches), begin_s=tuple(begin_s), first_token_s=tuple(token_s), end_s=ranks.done_s)


def serve_whole(
    cluster: Cluster, arrivals_s: Sequence[float], keys: Sequence[Hashable], program_of: Callable[[int], Program]
) -> Served:
    """Serve prompts one behind the other; those of the same key have the same program."""
    known = Recurrences(cluster)
    ranks: Ranks | None = None
    launches, begin_s, token_s = [], [], []
    for prompt, arrival_s in enumerate(arrivals_s):
        program, recurrence = known.of(keys[prompt], lambda prompt=prompt: program_of(prompt))  # type: ignore[misc]
        ranks = ranks or Ranks(recurrence.num_ranks)
        begin_s.append(max(ranks.first_s, arrival_s))
        token_s.append(ranks.launch(recurrence, arrival_s))
        pieces = [Piece(prompt, 1, 0, 1, True)]
        launches.append(_launch(arrival_s, program, recurrence, pieces))
    assert ranks is not None, "no prompts"
    return Served(launches=tuple(launches), begin_s=tuple(begin_s), first_token_s=tuple(token_s), end_s=ranks.done_s)


def steady_s(launches: Sequence[Launch]) -> float | None:
    """Seconds that these launches take in the long run, if they come over and over; None: too many to work out."""
    matrices = [launch.recurrence.matrix for launch in launches if launch.recurrence is not None]
    first, states = matrices[0], len(matrices[0])
    if all(matrix is first for matrix in matrices):
        return cycle_time_s(first) * len(matrices) if states <= _MOST_STATES else None
    if states**3 * len(matrices) > _MOST_SUMS:
        return None
    product = first
    for matrix in matrices[1:]:
        product = (matrix[:, :, None] + product[None]).max(axis=1)
    return cycle_time_s(product)


def cycle_time_s(matrix: Array) -> float:
    """The largest mean weight of a cycle (Karp, 1978): seconds a launch in the long run."""
    count = len(matrix)
    longest = np.full((count + 1, count), -np.inf)
    longest[0] = 0.0  # from a source beside the graph, which reaches every state
    for step in range(count):
        longest[step + 1] = (matrix + longest[step]).max(axis=1)
    steps = np.arange(count)[:, None]
    with np.errstate(invalid="ignore"):
        means = (longest[count] - longest[:count]) / (count - steps)
    means[~np.isfinite(longest[:count])] = np.inf
    reached = np.isfinite(longest[count])
    return float(means[:, reached].min(axis=0).max())


def _launch(release_s: float, program: Program, recurrence: Recurrence, pieces: Sequence[Piece]) -> Launch:
    return Launch(
        release_s=release_s,
        program=program,
        recurrence=recurrence,
        begins=tuple(piece.prompt for piece in pieces if piece.is_first),
        ends=tuple(piece.prompt for piece in pieces if piece.is_last),
        tokens=sum(piece.tokens for piece in pieces),
        prompts=len(pieces),
    )


def _key(pieces: Sequence[Piece]) -> Hashable:
    """The same for steps that cost the same."""
    return tuple(piece[1:] for piece in pieces)
