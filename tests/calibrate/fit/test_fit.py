"""Parts that all fits share: solving within bounds, and held-out rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from calibrate.fit.fit import Parameter, cross_validated_s, solve


def test_left_out_rows_are_not_seen() -> None:
    labels = [index % 7 for index in range(50)]

    def predict(train: Any, test: Any) -> Any:
        assert not {labels[index] for index in train} & {labels[index] for index in test}
        return np.asarray(test, dtype=float)

    np.testing.assert_array_equal(cross_validated_s(labels, predict, count=4), np.arange(50.0))


def test_solve_keeps_to_its_bounds() -> None:
    sizes = np.geomspace(1.0, 100.0, 20)
    parameters = [
        Parameter(name="start", start=1.0, low=0.0, high=5.0),
        Parameter(name="rate", start=1.0, low=0.1, high=2.0),
    ]
    result = solve(parameters, lambda values, some: values["start"] + sizes[some] / values["rate"], sizes / 8)
    assert result == {"start": pytest.approx(0.0, abs=1e-4), "rate": 2.0}
