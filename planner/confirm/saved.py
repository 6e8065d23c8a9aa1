"""Plans and confirmations in files: what `kvrsim plan -o FILE` and `kvrsim confirm -o FILE` wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvrsim.errors import InputError
from kvrsim.io.schema import JsonObject, Whole

if TYPE_CHECKING:
    from kvrsim.results.results import Plan

PLAN_FILE = "a plan that kvrsim plan -o FILE wrote, or a model's config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedRow:
    """A strategy of the plan, with the partition that the plan gave it."""

    strategy: str
    partition: tuple[int, ...]  # new tokens of each rank, or of each piece of a pipeline
    layers: tuple[int, ...] | None  # layers of each stage; None: it is no pipeline
    ttft_s: float  # predicted by the plan, with its profile


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """A plan in a file: its question and its strategies that fit."""

    file: str
    model: str
    context_len: int  # tokens
    num_gpus: int
    batch: int
    cached_prefix: int  # tokens
    dtype: str
    attention: str
    profile: str  # name of the profile that the plan was made with
    best: str  # name of the plan's best strategy
    rows: tuple[SavedRow, ...]  # strategies that fit, the best first, then the fastest

    @classmethod
    def read(cls, path: str, argument: str = "model") -> SavedPlan | None:
        """Read a plan; None: the file is a model's config.json. Raises InputError naming `argument` for others."""
        data = JsonObject.read(Path(path), argument)
        if data.has("plan"):  # with --emit, the plan is inside the launch
            data = data.child("plan")
        if data.has("model_type"):
            return None
        if not (data.has("question") and data.has("strategies")):
            raise InputError(argument, path, PLAN_FILE)
        if not data.has("best"):
            raise InputError(argument, path, "a plan in which a strategy fits")
        question = data.child("question")
        best = data.child("best").text("strategy")
        rows = [_row(entry) for entry in data.children("strategies") if entry.flag("fits", False)]
        rows.sort(key=lambda row: row.strategy != best)
        if not rows or rows[0].strategy != best:
            raise data.error("best.strategy", "the name of one of its strategies that fit", best)
        return cls(
            file=path,
            model=question.text("model"),
            context_len=question.integer("context_len"),
            num_gpus=question.integer("num_gpus"),
            batch=question.integer("batch"),
            cached_prefix=int(question.get("cached_prefix", Whole, 0)),
            dtype=question.text("dtype"),
            attention=question.text("attention"),
            profile=question.text("profile"),
            best=best,
            rows=tuple(rows),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedConfirmation:
    """What `kvrsim confirm -o FILE` measured."""

    file: str
    question: tuple[str, int, int, int, int]  # model, context, GPUs, batch, cached prefix
    measured_s: dict[tuple[str, tuple[int, ...]], float]  # median TTFT by strategy and partition

    @classmethod
    def read(cls, path: str) -> SavedConfirmation:
        """Read a confirmation. Raises InputError naming the argument `confirmed`."""
        data = JsonObject.read(Path(path), "confirmed")
        if not (data.has("question") and data.has("candidates")):
            raise InputError("confirmed", path, "a confirmation that kvrsim confirm -o FILE wrote")
        question = data.child("question")
        measured_s = {}
        for entry in data.children("candidates"):
            key = entry.text("strategy"), tuple(entry.get("partition", tuple[int, ...]))
            measured_s[key] = entry.number("measured_ttft_s")
        asked = (
            question.text("model"),
            question.integer("context_len"),
            question.integer("num_gpus"),
            question.integer("batch"),
            int(question.get("cached_prefix", Whole, 0)),
        )
        return cls(file=path, question=asked, measured_s=measured_s)

    def of_plan(self, plan: Plan) -> dict[str, float]:
        """The measured TTFTs of the plan's strategies, by name, where the partition is the same.

        Raises InputError if the confirmation is of another question.
        """
        about = plan.question
        asked = (about.model, about.context_len, about.num_gpus, about.batch, about.cached_prefix)
        if asked != self.question:
            accepted = f"a confirmation of {_described(asked)}"
            raise InputError("confirmed", f"{self.file}: {_described(self.question)}", accepted)
        keys = {result.strategy: (result.strategy, result.partition) for result in plan.strategies}
        return {name: self.measured_s[key] for name, key in keys.items() if key in self.measured_s}


def _described(question: tuple[str, int, int, int, int]) -> str:
    """The question in words."""
    model, context_len, num_gpus, batch, cached_prefix = question
    return f"{model}, {context_len} tokens ({cached_prefix} cached) on {num_gpus} GPUs, batch {batch}"


def _row(entry: JsonObject) -> SavedRow:
    layers = entry.get("layers", tuple[int, ...], None)
    return SavedRow(
        strategy=entry.text("strategy"),
        partition=tuple(entry.get("partition", tuple[int, ...])),
        layers=None if layers is None else tuple(layers),
        ttft_s=entry.number("ttft_s"),
    )
