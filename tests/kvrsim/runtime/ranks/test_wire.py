"""Values between ranks: JSON that is read by type, and never runs anything."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.kvrsim.runtime.runtime_workers as workers
from kvrsim.partition import Partition
from kvrsim.runtime.plan import RunPlan
from kvrsim.runtime.ranks.faults import RankError
from kvrsim.runtime.ranks.launch import Launch, launch
from kvrsim.runtime.ranks.wire import WireError, decoded, encoded, result_kind
from tests.kvrsim.runtime.runtime_workers import Evil, Forms

numbers = st.floats(allow_nan=False)
plans = st.builds(
    RunPlan,
    strategy=st.sampled_from(["tsp", "kvr"]),
    partition=st.builds(Partition, chunk_lens=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)),
    gather=st.sampled_from(["ring", "collective"]),
    receives_ahead=st.none() | st.integers(1, 5),
)
forms = st.builds(
    Forms,
    pairs=st.dictionaries(st.tuples(st.none() | st.integers(), st.text()), numbers),
    plan=plans,
    maybe=st.none() | numbers,
    names=st.lists(st.text()).map(tuple),
)


@given(value=forms)
def test_what_is_read_is_what_was_written(value: Forms) -> None:
    content = encoded(value)
    json.loads(content)
    assert decoded(content, Forms) == value
    assert decoded(encoded((value, value)), tuple[Forms, ...]) == (value, value)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | numbers | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    kind=st.sampled_from([Forms, RunPlan, tuple[int, str], dict[str, float], Mapping[tuple[int, str], float], int]),
)
def test_what_does_not_fit_is_one_error(value: Any, kind: Any) -> None:
    assert decoded(encoded(value)) == value
    with contextlib.suppress(WireError):
        assert encoded(decoded(encoded(value), kind))


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    count: int
    kind: Literal["a", "b"] = "a"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (pickle.dumps({"count": 1}), Any),
        (b"[" * 100_000, Any),
        (b"", Any),
        (b'{"count": 1.5}', Small),
        (b'{"count": true}', Small),
        (b'{"count": 1, "kind": "c"}', Small),
        (b'{"count": 1, "more": 2}', Small),
        (b"{}", Small),
        (b"[1, 2]", tuple[int, int, int]),
        (b'"x"', float | None),
    ],
)
def test_nonsense_is_refused(content: bytes, kind: Any) -> None:
    with pytest.raises(WireError):
        decoded(content, kind)


def test_a_pickle_from_another_rank_is_not_run(tmp_path: Path) -> None:
    trap = tmp_path / "run"
    with pytest.raises(RankError, match="rank 1 has sent something else than was expected"):
        launch(workers.sends_a_pickle, str(trap), how=Launch(num_ranks=2, timeout_s=10, deadline_s=40))
    assert not trap.exists()
    with pytest.raises(FileNotFoundError):  # and it would have been
        pickle.loads(pickle.dumps(Evil(str(trap / "deeper"))))


def test_results_are_read_by_the_functions_annotation() -> None:
    assert result_kind(workers.reported) is Forms
    assert result_kind(lambda transport: 1) is Any
    assert result_kind(workers.rank_of) == tuple[int, int]
