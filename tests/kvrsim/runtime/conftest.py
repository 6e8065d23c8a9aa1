"""These tests need torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from kvrsim.runtime.plan import RankSettings
from kvrsim.runtime.ranks import LaunchedRank, RankPool
from tests.building.torch_tests import ignored_without_torch

collect_ignore_glob = ignored_without_torch()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Run functions on two ranks, which start once for all tests; the result is that of `launch`.

    For functions that leave the transport as they find it.
    """
    how = RankSettings(num_ranks=2)
    with closing(RankPool(2, partial(LaunchedRank, how=how), start_s=how.deadline_s)) as pool:

        def run(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            answers = pool.ask(range(2), ("call", {"function": function, "arguments": arguments}), how.deadline_s)
            return [answers[rank] for rank in range(2)]

        yield run
