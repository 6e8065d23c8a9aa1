"""Answers of the planner that the tests of a file share: several tests ask the same question in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from planner import api

Question = str
SHARED = ("plan_of", "map_of", "capacity_of")


def remember(answers: dict[Question, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands take answers from `answers`, by question; one that names a file is answered anew."""
    for name in SHARED:
        monkeypatch.setattr(api, name, _remembered(getattr(api, name), answers))


def _remembered(answer: Callable[..., Any], answers: dict[Question, Any]) -> Callable[..., Any]:
    def ask(*groups: Any, pool: Any = None, on_progress: Any = None, **more: Any) -> Any:
        if "engines" in more:
            more["engines"] = tuple(more["engines"])
        callbacks = {} if on_progress is None else {"on_progress": on_progress}
        if _names_a_file(value for group in groups for value in vars(group).values()):
            return answer(*groups, pool=pool, **callbacks, **more)
        question = repr((answer, [vars(group) for group in groups], _comparable(more)))
        if question not in answers:
            answers[question] = answer(*groups, pool=pool, **callbacks, **more)
        return answers[question]

    return ask


def _names_a_file(values: Iterable[Any]) -> bool:
    for value in values:
        words = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for word in words:
            if isinstance(word, str | Path) and Path(str(word).partition(":")[0]).exists():
                return True
    return False


def _comparable(more: dict[str, Any]) -> dict[str, Any]:
    """Arguments beside the groups; of a search, what `plan_of` does not replace, without its callbacks."""
    search = more.get("search")
    if search is None:
        return more
    return more | {"search": (search.partition, search.allowance, search.engine)}
